#!/usr/bin/env python3
"""Pipeline folders of random weights for soak_gpu.py: plain, with a ControlNet, with an IP-Adapter, and a LoRA's file.

    soak_folders.py sdxl /tmp/soak --provider sdcuda [--tasks controlnet ip-adapter]

writes OUT/plain, OUT/controlnet, OUT/ip-adapter and OUT/lora.safetensors, and prints the soak's command. Weights are
made on the GPU if there is one. The image encoder is a CLIP ViT-L.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

from scripts.bench.default_pipeline import save_checkpoint
from scripts.bench.lora_swap import make_lora
from scripts.fixtures import ip_adapters
from sd_ort.benchmark.engine_selection import target_of
from sd_ort.checkpoints.checkpoint import model_class
from sd_ort.checkpoints.open import CheckpointOptions
from sd_ort.stages import optimize

TASKS = ["controlnet", "ip-adapter"]
LARGE = ip_adapters.Sizes(
    {"hidden_size": 1024, "projection_dim": 1024, "image_size": 224, "patch_size": 14, "intermediate_size": 4096,
     "num_hidden_layers": 24, "num_attention_heads": 16}, 4, 16, 1024, 16,
)  # fmt: skip


def make(preset: str, out: Path, provider: str, tasks: list[str]) -> list[str]:
    """Write the folders; returns the soak's arguments."""
    checkpoint, adapter = out / "checkpoint", out / "adapter"
    adapter.mkdir(parents=True)
    modules = save_checkpoint(preset, checkpoint, provider)
    dtype = "float32" if provider == "cpu" else "float16"
    write = partial(optimize, checkpoint, target=target_of(provider), dtype=dtype, calibrate=False)
    write(out / "plain")
    make_lora(checkpoint, out / "lora.safetensors", 0)
    arguments = [str(out / "plain"), "--provider", provider, "--lora", str(out / "lora.safetensors")]
    if "controlnet" in tasks:
        model_class("ControlNetModel").from_unet(modules["unet"]).save_pretrained(adapter / "controlnet")
        write(out / "controlnet", checkpoint=CheckpointOptions(controlnet=str(adapter / "controlnet")))
        arguments += ["--controlnet", str(out / "controlnet")]
    if "ip-adapter" in tasks:
        sizes = ip_adapters.TINY if preset.endswith("-tiny") else LARGE
        encoder = ip_adapters.make_encoder(adapter / "image_encoder", sizes)
        file = ip_adapters.make_adapter(adapter, preset, sizes=sizes)
        options = CheckpointOptions(ip_adapter=file, image_encoder=encoder)
        write(out / "ip-adapter", checkpoint=options)
        arguments += ["--ip-adapter", str(out / "ip-adapter")]
    return arguments


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument(
        "--tasks", nargs="*", default=["controlnet", "ip-adapter"], choices=("controlnet", "ip-adapter")
    )
    options = parser.parse_args()
    started = time.perf_counter()
    with torch.no_grad():
        arguments = make(options.preset, options.out, options.provider, options.tasks)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    print("scripts/checks/soak_gpu.py", *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
