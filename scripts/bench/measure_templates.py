"""Time and memory of `sd-ort optimize CHECKPOINT OUT --float16` from a template, of a checkpoint with random weights.

    python scripts/bench/measure_templates.py sd15 sdxl --out results/templates.json [--ways ...] [--scratch FOLDER]

For each preset a diffusers folder in fp16 is written, for the way `file` as one file with LDM's names too, and made an
optimized folder in a process of its own: wall and processor seconds from the start of Python to its end, and resident
memory at most, as the system counts it. The other ways make what they can of the same checkpoint:

    slow        export and optimize, without templates
    ort         export (TorchScript, opset 17), then onnxruntime.transformers with its options for Stable Diffusion, the
                optimizer that its scripts run; its crash on NumPy 2.4 is mended
    mobius      mobius-onnx, which builds graphs without tracing and without fusing for a provider; 0.1.0, asked for
                float16, leaves U-Net and VAE in float32. --mobius names the Python of an environment that has it. The
                hub's downloads are read from the checkpoint.

The disk's speed is that of copying the checkpoint to where the output goes; before a process is timed, all that was
written is on the disk, and the checkpoint was read once, as after a download. What --out holds already is kept and not
measured again: an interrupt loses one row. Beside the JSON a table is written, --out with .md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from sd_ort.core.files import read_json, write_json
from sd_ort.runtime.machine import commit, machine, versions

FILL = """
import sys
from pathlib import Path
from sd_ort.checkpoints.open import CheckpointOptions
from sd_ort.stages import optimize
model, out, target, config = sys.argv[1:]
lines = []
options = CheckpointOptions(config if Path(model).is_file() else None)
optimize(model, Path(out), target=target, dtype="float16", checkpoint=options, on_progress=lines.append)
assert "nothing was traced" in lines[-1], lines
"""
SLOW = """
import sys
from pathlib import Path
from sd_ort.export.exporter import export
from sd_ort.stages import optimize
export(sys.argv[1], Path(sys.argv[2] + "-raw"))
optimize(Path(sys.argv[2] + "-raw"), Path(sys.argv[2]), target=sys.argv[3], dtype="float16")
"""
ORT = """
import sys
from pathlib import Path
import onnxruntime.transformers.optimizer
from sd_ort.benchmark.other_optimizers import optimize_by_onnxruntime
from sd_ort.export.exporter import export
raw, out = Path(sys.argv[2] + "-raw"), Path(sys.argv[2])
export(sys.argv[1], raw, exporter="torchscript", opset=17)
for component in ("text_encoder", "text_encoder_2", "unet", "vae_encoder", "vae_decoder"):
    if (raw / component).is_dir():
        (out / component).mkdir(parents=True)
        paths = [folder / component / "model.onnx" for folder in (raw, out)]
        optimize_by_onnxruntime(*paths, component, "cuda", "float16")
"""
MOBIUS = """
import sys
from pathlib import Path
import huggingface_hub
from huggingface_hub.utils import EntryNotFoundError
from mobius._diffusers_builder import build_diffusers_pipeline

def local(repo_id, filename, **_):
    path = Path(repo_id, filename)
    if not path.is_file():
        raise EntryNotFoundError(str(path))
    return str(path)

huggingface_hub.hf_hub_download = local
vars(sys.modules["mobius._diffusers_builder"])["_parallel_download"] = lambda folder, names, **_: [
    local(folder, name) for name in names
]
package = build_diffusers_pipeline(sys.argv[1], dtype="f16")
package.save(sys.argv[2])
print(sorted(package))
"""
WAYS = {"template": FILL, "file": FILL, "slow": SLOW, "ort": ORT, "mobius": MOBIUS}


def checkpoint(preset: str, seed: int, folder: Path) -> None:
    """A diffusers folder of a preset with random weights, in fp16."""
    from sd_ort.checkpoints.presets import open_preset

    folder.mkdir(parents=True)
    source = open_preset(preset, seed)
    source.write_configs(folder)
    for name in source.configs:
        model: Any = source.load(name)
        model.half().save_pretrained(folder / name)


def single_file(folder: Path, out: Path) -> None:
    """The checkpoint in `folder` as one file with LDM's names, in fp16."""
    from safetensors.torch import load_file, save_file

    from scripts.fixtures.save_single_file import single_file as renamed

    class Stored:
        """As much of a model as its weights' names ask for."""

        def __init__(self, home: Path) -> None:
            self.config = read_json(home / "config.json")
            self.home = home

        def state_dict(self) -> dict[str, Any]:
            return {n: t for path in self.home.glob("*.safetensors") for n, t in load_file(path).items()}

    models: Any = {home.name: Stored(home) for home in folder.iterdir() if any(home.glob("*.safetensors"))}
    save_file(renamed(models), out)


