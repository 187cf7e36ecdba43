"""Forge, started whole on the demo model: a copy of it whose description of SD 1.x has that model's sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click

from scripts.checks.demo_files import MODEL

FLAGS = ("--api", "--always-cpu", "--all-in-fp32", "--skip-torch-cuda-test", "--skip-version-check",
         "--no-download-sd-model")  # fmt: skip
DESCRIBED = Path("backend/huggingface/runwayml/stable-diffusion-v1-5")
GUESSED = Path("repositories/huggingface_guess/huggingface_guess/model_list.py")


def is_forge(checkout: Path) -> bool:
    return (checkout / "modules_forge").is_dir()


def described(checkout: Path, copy: Path) -> Path:
    """Copy the checkout to `copy`, with the demo's configs, tokenizer and sizes in place of SD 1.5's, and return it."""
    if not (checkout / GUESSED).is_file():
        raise click.ClickException(f"{checkout} lacks {GUESSED}, which Forge's launcher clones.")
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "venv"))
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
        for path in [*(MODEL / part).glob("*.json"), *(MODEL / part).glob("*.txt")]:
            shutil.copy(path, copy / DESCRIBED / part / path.name)
    unet = json.loads((MODEL / "unet" / "config.json").read_text())
    text = (copy / GUESSED).read_text()
    start, end = text.index("class SD15"), text.index("class SD20")
    family = text[start:end]
    for name, theirs, demos in (
        ("context_dim", 768, unet["cross_attention_dim"]),
        ("model_channels", 320, unet["block_out_channels"][0]),
        ("num_heads", 8, unet["attention_head_dim"]),
    ):
        if f'"{name}": {theirs},' not in family:
            raise click.ClickException(f"{checkout / GUESSED} describes SD 1.x otherwise than in June 2025.")
        family = family.replace(f'"{name}": {theirs},', f'"{name}": {demos},')
    (copy / GUESSED).write_text(text[:start] + family + text[end:])
    return copy


def choice(folder: str) -> dict[str, Any]:
    """Return the API's arguments that select a folder of ours, or "" for Forge's own UNet."""
    return {"alwayson_scripts": {"sd-ort": {"args": [bool(folder), folder]}}}


def choose(page: Any, folder: str) -> None:
    """As a user does below the prompt: sd-ort's box is opened and ticked, and a folder chosen."""
    page.click("#txt2img_script_container .label-wrap:has-text('sd-ort')")
    page.check("#txt2img_script_container label:has-text('Generate with sd-ort') input")
    page.click("#txt2img_script_container [aria-label='Folder of models/sd_ort']")
    page.click(f"[role=option]:has-text('{folder}')")
