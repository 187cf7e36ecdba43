#!/usr/bin/env python3
"""Write the tables of results/gpu_step.md and README.md from results of scripts/bench/bench_gpu_step.py.

    python scripts/bench/gpu_step_table.py results/gpu_step --out results/gpu_step.md
    python scripts/bench/gpu_step_table.py results/gpu_provider --page docs/explanation/speed.md  # puts it there

No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from scripts import report

table = partial(report.table, align="---:")
PEER = "torch.compile"
OURS = "SdOrtCuda"
FAMILIES = {"sd15": "SD 1.5", "sdxl": "SDXL"}
BEGIN, END = "<!-- single calls -->", "<!-- end of single calls -->"
HEAD = """# A model call on a GPU, by lever

Made by `scripts/bench/gpu_step_table.py` from `{folder}/`, one file per run of
`scripts/bench/bench_gpu_step.py` (commands below).
Random weights. float16; every engine from device buffers to device buffers, under a CUDA graph. `queued`: ms per call
of calls queued behind one another; `call`: ms of one on an idle GPU, launch and wait included; medians of seven rounds
in which the engines take turns in one process, ratios to torch.compile (reduce-overhead, channels last) round by round.
`error`: relative, against torch in float32 on the same GPU. `ready`: seconds from the raw model to the first call:
torch.compile's compilation (caches of earlier runs may serve it); our optimizing, loading, tuning, capturing.
Each row of ours adds to the one before: 5 to 7 are target cuda, with --hoist, with --tuning; 8 was not taken. What was
tried and left out: gpu_experiments.md.
"""
TAIL = """
## Again

    sd-ort build-ops --cuda sm_90
    scripts/bench/bench_gpu_step.py --preset sd15 --batch 2 --size 64 --profile 30
    scripts/bench/bench_gpu_step.py --preset sd15 --batch 16 --size 64 --calls 6 --variants 1,5,7,8 --profile 30
    scripts/bench/bench_gpu_step.py --preset sdxl --batch 2 --size 128 --calls 8 --variants 1,5,7,8 --profile 60
    scripts/bench/bench_gpu_step.py --component vae_decoder --batch 1 --size 64 --variants 1,2,3,4,5 --profile 30
    scripts/bench/bench_gpu_step.py --component vae_decoder --batch 1 --size 128 --variants 1,3,5 --profile 30
    python scripts/bench/gpu_step_table.py results/gpu_step --out results/gpu_step.md

