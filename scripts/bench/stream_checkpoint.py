#!/usr/bin/env python3
"""Peak memory and time of `sd-ort optimize CHECKPOINT OUT --bfloat16` for a transformer of real size.

    python scripts/bench/stream_checkpoint.py flux-dev --work /tmp/stream --out results/stream_flux_dev.json

The checkpoint is a diffusers folder with the names and shapes of the preset and several shards, whose data are holes of
the file system: all zeros, which take no disk. OUT has the full size. Both are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sd_ort.checkpoints.presets import PRESETS, preset_checkpoint
from sd_ort.core.files import write_json
from sd_ort.runtime import machine

SHARD_BYTES = 10_000_000_000  # as diffusers writes them


def write_checkpoint(preset: str, model: str, folder: Path) -> int:
    """Write a diffusers folder whose component `model` has weights, and return their bytes in bfloat16."""
    import torch
    from accelerate import init_empty_weights

    from sd_ort.checkpoints.checkpoint import build_model, class_name

    folder.mkdir()
    source = preset_checkpoint(preset, PRESETS[preset], 0)
    source.write_configs(folder)
    for name, config in source.configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    config = source.configs[model]
    with init_empty_weights(), torch.device("meta"):
        shapes = {n: list(t.shape) for n, t in build_model(class_name(config), config).state_dict().items()}
    shards: list[dict[str, list[int]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size + 2 * math.prod(shape) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    for i, shard in enumerate(shards, 1):
        write_shard(folder / model / f"diffusion_pytorch_model-{i:05}-of-{len(shards):05}.safetensors", shard)
    return sum(2 * math.prod(shape) for shape in shapes.values())


def write_shard(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 zeros that takes no disk."""
    header, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="preset of real size, such as flux-dev")
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--target", default="gpu")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the result; emptied")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the measurement")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    try:
        size = write_checkpoint(options.preset, options.model, options.work / "checkpoint")
        command = ["optimize", str(options.work / "checkpoint"), str(options.work / "result"), "--bfloat16"]
        command += ["--component", options.model, "--target", options.target]
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "sd_ort", *command], check=True)
        seconds = time.monotonic() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        written = sum(path.stat().st_size for path in (options.work / "result").rglob("*") if path.is_file())
    finally:
        shutil.rmtree(options.work)
    report = {
        "preset": options.preset, "model": options.model, "weights": "zeros in holes of the file",
        "checkpoint_bytes": size, "written_bytes": written, "peak_resident_bytes": used.ru_maxrss * 1024,
        "seconds": round(seconds, 1), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "command": " ".join(["sd-ort", *command]), "commit": machine.commit(), "machine": machine.cpu_name(),
        "versions": machine.versions(),
    }  # fmt: skip
    write_json(options.out, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
