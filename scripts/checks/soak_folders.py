#!/usr/bin/env python3
"""Pipeline folders of random weights for soak_gpu.py: plain, with a ControlNet, with an IP-Adapter, and a LoRA's file.

    soak_folders.py sdxl /tmp/soak --provider sdcuda [--tasks controlnet ip-adapter] [--templates FOLDER] [--float8]

writes OUT/plain, OUT/controlnet, OUT/ip-adapter and OUT/lora.safetensors, and prints the soak's command. Weights are
made on the GPU if there is one. The image encoder is a CLIP ViT-L. With --float8, OUT/plain has linears, convolutions
and the VAE decoder in float8.

The package has no templates of U-Nets with an IP-Adapter: they are exported, SDXL's in minutes. Elsewhere

    soak_folders.py sdxl FOLDER --write-templates

writes FOLDER/unet.onnx.xz and FOLDER/image_encoder.onnx.xz, without the weights and their memory, for --templates.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from scripts.bench.default_pipeline import save_checkpoint
from scripts.bench.gpu_models import calibration_run
from scripts.bench.lora_swap import make_lora
from scripts.fixtures import ip_adapters, make_templates
from sd_ort.checkpoints.checkpoint import model_class
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.core.files import write_bytes
from sd_ort.export import DEFAULT_OPSET, templates
from sd_ort.runtime.provider_choice import target_of
from sd_ort.stages import optimize

TASKS = ["controlnet", "ip-adapter"]
ADAPTED, ENDING = ("unet", "image_encoder"), ".onnx.xz"  # components with an IP-Adapter that have no bundled template
LARGE = ip_adapters.Sizes(
    {"hidden_size": 1024, "projection_dim": 1024, "image_size": 224, "patch_size": 14, "intermediate_size": 4096,
     "num_hidden_layers": 24, "num_attention_heads": 16}, 4, 16, 1024, 16,
)  # fmt: skip


def write_templates(preset: str, out: Path) -> None:
    """Write the templates of the components that only pipelines with an IP-Adapter have."""
    sizes = sizes_of(preset)
    adapted = make_templates.adapted(preset, dict(sizes.encoder), sizes.tokens)
    for component in ADAPTED:
        graph, recipes, config = make_templates.weightless(adapted, component)
        templates.write_template(out / f"{component}{ENDING}", graph, recipes, config)


def add_templates(folder: Path, checkpoint: Path, options: CheckpointOptions) -> None:
    """Copy the templates in `folder` to the cache as templates of `checkpoint`."""
    source = open_checkpoint(str(checkpoint), options)
    for component in ADAPTED:
        path = templates.cached_path(templates.component_key(source, component, DEFAULT_OPSET, "dynamo"))
        write_bytes(path, (folder / f"{component}{ENDING}").read_bytes())


def sizes_of(preset: str) -> ip_adapters.Sizes:
    return ip_adapters.TINY if preset.endswith("-tiny") else LARGE


def make(
    preset: str, out: Path, provider: str, tasks: list[str], carried: Path | None = None, float8: bool = False
) -> list[str]:
    """Write the folders; returns the soak's arguments."""
    checkpoint, adapter = out / "checkpoint", out / "adapter"
    adapter.mkdir(parents=True)
    modules = save_checkpoint(preset, checkpoint, provider)
    dtype = "float32" if provider == "cpu" else "float16"
    write = partial(optimize, checkpoint, target=target_of(provider), dtype=dtype, calibrate=False)
    if float8:
        inputs = calibration_run(preset, out / "runs.npz")
        write(out / "plain", eight_bits="float8", convolutions=True, vae_decoder=True, inputs=inputs)
    else:
        write(out / "plain")
    make_lora(checkpoint, out / "lora.safetensors", 0)
    arguments = [str(out / "plain"), "--provider", provider, "--lora", str(out / "lora.safetensors")]
    if "controlnet" in tasks:
        model_class("ControlNetModel").from_unet(modules["unet"]).save_pretrained(adapter / "controlnet")
        write(out / "controlnet", checkpoint=CheckpointOptions(controlnet=str(adapter / "controlnet")))
        arguments += ["--controlnet", str(out / "controlnet")]
    if "ip-adapter" in tasks:
        sizes = sizes_of(preset)
        encoder = ip_adapters.make_encoder(adapter / "image_encoder", sizes)
        file = ip_adapters.make_adapter(adapter, preset, sizes=sizes)
        options = CheckpointOptions(ip_adapter=file, image_encoder=encoder)
        if carried:
            add_templates(carried, checkpoint, options)
        write(out / "ip-adapter", checkpoint=options)
        arguments += ["--ip-adapter", str(out / "ip-adapter")]
    return arguments


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS)
    parser.add_argument("--templates", type=Path, help="folder with templates, not to export")
    parser.add_argument("--write-templates", action="store_true", help="write these to OUT, and nothing else")
    parser.add_argument("--float8", action="store_true", help="plain in float8")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.write_templates:
        write_templates(options.preset, options.out)
        return 0
    with torch.no_grad():
        arguments = make(
            options.preset, options.out, options.provider, options.tasks, options.templates, options.float8
        )
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    print("scripts/checks/soak_gpu.py", *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
