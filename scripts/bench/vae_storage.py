"""The demo's VAE decoder with weights in 8 bits (`optimize --weights --vae-weights`). Writes results/vae_storage.md.

    python scripts/bench/vae_storage.py --prompts 40

Decodes the same latents of unseen prompts with each storage and compares the pixels with those of float32: `--prompts`
of the demo's size, and one of each larger size of `vae_eight_bits.py`. Seconds are the processor's of one thread.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import numpy as np

from scripts.bench.vae_eight_bits import SIZES, decoder_inputs, run_decoder
from scripts.report import head, table
from sd_ort import demo
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.stages import optimize

STORAGES = {"float32": None, **{name: WeightStorage(name, vae=True) for name in ("int8", "float8")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="unseen prompts (40)")
    parser.add_argument("--edges", nargs="*", type=int, choices=SIZES, default=list(SIZES), help="sizes (all)")
    parser.add_argument("--work", type=Path, default=Path("out/vae_storage"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/vae_storage.md"), help="the result")
    options = parser.parse_args()
    for label, storage in STORAGES.items():
        if not (options.work / label).is_dir():
            optimize("demo", options.work / label, target="cpu", weights=storage)
    rows: list[tuple[str, ...]] = []
    for edge in options.edges:
        prompts = unseen_prompts(options.prompts if edge == demo.WIDTH else SIZES[edge], 0)
        latents = decoder_inputs(options.work / "float32", prompts, edge, options.work / f"latents-{edge}.npy")
        expected: np.ndarray | None = None
        for label in STORAGES:
            output, seconds = run_decoder(options.work / label, latents)
            images = np.clip(output / 2 + 0.5, 0, 1)
            expected = images if expected is None else expected
            values = [metrics.psnr(ours, theirs, peak=1.0) for ours, theirs in zip(images, expected, strict=True)]
            size = (options.work / label / "vae_decoder" / "model.onnx.data").stat().st_size / 1e6
            quality = ("", "") if label == "float32" else (f"{median(values):.1f}", f"{min(values):.1f}")
            rows.append((f"{edge}²", str(len(prompts)), label, *quality, f"{seconds:.3g}", f"{size:.2f} MB"))
            print(rows[-1], flush=True)
    run = head("scripts/bench/vae_storage.py")
    lines = ["# The demo's VAE decoder with weights in 8 bits", "",
             "Latents of unseen prompts, target cpu, one thread of a shared machine; those of 2048² are mirrored as in "
             "`vae_eight_bits.py`. The activations stay in float32. Winograd convolutions, whose weights have another "
             "form, are left out.", "",
             *table(("image", "images", "weights", "median PSNR, dB", "worst", "processor s an image",
                     "weights on disk"), rows), "",
             f"`{run['command']}` at {run['commit']}, {run['machine']['cpu']}", ""]  # fmt: skip
    files.write_text(options.out, "\n".join(lines))


if __name__ == "__main__":
    main()
