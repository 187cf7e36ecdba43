#!/usr/bin/env python3
"""Peak memory and time of `sd-ort optimize CHECKPOINT OUT` for a pipeline of real size.

    python scripts/bench/stream_checkpoint.py flux2-dev --work /tmp/stream --out results/stream_flux2_dev.json \
        --bfloat16 --free-zeros

The checkpoint is a diffusers folder with the names and shapes of the preset in bfloat16, whose data are holes of the
file system: all zeros, which take no disk. OUT has its full size, unless `--free-zeros` (Linux) makes holes of its
zeros while it is written. Both are removed afterwards. The command is killed if less than `--least-free` GB of the disk
are left. Options that are not listed here are those of `sd-ort optimize`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.files import write_json
from sd_ort.runtime import machine

SHARD_BYTES = 10_000_000_000  # as diffusers writes them
GB = 1e9
BLOCK = 16 << 20  # bytes that become a hole if all are zeros
ZEROS = bytes(BLOCK)
KEEP_SIZE_AND_PUNCH_HOLE = 3  # mode of Linux' fallocate


def write_checkpoint(preset: str, folder: Path, components: list[str]) -> dict[str, int]:
    """Write a diffusers folder, and return the bytes of its models by name. `components`: [] for all."""
    import torch

    from sd_ort.checkpoints.checkpoint import build_model, class_name

    folder.mkdir()
    source = open_preset(preset, 0)
    source.write_configs(folder)
    sizes = {}
    for name, config in source.configs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        if components and name not in components:
            continue
        with torch.device("meta"):
            shapes = {n: list(t.shape) for n, t in build_model(class_name(config), config).state_dict().items()}
        stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
        sizes[name] = write_shards(folder / name, stem, shapes)
    return sizes


def write_shards(folder: Path, stem: str, shapes: dict[str, list[int]]) -> int:
    """Write safetensors files of tensors with these shapes, and return the tensors' bytes."""
    shards: list[dict[str, list[int]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size + 2 * math.prod(shape) > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    for i, shard in enumerate(shards, 1):
        part = f"-{i:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        write_shard(folder / f"{stem}{part}.safetensors", shard)
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


def free_zeros(folder: Path, looked_at: dict[int, int]) -> None:
    """Make holes of the blocks of zeros in a folder's files, which grow at their ends alone.

    `looked_at`: inode -> bytes of the file that an earlier call looked at.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names if name.endswith(".data")]
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:  # it may be moved
            status = os.fstat(file.fileno())
            for start in range(looked_at.get(status.st_ino, 0), status.st_size - BLOCK + 1, BLOCK):
                looked_at[status.st_ino] = start + BLOCK
                if os.pread(file.fileno(), BLOCK, start) != ZEROS:
                    continue
                where = ctypes.c_int64(start), ctypes.c_int64(BLOCK)
                if libc.fallocate(file.fileno(), KEEP_SIZE_AND_PUNCH_HOLE, *where):
                    raise OSError(ctypes.get_errno(), "No hole was made", str(path))


def run(command: list[str], folder: Path, least_free: float, is_freed: bool) -> None:
    """Run a command that writes to `folder`. Exits if it fails, or leaves too little of the disk.

    `is_freed`: zeros of its external data take no disk.
    """
    process = subprocess.Popen(command)
    looked_at: dict[int, int] = {}
    try:
        while process.poll() is None:
            if is_freed:
                free_zeros(folder, looked_at)
            if shutil.disk_usage(folder).free < least_free * GB:
                raise SystemExit(f"Less than {least_free} GB of the disk were left: give --work on a larger one.")
            time.sleep(1)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit(process.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("preset", help="preset of real size, such as flux-dev")
    parser.add_argument("--component", action="append", default=[], help="only this one [default: all]")
    parser.add_argument("--target", default="gpu")
    parser.add_argument(
        "--free-zeros", action="store_true", help="make holes of OUT's zeros [default: OUT takes its size]"
    )
    parser.add_argument("--least-free", type=float, default=4, metavar="GB", help="disk to leave [default: 4]")
    parser.add_argument(
        "--work", type=Path, required=True, help="new folder for the checkpoint and the result; removed"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the measurement")
    options, others = parser.parse_known_args()
    commit = machine.commit()
    options.work.mkdir(parents=True)
    try:
        sizes = write_checkpoint(options.preset, options.work / "checkpoint", options.component)
        command = ["optimize", str(options.work / "checkpoint"), str(options.work / "result"), *others]
        command += ["--target", options.target, *(f"--component={name}" for name in options.component)]
        started = time.monotonic()
        run([sys.executable, "-m", "sd_ort", *command], options.work, options.least_free, options.free_zeros)
        seconds = time.monotonic() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        written = sum(path.stat().st_size for path in (options.work / "result").rglob("*") if path.is_file())
    finally:
        shutil.rmtree(options.work)
    report = {
        "preset": options.preset, "weights": "zeros in holes of the files", "checkpoint_bytes": sizes,
        "written_zeros": "holes of the files" if options.free_zeros else "on the disk",
        "written_bytes": written, "peak_resident_bytes": used.ru_maxrss * 1024, "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "command": " ".join(["sd-ort", *command]),
        "commit": commit, "machine": machine.cpu_name(), "versions": machine.versions(),
    }  # fmt: skip
    write_json(options.out, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
