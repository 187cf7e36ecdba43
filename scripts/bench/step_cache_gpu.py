#!/usr/bin/env python3
"""Whole images with DeepCache on a GPU, as called: full steps and three intervals, in one process.

    python scripts/bench/step_cache_gpu.py FOLDER --provider sdcuda --steps 50 --out results/step_cache_h200.json

FOLDER is an optimized folder of Stable Diffusion, for example of random weights: the time does not depend on them, and
the quality is that of the trained demo model (results/step_cache.md).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from sd_ort import AutoPipelineForText2Image
from sd_ort.runtime import machine

INTERVALS = (1, 2, 3, 5)
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="sdcuda")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pipeline = AutoPipelineForText2Image.from_pretrained(options.folder, provider=options.provider)
    seconds: dict[int, list[float]] = {interval: [] for interval in INTERVALS}
    for interval in INTERVALS:
        if interval > 1:
            pipeline.enable_cache(interval)
        for round_ in range(2 + ROUNDS):  # the first two open sessions and capture
            started = time.perf_counter()
            pipeline("a red square", num_inference_steps=options.steps, generator=0, progress=False)
            if round_ > 1:
                seconds[interval].append(time.perf_counter() - started)
    full = median(seconds[1])
    rows = [
        {"interval": interval, "seconds": median(times), "all": sorted(times), "speedup": full / median(times)}
        for interval, times in seconds.items()
    ]
    for row in rows:
        print(f"N = {row['interval']}: {row['seconds']:.4f} s, {row['speedup']:.2f} times", flush=True)
    result = {
        "folder": options.folder.name, "provider": options.provider, "steps": options.steps,
        "machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit(), "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
