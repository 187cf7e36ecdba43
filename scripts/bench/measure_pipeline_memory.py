"""Peak memory of drawing with all components open and with --low-memory, and of decoding with VAE tiling.

Each case runs in a process of its own; its peak is the highest resident set the kernel saw. The tiled decode is of
`--decode` x `--decode` pixels and random latents. Writes JSON.

    python scripts/bench/measure_pipeline_memory.py FOLDER --out results/pipeline_memory.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = ("all open", "low memory", "vae tiled")


def run(case: str, folder: Path, size: int, steps: int, decoded: int) -> None:
    """Draw or decode, and print the peak."""
    import torch

    from sd_ort import StableDiffusionPipeline

    options: dict[str, Any] = {"low_memory": case != "all open", "vae_tiling": case == "vae tiled"}
    pipeline = StableDiffusionPipeline.from_pretrained(folder, **options)
    if case == "vae tiled":
        side = decoded // pipeline.vae_scale_factor
        latents = torch.randn((1, pipeline.latent_channels, side, side), generator=torch.Generator().manual_seed(0))
        pixels = list(pipeline.decode(latents).shape[2:])
    else:
        pipeline("a house", size, size, steps, generator=0)
        pixels = [size, size]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"case": case, "pixels": pixels, "peak_MiB": round(peak)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", choices=CASES)
    given = parser.parse_args()
    if given.case:
        return run(given.case, given.folder, given.size, given.steps, given.decode)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        command = [sys.executable, __file__, str(given.folder), "--case", case]
        command += ["--size", str(given.size), "--steps", str(given.steps), "--decode", str(given.decode)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(rows[-1], flush=True)
    from sd_ort.core import files, pipeline_folder
    from sd_ort.runtime import machine

    sizes = {
        p.parent.name: sum(f.stat().st_size for f in p.parent.iterdir()) for p in given.folder.glob("*/model.onnx")
    }
    manifest = pipeline_folder.read_manifest(given.folder)
    if given.out:
        report = {
            "model": manifest.get("source", {}),
            "component_bytes": sizes,
            "machine": machine.machine(),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "rows": rows,
        }
        files.write_json(given.out, report)


if __name__ == "__main__":
    main()
