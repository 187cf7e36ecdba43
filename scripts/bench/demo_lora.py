#!/usr/bin/env python3
"""The demo LoRAs: is their style drawn, and is it drawn as diffusers draws it?

    python scripts/bench/demo_lora.py [--prompts 60] [--work FOLDER] [--out results/demo_lora.json]

Unseen prompts are drawn by our pipeline, on a CPU in float32, without a LoRA, with each and with both, and read back
from the pixels (`sd_ort.demo.fidelity`): as what the prompt says, and as what the styles make of it. A few are drawn by
diffusers too, with the same LoRAs added to its weights, at three strengths and with both at once. Beside the JSON
lies a picture: a row without, with each and with both. Exits with 1 where a picture is below 60 dB.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from diffusers import StableDiffusionPipeline as Diffusers
from PIL import Image
from safetensors.torch import load_file

from sd_ort import StableDiffusionPipeline, demo
from sd_ort.core.files import write_bytes, write_json
from sd_ort.core.metrics import psnr
from sd_ort.demo import styles
from sd_ort.demo.fidelity import score
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.stages import optimize

BOUND = 60.0  # dB
BATCH = 10
SHOWN = 8  # pictures of a row
SETS: tuple[tuple[str, ...], ...] = ((), *((style,) for style in styles.STYLES), tuple(styles.STYLES))
STRENGTHS: tuple[Mapping[str, float], ...] = (
    {"night": 0.5}, {"night": 1.0}, {"night": 1.5}, {"night": 0.8, "gold": -0.5},
)  # fmt: skip


def draw(pipeline: Any, prompts: Sequence[str]) -> np.ndarray:
    """Pictures (N, H, W, 3) in 0..1, picture i from seed i; `pipeline` is ours or diffusers'."""
    made = []
    for start in range(0, len(prompts), BATCH):
        part = list(prompts[start : start + BATCH])
        seeds = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        made += [pipeline(part, num_inference_steps=demo.STEPS, guidance_scale=demo.GUIDANCE, generator=seeds,
                          height=demo.HEIGHT, width=demo.WIDTH, output_type="np").images]  # fmt: skip
    return np.concatenate(made)


def eight_bits(pictures: np.ndarray) -> np.ndarray:
    made: np.ndarray = (255 * pictures).round().astype(np.uint8)
    return made


def fidelity(pictures: np.ndarray, prompts: Sequence[str], used: Sequence[str]) -> dict[str, Any]:
    """Percent of pictures that show their prompt, and that show it in the styles in use, or in both or each of all."""
    seen = eight_bits(pictures)
    row: dict[str, Any] = {"as the prompt says": round(100 * score(prompts, seen).share, 1)}
    for names in SETS[1:]:
        found = score([styles.styled_prompt(names, prompt) for prompt in prompts], seen)
        row[f"in {' and '.join(names)}"] = round(100 * found.share, 1)
        if names == tuple(used):
            row["failures"] = dict(found.failures)
    return row


def fuse(unet: Any, clean: Mapping[str, torch.Tensor], strengths: Mapping[str, float]) -> None:
    """Give diffusers' UNet the clean weights with the LoRAs added."""
    weights = dict(clean)
    for style, strength in strengths.items():
        tensors = {name: tensor.float() for name, tensor in load_file(styles.lora_path(style)).items()}
        for name, down in tensors.items():
            if name.endswith("lora_A.weight"):
                weight = name.removeprefix("unet.").replace("lora_A.", "")
                weights[weight] = weights[weight] + strength * tensors[name.replace("lora_A", "lora_B")] @ down
    unet.load_state_dict(weights)


def compared(ours: Any, prompts: Sequence[str]) -> dict[str, float]:
    """Strengths -> the lowest PSNR of our pictures to diffusers', in dB."""
    theirs: Any = Diffusers.from_pretrained(demo.MODEL_DIR, torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    clean = {name: tensor.clone() for name, tensor in theirs.unet.state_dict().items()}
    found = {}
    for strengths in STRENGTHS:
        fuse(theirs.unet, clean, strengths)
        ours.set_adapters(list(strengths), list(strengths.values()))
        pairs = zip(*(draw(each, prompts) for each in (ours, theirs)), strict=True)
        label = ", ".join(f"{name} {strength}" for name, strength in strengths.items())
        found[label] = round(min(psnr(*pair, peak=1.0) for pair in pairs), 1)
        click.echo(f"{label}: {found[label]} dB")
    return found


def sheet(rows: Sequence[np.ndarray]) -> bytes:
    """PNG of pictures (N, H, W, 3), one row each, at half their size."""
    whole = np.concatenate([np.concatenate(list(eight_bits(pictures[:SHOWN])), axis=1) for pictures in rows])
    image, buffer = Image.fromarray(whole), io.BytesIO()
    image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


@click.command()
@click.option("--prompts", "count", default=60, show_default=True, help="To read back.")
@click.option("--compared", "few", default=2, show_default=True, help="To draw with diffusers too.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("out/demo_lora"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/demo_lora.json"), show_default=True)
def main(count: int, few: int, work: Path, out: Path) -> None:
    folder = work / "demo-cpu"
    if not folder.is_dir():
        optimize("demo", folder, target="cpu", on_progress=click.echo)
    ours = StableDiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    prompts = styles.styleable_prompts(count)
    result: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "prompts": count}
    result["bytes"] = {style: styles.lora_path(style).stat().st_size for style in styles.STYLES}
    result |= {"steps": demo.STEPS, "guidance": demo.GUIDANCE, "percent right": {}}
    rows = []
    for used in SETS:
        started = time.monotonic()
        for style in set(used) - set(ours.lora_state.scales):
            ours.load_lora_weights(styles.lora_path(style), style)
        if used:
            ours.set_adapters(list(used))
        rows.append(draw(ours, prompts))
        label = " and ".join(used) or "without"
        row = result["percent right"][label] = fidelity(rows[-1], prompts, used)
        shown = {name: share for name, share in row.items() if name != "failures"}
        click.echo(f"{label}: {shown}, {time.monotonic() - started:.0f} s")
    result["PSNR to diffusers"] = compared(ours, prompts[:few])
    write_json(out, result)
    write_bytes(out.with_suffix(".png"), sheet(rows))
    sys.exit(int(min(result["PSNR to diffusers"].values()) < BOUND))


if __name__ == "__main__":
    main()
