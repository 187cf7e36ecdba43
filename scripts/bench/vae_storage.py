"""The demo's VAE decoder with weights in 8 bits (`optimize --weights --vae-weights`). Writes results/vae_storage.md.

    python scripts/bench/vae_storage.py --prompts 40

Decodes the same latents of unseen prompts with each storage and compares the pixels with those of float32. Seconds are
the processor's of one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np

from scripts.bench.vae_eight_bits import decoder_inputs
from scripts.report import head, table
from sd_ort import demo
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.runtime.session import SessionOptions, load
from sd_ort.stages import optimize

STORAGES = {"float32": None, **{name: WeightStorage(name, vae=True) for name in ("int8", "float8")}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="unseen prompts (40)")
    parser.add_argument("--work", type=Path, default=Path("out/vae_storage"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/vae_storage.md"), help="the result")
    options = parser.parse_args()
    for label, storage in STORAGES.items():
        if not (options.work / label).is_dir():
            optimize("demo", options.work / label, target="cpu", weights=storage)
    prompts = unseen_prompts(options.prompts, 0)
    latents = decoder_inputs(options.work / "float32", prompts, demo.WIDTH, options.work / "latents.npy")
    rows: list[tuple[str, ...]] = []
    reference: np.ndarray | None = None
    for label in STORAGES:
        decoder = load(options.work / label, "vae_decoder", options=SessionOptions(threads=1))
        decoder(latent_sample=latents[:1])
        started = time.process_time()
        images = np.concatenate([next(iter(decoder(latent_sample=each[None]).values())) for each in latents])
        seconds = (time.process_time() - started) / len(latents)
        images = np.clip(images / 2 + 0.5, 0, 1)
        reference = images if reference is None else reference
        values = [metrics.psnr(ours, theirs, peak=1.0) for ours, theirs in zip(images, reference, strict=True)]
        size = (options.work / label / "vae_decoder" / "model.onnx.data").stat().st_size / 1e6
        quality = ("", "") if label == "float32" else (f"{median(values):.1f}", f"{min(values):.1f}")
        rows.append((label, *quality, f"{size:.2f} MB", f"{1e3 * seconds:.0f}"))
    run = head("scripts/bench/vae_storage.py")
    lines = ["# The demo's VAE decoder with weights in 8 bits", "",
             f"The latents of {len(prompts)} unseen prompts, target cpu, one thread of a shared machine. The "
             "activations stay in float32. Winograd convolutions, whose weights have another form, are left out.", "",
             *table(("weights", "median PSNR, dB", "worst", "weights on disk", "processor ms an image"), rows), "",
             f"`{run['command']}` at {run['commit']}, {run['machine']['cpu']}", ""]  # fmt: skip
    files.write_text(options.out, "\n".join(lines))


if __name__ == "__main__":
    main()
