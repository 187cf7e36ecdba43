#!/usr/bin/env python3
"""The least device memory that a model call needs in our provider, by size: writes results/provider_memory.md.

    python scripts/bench/provider_memory.py [--models unet vae_decoder] [--latents 32 64 96 128]

The graphs are SD 1.5's decoder and its U-Net for one image with guidance (two rows; hoisted), from the package's own
templates with made-up weights, in float16, lowered for our provider. On the host vendor with launches dropped
(SD_ORT_SIMULATED_IDLE), so that ONNX Runtime and the provider's pool do all they do on a GPU but the arithmetic: the
smallest `memory_limit` with which a call succeeds is found by bisection, to 1 MiB. It counts weights, inputs,
activations, what the pool loses between blocks, and no workspace of a library's kernels: on a GPU a convolution of
cuDNN's, or wide heads of attention by products, take theirs from the same pool.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from scripts.checks.fused_hashes import filled
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.export.templates import BUNDLED
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime import build, machine
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.providers import plugin_devices
from sd_ort.runtime.session import DTYPES

os.environ["SD_ORT_SIMULATED_IDLE"] = "1"
ROOT = Path(__file__).resolve().parents[2]

MIB = 1 << 20


def make(name: str, work: Path) -> Path:
    raw, optimized = (work / stage / name / MODEL for stage in ("raw", "made"))
    if not raw.is_file():
        raw.parent.mkdir(parents=True)
        onnx.save(filled(BUNDLED / f"sd15.{name}.onnx.xz"), raw, save_as_external_data=True, location=DATA)
    optimize_component(raw, optimized, TARGETS["gpu"], "float16", calibrate=False, hoisted=name == "unet")
    return optimized


def session_of(model: Path, library: Path, limit: int, profile: Path | None = None) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.enable_mem_pattern = settings.enable_mem_reuse = False  # as sessions of the package
    if profile is not None:
        settings.enable_profiling, settings.profile_file_prefix = True, str(profile)
    settings.add_provider_for_devices(plugin_devices(library), {"memory_limit": str(limit)})
    return ort.InferenceSession(str(model), settings, enable_fallback=0)


def call(session: ort.InferenceSession, latent: int) -> None:
    """One image: a decode of it, or a U-Net's call for it with guidance."""
    values = session.get_inputs()
    sizes = {"batch": 1 if len(values) == 1 else 2, "height": latent, "width": latent, "sequence": 77}
    session.run(
        None,
        {value.name: np.zeros([sizes.get(size, size) for size in value.shape], DTYPES[value.type]) for value in values},
    )


def succeeds(model: Path, library: Path, limit: int, latent: int) -> bool:
    try:
        call(session_of(model, library, limit), latent)
    except Exception as error:  # pybind's exceptions share no base class
        if re.search("[Aa]lloc|memory", str(error)):
            return False
        raise
    return True


def activations(model: Path, library: Path, latent: int, work: Path) -> list[int]:
    """Bytes of every node's outputs, largest first, from ONNX Runtime's profile."""
    session = session_of(model, library, 1 << 40, work / "profile")
    call(session, latent)
    events = json.loads(Path(session.end_profiling()).read_text())
    sizes = [
        math.prod(shape) * (2 if kind == "float16" else 4)
        for event in events
        for output in event.get("args", {}).get("output_type_shape", [])
        for kind, shape in output.items()
        if "float" in kind
    ]
    return sorted(sizes, reverse=True)


def least(model: Path, library: Path, latent: int, low: int, high: int) -> int:
    """The smallest limit, in MiB, with which a call succeeds; it fails with `low` and succeeds with `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        if succeeds(model, library, middle * MIB, latent):
            high = middle
        else:
            low = middle
    return high


HEAD = """# Memory of a model call in our provider

Written by `scripts/bench/provider_memory.py`, which says how it is measured: SD 1.5, float16, on the host vendor with
launches dropped. In MiB. ONNX Runtime {version}, commit {commit}.
"""
WHAT = {
    "vae_decoder": """
## A VAE decode of one image

Two of the largest live at once: a convolution's input and its result. Norms write over what nobody else
reads, and the shortcut around a block that halves the channels runs before it. The rest is mostly small
images, and what lies between the blocks of the pool.
""",
    "unet": """
## A U-Net's call for one image with guidance

The largest is the product before a gate, next to the half that the gate makes of it; beside them live the images that
wait for their shortcuts, and the prompt's keys and values. The weights lie in segments of 16 MiB of the pool.
""",
}
COLUMNS = "| image | weights | two largest activations | least for a call | beyond the weights, in largest ones |"


def rows(name: str, latents: list[int], library: Path, work: Path | None) -> list[str]:
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make(name, work or Path(scratch))
        weights = (model.parent / DATA).stat().st_size / MIB
        for latent in latents:
            sizes = [size / MIB for size in activations(model, library, latent, Path(scratch))]
            most = math.ceil(weights + 8 * sizes[0]) + 128
            peak = least(model, library, latent, int(weights), most)
            lines.append(
                f"| {8 * latent}x{8 * latent} | {weights:.0f} | {sizes[0]:.0f} + {sizes[1]:.0f} | {peak} "
                f"| {(peak - weights) / sizes[0]:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WHAT), choices=list(WHAT))
    parser.add_argument("--latents", type=int, nargs="+", default=[32, 64, 96, 128])
    parser.add_argument("--work", type=Path, help="a folder whose raw graphs are taken again")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "provider_memory.md")
    options = parser.parse_args()
    library = build.build(cpu=True, provider=True).with_name(PROVIDER_LIBRARIES["simulated"])
    text = HEAD.format(version=ort.__version__, commit=machine.commit())
    for name in options.models:
        text += "\n".join(
            [WHAT[name], COLUMNS, "|---|---|---|---|---|", *rows(name, options.latents, library, options.work), ""]
        )
    options.out.write_text(text)


if __name__ == "__main__":
    main()
