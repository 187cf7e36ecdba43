#!/usr/bin/env python3
"""A picture drawn with an IP-Adapter on a GPU, beside diffusers with the same random weights.

    python scripts/checks/ip_adapter_gpu.py [--plus] [--preset sd15] [--providers cuda,sdcuda] [--out FILE.json]
    python scripts/checks/ip_adapter_gpu.py --preset sd15-tiny --providers cpu                  # to try it

A checkpoint, an adapter of the published shape and an image encoder of fewer layers are made below --work, and exported
by the TorchScript exporter, which needs no more than torch. What each provider draws is compared with diffusers in
float32 and in half precision, and with what it draws without looking at the picture.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image

from scripts.bench.default_pipeline import PROMPT, SIZES, device_of, models, where
from scripts.fixtures import ip_adapters
from sd_ort import StableDiffusionPipeline
from sd_ort.benchmark.engine_selection import target_of
from sd_ort.checkpoints.open import CheckpointOptions
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.files import write_json
from sd_ort.core.metrics import psnr
from sd_ort.stages import optimize

STARTED = time.perf_counter()


def say(line: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {line}", flush=True)


def make(work: Path, preset: str, plus: bool, device: str) -> tuple[Path, Path]:
    """A checkpoint with random weights, in float16, and an adapter's file, its image encoder beside it."""
    model, files = work / preset, work / "adapter"
    sizes = ip_adapters.TINY if "tiny" in preset else ip_adapters.REAL
    if not model.is_dir():
        model.mkdir(parents=True)
        open_preset(preset, 0).write_configs(model)
        for name, module in models(preset, device).items():
            module.half().save_pretrained(model / name)
        ip_adapters.make_encoder(files / "image_encoder", sizes)
    adapter = ip_adapters.make_adapter(files, preset, plus, sizes)
    say(f"{adapter}: {adapter.stat().st_size / 1e6:.0f} MB")
    return model, adapter


def picture() -> Image.Image:
    y, x = np.mgrid[:256, :256]
    return Image.fromarray(np.stack([x, y, x * y % 256], -1).astype(np.uint8))


def theirs(model: Path, adapter: Path, device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> np.ndarray:
    """diffusers' picture, its noise drawn in float32 as ours."""
    import diffusers

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(model, torch_dtype=dtype, safety_checker=None)
    pipeline.load_ip_adapter(
        str(adapter.parent), subfolder="", weight_name=adapter.name, image_encoder_folder="image_encoder"
    )
    pipeline.to(device, dtype)
    pipeline.set_progress_bar_config(disable=True)
    side = arguments["height"] // pipeline.vae_scale_factor
    noise = torch.randn((1, 4, side, side), generator=torch.Generator().manual_seed(0))
    output = pipeline(PROMPT, **arguments, latents=noise.to(device, dtype), ip_adapter_image=picture())
    return np.asarray(output.images[0])


def ours(model: Path, adapter: Path, provider: str, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """With the picture, and without looking at it."""
    target = target_of(provider)
    folder = model.parent / f"{adapter.stem}-{target}"
    if not folder.is_dir():
        options: dict[str, Any] = {"dtype": "float16" if provider != "cpu" else "float32", "exporter": "torchscript"}
        options |= {
            "opset": 17,
            "calibrate": False,
            "checkpoint": CheckpointOptions(ip_adapter=adapter),
            "on_progress": say,
        }
        components = ["text_encoder", "unet", "vae_decoder", "image_encoder"]
        optimize(str(model), folder, target=target, components=components, **options)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider)
    drawn = []
    for scale in (1.0, 0.0):
        pipeline.set_ip_adapter_scale(scale)
        output = pipeline(PROMPT, **arguments, generator=0, ip_adapter_image=picture(), progress=False)
        drawn.append(np.asarray(output.images[0]))
    return drawn[0], drawn[1]


@click.command()
@click.option("--preset", default="sd15", show_default=True)
@click.option("--plus", is_flag=True, help="IP-Adapter Plus.")
@click.option("--providers", default="cuda,sdcuda", show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("out/ip_adapter"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(preset: str, plus: bool, providers: str, steps: int, work: Path, out: Path | None) -> None:
    device, side = device_of(providers), SIZES[preset]
    with torch.no_grad():
        model, adapter = make(work, preset, plus, device)
        arguments = {"num_inference_steps": steps, "guidance_scale": 5.0, "height": side, "width": side}
        types = [torch.float32] if device == "cpu" else [torch.float32, torch.float16]
        expected = {str(dtype): theirs(model, adapter, device, dtype, arguments) for dtype in types}
        say("diffusers drew")
        rows: dict[str, Any] = {
            name: {"psnr_float32": psnr(each, expected["torch.float32"])}
            for name, each in list(expected.items())[1:]
        }  # fmt: skip
        for provider in providers.split(","):
            seen, unseen = ours(model, adapter, provider, arguments)
            rows[provider] = {f"psnr_{n.removeprefix('torch.')}": psnr(seen, each) for n, each in expected.items()}
            rows[provider]["psnr_without_the_picture"] = psnr(seen, unseen)
            say(f"{provider}: {json.dumps(rows[provider])}")
    report = {**where(), "preset": preset, "plus": plus, "random_weights": True, "steps": steps, "rows": rows}
    say(json.dumps(rows))
    if out:
        write_json(out, report)


if __name__ == "__main__":
    main()