def aside(make: Callable[..., None], *arguments: object) -> None:
    """Call a function in another process: the peak memory of one's children begins with one's own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(make, *arguments).result()


def measure(python: str, way: str, model: Path, out: Path, target: str, config: Path) -> dict[str, Any]:
    """Wall and processor seconds and peak memory (MB) of a new process, or the last line of what ended it."""
    os.sync()  # what this script wrote before is not written while the process is timed
    for path in [model] if model.is_file() else model.rglob("*.safetensors"):  # in memory, as after a download
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    started = time.perf_counter()
    command = [python, "-c", WAYS[way], str(model), str(out), target, str(config)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        said.seek(0)
        failed = {"error": said.read().strip().splitlines()[-1][:200]} if status else {}
    return {
        **failed,
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "load_average": round(os.getloadavg()[0], 1),
    }


def copying(model: Path, scratch: Path) -> float:
    """MB a second of copying a checkpoint within the disk."""
    started = time.perf_counter()
    shutil.copytree(model, scratch / "copied")
    seconds = time.perf_counter() - started
    shutil.rmtree(scratch / "copied")
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    return size / 1e6 / seconds


def table(result: dict[str, Any]) -> str:
    lines = [
        "# From a checkpoint to an optimized float16 folder, random weights", "",
        "The load average is that of the machine while it was measured: with more than its cores, the processor's "
        "seconds say more than the clock's. Peak memory is what was resident, mapped pages of files included. What "
        "the ways are says `scripts/bench/measure_templates.py`; mobius-onnx's graphs are not fused, and all but the "
        "text encoder's are float32.",
        "",
        "| preset | target | way | seconds | processor seconds | peak memory | load average | copying the checkpoint |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in result["rows"].items():
        preset, target, way = name.split("/")
        ended = f" ({row['error']})" if "error" in row else ""
        lines.append(
            f"| {preset} | {target} | {way}{ended} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} "
            f"| {row['peak_mb']} MB | {row['load_average']} | {row['copying_mb_s']:.0f} MB/s |"
        )
    return "\n".join(lines) + f"\n\n`{json.dumps(result['machine'])}`\n"


@click.command()
@click.argument("presets", nargs=-1, required=True)
@click.option("--target", default="cuda", show_default=True)
@click.option("--ways", default="template,file", show_default=True, help=f"Some of {', '.join(WAYS)}.")
@click.option("--mobius", metavar="PYTHON", help="The Python of an environment with mobius-onnx.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Folder for checkpoints, which are kept there.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .json file.")
def main(presets: tuple[str, ...], target: str, ways: str, mobius: str | None, scratch: Path | None, out: Path) -> None:
    result = read_json(out) if out.is_file() else {"machine": machine(), "versions": versions(), "rows": {}}
    for preset in presets:
        if not (left := [way for way in ways.split(",") if f"{preset}/{target}/{way}" not in result["rows"]]):
            continue
        with tempfile.TemporaryDirectory(prefix="templates-", dir=scratch) as folder:
            work, checkpoint_folder = Path(folder), (scratch or Path(folder)) / f"{preset}-random"
            if not checkpoint_folder.is_dir():
                aside(checkpoint, preset, 1, work / "made")
                (work / "made").rename(checkpoint_folder)
            if "file" in left and not checkpoint_folder.with_suffix(".safetensors").is_file():
                aside(single_file, checkpoint_folder, work / "made.safetensors")
                (work / "made.safetensors").rename(checkpoint_folder.with_suffix(".safetensors"))
            speed = copying(checkpoint_folder, work)
            for way in left:
                model = checkpoint_folder.with_suffix(".safetensors") if way == "file" else checkpoint_folder
                python = (mobius or sys.executable) if way == "mobius" else sys.executable
                row = measure(python, way, model, work / way, target, checkpoint_folder)
                for output in work.glob(f"{way}*"):  # disk, and memory: as much for the next way as for this one
                    shutil.rmtree(output)
                result["rows"][f"{preset}/{target}/{way}"] = {**row, "copying_mb_s": round(speed), "commit": commit()}
                write_json(out, result)
                out.with_suffix(".md").write_text(table(result))
                click.echo(f"{preset}, {way}: {row}")


if __name__ == "__main__":
    main()
