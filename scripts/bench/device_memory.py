#!/usr/bin/env python3
"""The device memory that images need in our provider, by size and storage of weights: writes results/device_memory.md.

    python scripts/bench/device_memory.py [--presets sd15 sdxl] [--pixels 512 768 1024 1536]

Pipelines of random weights in float16, optimized for our provider: calls of the U-Net for one image with guidance (two
rows; hoisted) and of the VAE decoder. On the host vendor with launches dropped (SD_ORT_SIMULATED_IDLE), so that ONNX
Runtime and the provider's pool do all they do on a GPU but the arithmetic: the smallest `memory_limit` with which a
call succeeds is found by bisection, to STEP. It counts weights, inputs, activations and what the pool loses between
blocks, and neither workspaces of a library's kernels nor the driver's context (about 500 MB).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from scripts.bench.default_pipeline import save_checkpoint
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.runtime import build, machine
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.providers import plugin_devices
from sd_ort.runtime.session import DTYPES
from sd_ort.stages import optimize

os.environ["SD_ORT_SIMULATED_IDLE"] = "1"
MB = 10**6
STEP = 16 * MB
STORAGES: Mapping[str, WeightStorage | None] = {
    "float16": None, "int8": WeightStorage("int8"), "int4": WeightStorage("int4"),
}  # fmt: skip
PRESETS = ("sd15", "sdxl")
HEAD = """# Device memory of images in our provider

Written by `scripts/bench/device_memory.py`, which says how it is measured: float16, one image with guidance, the host
vendor with launches dropped, ONNX Runtime {version}, commit {commit}. In MB of 10^6 bytes; the driver's context, about
500, comes on top. `U-Net`: its weights, of the parts before the loop too. `all resident`: these, the text encoders' and
the VAE's, and what the larger of the two calls takes beside its weights. `--low-memory`: one model at a time, the
largest call with its weights. A decode that does not fit is tiled, so that its column is no limit (one line says so):
tiles of 512 take what 512 x 512 takes.

model | weights | text encoders | U-Net | VAE | pixels | U-Net's call | VAE decode | all resident | `--low-memory`
--- | --- | --- | --- | --- | --- | --- | --- | --- | ---
"""


def weight_bytes(folder: Path, components: str) -> int:
    """Return the bytes of the weights of the components whose names match a pattern."""
    return sum(path.stat().st_size for path in folder.glob(f"{components}/{DATA}"))


def succeeds(model: Path, library: Path, limit: int, latent: int) -> bool:
    """Whether a session with this limit opens and runs a call for one image."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.enable_mem_pattern = settings.enable_mem_reuse = False  # as sessions of the package
    settings.add_provider_for_devices(plugin_devices(library), {"memory_limit": str(limit)})
    try:
        session = ort.InferenceSession(str(model), settings, enable_fallback=0)
        values = session.get_inputs()
        sizes = {"batch": 1 if len(values) == 1 else 2, "height": latent, "width": latent, "sequence": 77}
        shapes = {value.name: [sizes.get(size, size) for size in value.shape] for value in values}
        session.run(None, {value.name: np.zeros(shapes[value.name], DTYPES[value.type]) for value in values})
    except Exception as error:  # pybind's exceptions share no base class
        if re.search("[Aa]lloc|memory", str(error)):
            return False
        raise
    return True


def least(model: Path, library: Path, latent: int, low: int) -> int:
    """Return the smallest limit, to STEP, with which a call succeeds; it fails with `low`."""
    high = low + STEP
    while not succeeds(model, library, high, latent):
        low, high = high, high + 2 * (high - low)
    while high - low > STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if succeeds(model, library, middle, latent) else (middle, high)
    return high


def rows(preset: str, pixels: list[int], library: Path, work: Path) -> list[str]:
    """Return a preset's rows of the table."""
    lines, decodes = [], dict[int, int]()
    with torch.no_grad():
        save_checkpoint(preset, work / "checkpoint", "cpu")
    for storage, weights in STORAGES.items():
        folder = work / storage
        optimize(work / "checkpoint", folder, target="gpu", dtype="float16", calibrate=False, weights=weights)
        unet, vae = (folder / name / MODEL for name in ("unet", "vae_decoder"))
        step_weights, vae_weights = (model.with_name(DATA).stat().st_size for model in (unet, vae))
        text, unets = weight_bytes(folder, "text_encoder*"), weight_bytes(folder, "unet*")
        for side in pixels:
            step = least(unet, library, side // 8, step_weights)
            decodes[side] = decodes.get(side) or least(vae, library, side // 8, vae_weights)
            resident = text + unets + vae_weights + max(step - step_weights, decodes[side] - vae_weights)
            numbers = (text, unets, vae_weights, step, decodes[side], resident, max(step, decodes[side], text))
            cells = [f"{number / MB:.0f}" for number in numbers]
            lines.append(" | ".join([preset, storage, *cells[:3], str(side), *cells[3:]]))
            print(lines[-1], flush=True)
        shutil.rmtree(folder)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    parser.add_argument("--pixels", type=int, nargs="+", default=[512, 768, 1024, 1536])
    parser.add_argument("--out", type=Path, default=Path("results/device_memory.md"))
    options = parser.parse_args()
    library = build.build(cpu=True, provider=True).with_name(PROVIDER_LIBRARIES["simulated"])
    text = HEAD.format(version=ort.__version__, commit=machine.commit())
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as work:
            text += "\n".join([*rows(preset, options.pixels, library, Path(work)), ""])
    options.out.write_text(text)


if __name__ == "__main__":
    main()