With --graph and a file of export_without_weights.py the GPU machine is spared the export, as in these runs.
"""
CLASSES = (
    "convolution", "matrix product", "attention", "group norm", "layer norm", "gelu", "concat, resize, transpose",
    "element-wise", "memset, memcpy",
)  # fmt: skip
ARITHMETIC = {"convolution": ("convolution",), "matrix product": ("addmm", "mm", "bmm"), "attention": ("attention",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--out", type=Path)
    to.add_argument("--page", type=Path, help="replace the table of single calls there: docs/explanation/speed.md")
    options = parser.parse_args()
    files = (json.loads(path.read_text()) for path in options.folder.glob("*.json"))
    runs = sorted((run for run in files if "component" in run), key=order)  # others are of whole images
    if not runs:
        raise SystemExit(f"{options.folder} has no results: run scripts/bench/bench_gpu_step.py first")
    if options.page:
        before, _, rest = options.page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{options.page} lacks {BEGIN} and {END}: put them where the table goes")
        options.page.write_text(f"{before}{BEGIN}\n" + "\n".join(single_calls(runs)) + f"\n{end}{after}")
        return
    lines = [HEAD.format(folder=options.folder), *summary(runs)]
    for run in runs:
        lines += ["", f"## {title(run)}", "", *waterfall(run), "", *classes(run)]
    options.out.write_text("\n".join(lines) + "\n" + TAIL)


def order(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["component"], run["preset"], run["batch"], run["size"]


def title(run: dict[str, Any]) -> str:
    return f"{run['preset']} {run['component']}, batch {run['batch']}, latent {run['size']} x {run['size']}"


def best(run: dict[str, Any]) -> dict[str, Any]:
    """The fastest row that the cuda target and its options give: of VARIANTS as far as the seventh."""
    ours: list[dict[str, Any]] = [row for row in run["rows"] if row["engine"][0] in "1234567"]
    return min(ours, key=lambda row: row["device_ms"])


def summary(runs: list[dict[str, Any]]) -> list[str]:
    rows = []
    for run in runs:
        peer, ours = next(row for row in run["rows"] if row["engine"] == PEER), best(run)
        rows.append([
            title(run), f"{peer['device_ms']:.2f}", f"{ours['device_ms']:.2f}", f"**{ours['device_ratio']:.2f}**",
            f"{ours['call_ratio']:.2f}", ours["engine"], f"{ours['error'] / peer['error']:.2f}",
            f"{ours['ready_s']:.0f} / {peer['ready_s']:.0f}",
        ])  # fmt: skip
    head = ("model", PEER, "ours", "ratio", "ratio of calls", "our best row", "error / its error", "ready, s")
    machine = runs[0]["machine"]["gpus"][0]
    versions = ", ".join(f"{name} {runs[0]['versions'][name]}" for name in ("torch", "onnxruntime-gpu"))
    return [f"{machine}; {versions}. ms queued.", "", *table(head, rows)]


def single_calls(runs: list[dict[str, Any]]) -> list[str]:
    """The README's table: torch.compile, the CUDA provider and our own in one process, a row a model."""
    rows = []
    for run in sorted(runs, key=lambda run: (run["component"] != "unet", run["preset"], run["batch"], run["size"])):
        images = run["batch"] // 2 if run["component"] == "unet" else run["batch"]
        part = "U-Net" if run["component"] == "unet" else "VAE decoder"
        name = f"{FAMILIES[run['preset']]} {part}, {8 * run['size']}², {images} image{'s' if images > 1 else ''}"
        engines = {row["engine"]: row for row in run["rows"]}
        cells = [f"{engines[PEER]['device_ms']:.2f} ms"]
        for engine in (best(run)["engine"], OURS):
            cells += [f"{engines[engine]['device_ms']:.2f} ms", f"{engines[engine]['device_ratio']:.2f}"]
        rows.append([name, *cells[:-2], f"**{cells[-2]}**", f"**{cells[-1]}**", run["commit"]])
    head = (
        "", PEER, "sd-ort, CUDA provider", f"of {PEER}", "sd-ort, our own provider", f"of {PEER}", "commit"
    )  # fmt: skip
    return table(head, rows)


def waterfall(run: dict[str, Any]) -> list[str]:
    rows = []
    for row in run["rows"]:
        cells = [f"{row[f'{kind}_{what}']:.2f}" for kind in ("device", "call") for what in ("ms", "ratio")]
        spent = row.get("profile")
        cells += [f"{spent['kernels']:.0f}", f"{spent['kernels_ms']:.2f}"] if spent else ["-", "-"]
        rows.append([row["engine"], *cells, f"{row['error']:.1e}", f"{row['ready_s']:.0f}"])
    return table(("engine", "queued", "ratio", "call", "ratio", "kernels", "their ms", "error", "ready"), rows)


def classes(run: dict[str, Any]) -> list[str]:
    """Kernels by class, before and after, beside what arithmetic alone takes at the GPU's measured rate."""
    shown = [row for row in (*run["rows"][:2], best(run)) if "profile" in row]
    if not shown:
        return []
    rate = run["limits"]["matrix_tflops"]
    rows = []
    for name in CLASSES:
        spent = [row["profile"]["classes_ms"].get(name, 0.0) for row in shown]
        if not any(spent):
            continue
        operations = sum(
            count
            for operator, count in run["tflop"].items()
            if name in ARITHMETIC and any(word in operator.split(".")[1] for word in ARITHMETIC[name])
        )
        rows.append([name, *(f"{ms:.2f}" for ms in spent), f"{operations / rate * 1e3:.2f}" if operations else "-"])
    head = ("class of kernels, ms", *(row["engine"] for row in shown), "arithmetic alone")
    limits = run["limits"]
    return [
        *table(head, rows), "",
        f"Limits measured in the run: {rate:.0f} TFLOP/s (product of 8192 x 8192 matrices), {limits['copy_gbs']:.0f} "
        "GB/s (copy, read and written). torch.compile's element-wise kernels bear the name of the norm that they hold.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
