"""Time and memory of `sd-ort optimize CHECKPOINT OUT --float16` from a template, of a checkpoint with random weights.

    python scripts/measure/measure_templates.py sd15 sdxl --out results/templates.json [--slow] [--scratch FOLDER]

For each preset a diffusers folder in fp16 is written and optimized in a process of its own: wall and processor seconds
from the start of Python to its end, peak memory as the system says. `--slow`: export and optimize without templates
too. The disk's speed is that of copying the checkpoint to where the output goes. What --out holds already is kept and
not measured again: an interrupt loses one row. Beside the JSON a table is written, --out with .md.
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

from sd_ort.core.files import read_json, write_json
from sd_ort.runtime.machine import commit, machine, versions

FILL = """
import sys
from pathlib import Path
from sd_ort.from_checkpoint import optimize_checkpoint
lines = []
optimize_checkpoint(sys.argv[1], Path(sys.argv[2]), target=sys.argv[3], dtype="float16", report=lines.append)
assert "nothing was traced" in lines[-1], lines
"""
SLOW = """
import sys
from pathlib import Path
from sd_ort.export.exporter import export
from sd_ort.optimize.optimizer import optimize
export(sys.argv[1], Path(sys.argv[2] + "-raw"))
optimize(Path(sys.argv[2] + "-raw"), Path(sys.argv[2]), target=sys.argv[3], dtype="float16")
"""


def checkpoint(preset: str, seed: int, folder: Path) -> Path:
    """A diffusers folder of a preset with random weights, in fp16."""
    from sd_ort.family.checkpoints import PresetSource

    folder.mkdir(parents=True)
    source = PresetSource(preset, seed)
    source.write_configs(folder)
    for name in source.configs:
        model: Any = source.load(name)
        model.half().save_pretrained(folder / name)
    return folder


def measure(work: str, model: Path, out: Path, target: str) -> dict[str, float]:
    """Wall and processor seconds and peak memory (MB) of a new process that runs `work`."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", work, str(model), str(out), target], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"optimizing {model} failed: see above.")
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss / 1024),
        "load_average": round(os.getloadavg()[0], 1),
    }


def copying(model: Path, scratch: Path) -> float:
    """MB a second of copying a checkpoint within the disk."""
    started = time.perf_counter()
    shutil.copytree(model, scratch / "copied")
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    return size / 1e6 / seconds


def table(result: dict[str, Any]) -> str:
    lines = [
        "# `sd-ort optimize CHECKPOINT OUT --float16`, random weights", "",
        "The load average is that of the machine while it was measured: with more than its cores, the processor's "
        "seconds say more than the clock's. Peak memory is what was resident, mapped pages of the checkpoint and the "
        "output included.",
        "",
        "| preset | target | way | seconds | processor seconds | peak memory | load average | copying the checkpoint |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in result["rows"].items():
        preset, target, way = name.split("/")
        lines.append(
            f"| {preset} | {target} | {way} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} | {row['peak_mb']} MB "
            f"| {row['load_average']} | {row['copying_mb_s']:.0f} MB/s |"
        )
    return "\n".join(lines) + f"\n\n`{json.dumps(result['machine'])}`\n"


@click.command()
@click.argument("presets", nargs=-1, required=True)
@click.option("--target", default="cuda", show_default=True)
@click.option("--slow", is_flag=True, help="Measure export and optimize without templates, too.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder for checkpoints, which are kept there.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .json file.")
def main(presets: tuple[str, ...], target: str, slow: bool, scratch: Path | None, out: Path) -> None:
    result = read_json(out) if out.is_file() else {"machine": machine(), "versions": versions(), "rows": {}}
    for preset in presets:
        ways = {"template": FILL} | ({"export and optimize": SLOW} if slow else {})
        if not (left := {way: text for way, text in ways.items() if f"{preset}/{target}/{way}" not in result["rows"]}):
            continue
        with tempfile.TemporaryDirectory(prefix="templates-", dir=scratch) as folder:
            work, kept = Path(folder), (scratch or Path(folder)) / f"{preset}-random"
            if not kept.is_dir():
                checkpoint(preset, 1, work / "made").rename(kept)
            speed = copying(kept, work)
            for way, text in left.items():
                row = measure(text, kept, work / way.split()[0], target)
                result["rows"][f"{preset}/{target}/{way}"] = {**row, "copying_mb_s": round(speed), "commit": commit()}
                write_json(out, result)
                out.with_suffix(".md").write_text(table(result))
                click.echo(f"{preset}, {way}: {row}")


if __name__ == "__main__":
    main()
