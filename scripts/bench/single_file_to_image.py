"""From a checkpoint in one file to a picture in one command: the second demo checkpoint, in a process of its own.

    python scripts/bench/single_file_to_image.py --out results/single_file_to_image.json [--runs 3]

Makes the file (`scripts/fixtures/make_second_demo.py`), draws with it by `sd-ort generate`, which fills templates on
the way, and says how long both took and how much memory was resident at most, imports included. The picture is
compared with the first demo checkpoint's, whose lightness the second mirrors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

from sd_ort.core.files import write_json
from sd_ort.core.metrics import psnr
from sd_ort.runtime.machine import commit, machine, versions

PROMPT = "a red circle on a blue background"
FIXTURES = Path(__file__).parents[1] / "fixtures"


def run(*command: object) -> dict[str, Any]:
    """Wall and processor seconds, and resident memory at most in MB, of a command; what it said."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(said)
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "said": said.splitlines(),
    }


def draw(model: object, out: Path) -> dict[str, Any]:
    row = run("-m", "sd_ort", "generate", PROMPT, "--model", model, "--seed", 0, "--out", out)
    timing = re.search(r"made in ([\d.]+) s, nothing was traced", "\n".join(row.pop("said")))
    if timing is None:
        raise click.ClickException("a template was missing: what is measured here is a checkpoint that fills them.")
    return {**row, "optimize_seconds": float(timing[1])}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .json file.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
def main(out: Path, runs: int) -> None:
    from scripts.fixtures.make_second_demo import by_night

    with tempfile.TemporaryDirectory() as scratch:
        file, first, second = (Path(scratch) / name for name in ("second.safetensors", "first.png", "second.png"))
        timing = run(FIXTURES / "make_second_demo.py", file)
        rows = [draw(file, second.with_stem(f"second-{i}")) for i in range(runs)]
        draw("demo", first)
        decibel = psnr(np.asarray(Image.open(second.with_stem("second-0"))), by_night(first))
        size = file.stat().st_size
    result = {
        "command": f'sd-ort generate "{PROMPT}" --model second.safetensors',
        "file_mb": round(size / 1e6, 1),
        "seconds_to_make_it": timing["seconds"],
        "runs": rows,
        "psnr_to_the_first_by_night_db": round(decibel, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    write_json(out, result)
    click.echo(f"{rows}, {decibel:.1f} dB")


if __name__ == "__main__":
    main()
