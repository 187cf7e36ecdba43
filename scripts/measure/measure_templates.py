"""Time and memory of `sd-ort optimize CHECKPOINT OUT` with a template and without, of a checkpoint with random weights.

    python scripts/measure/measure_templates.py sd15 [sdxl ...] [--target cuda] [--out results/templates.md]

For each preset two diffusers folders in fp16 are written, of other weights. The first is exported and optimized, which
keeps its template; the second fills it, in a process of its own whose peak memory is what the system says. The disk's
speed is that of copying the second checkpoint to where the output goes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from sd_ort.family.checkpoints import PresetSource
from sd_ort.runtime.machine import machine

WORK = """
import json, resource, sys, time
started = time.perf_counter()
from pathlib import Path
from sd_ort.from_checkpoint import optimize_checkpoint
lines = []
optimize_checkpoint(sys.argv[1], Path(sys.argv[2]), target=sys.argv[3], dtype="float16", report=lines.append)
print(json.dumps({
    "seconds": time.perf_counter() - started, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "filled": any("nothing was traced" in line for line in lines),
}))
"""


def checkpoint(preset: str, seed: int, folder: Path) -> Path:
    """A diffusers folder of a preset with random weights, in fp16."""
    folder.mkdir()
    source = PresetSource(preset, seed)
    source.write_configs(folder)
    for name in source.configs:
        model: Any = source.load(name)
        model.half().save_pretrained(folder / name)
    return folder


def measure(model: Path, out: Path, target: str, cache: Path) -> dict:
    """What WORK prints, run in a new process with `cache` for templates."""
    environment = os.environ | {"SD_ORT_TEMPLATES": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(model), str(out), target],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    result: dict = json.loads(done.stdout.splitlines()[-1])
    return result


def copying(model: Path, scratch: Path) -> float:
    """MB per second of copying a checkpoint within the disk."""
    started = time.perf_counter()
    shutil.copytree(model, scratch / "copied")
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    return size / 1e6 / seconds


@click.command()
@click.argument("presets", nargs=-1, required=True)
@click.option("--target", default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the table here too.")
def main(presets: tuple[str, ...], target: str, out: Path | None) -> None:
    lines = [
        f"# `sd-ort optimize CHECKPOINT OUT --float16 --target {target}`, random weights, {os.cpu_count()} cores",
        "", json.dumps(machine()), f"load average before: {os.getloadavg()[0]:.1f}", "",
        "| preset | first (export + optimize) | peak | second (template) | peak | template | copying |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for preset in presets:
        with tempfile.TemporaryDirectory(prefix="templates-") as folder:
            scratch = Path(folder)
            first, second = (checkpoint(preset, seed, scratch / f"model{seed}") for seed in (1, 2))
            slow = measure(first, scratch / "first", target, scratch / "cache")
            fast = measure(second, scratch / "second", target, scratch / "cache")
            if not fast["filled"]:
                raise click.ClickException(f"{preset}: no template was kept")
            size = sum(path.stat().st_size for path in (scratch / "cache").iterdir())
            lines.append(
                f"| {preset} | {slow['seconds']:.1f} s | {slow['peak_mb']:.0f} MB | {fast['seconds']:.1f} s "
                f"| {fast['peak_mb']:.0f} MB | {size / 1e3:.0f} kB | {copying(second, scratch):.0f} MB/s |"
            )
            click.echo(lines[-1])
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
