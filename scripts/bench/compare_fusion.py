"""Fusion side by side: ours, onnxruntime.transformers and onnxscript on the same graphs, each in its own process.

    python scripts/bench/compare_fusion.py [--exports DIR]     the tiny presets: the full models' topology, less width
    python scripts/bench/compare_fusion.py --folder EXPORT     the components of one exported folder, any size

The tiny presets are the graphs committed in tests/graphs and the folders DIR/<preset>-<exporter>-<opset>, which
--export makes where they are missing (every family, every exporter and opset: two hours). With --resume the peers' rows
that are there are kept, ours are always measured again.

Writes results/fusion_counts.{json,md} (with --folder, fusion_<folder's name>.{json,md}). Counts are nodes of the
optimized graph; seconds go from reading the model to having written the result; peak_mb is the resident set of the
process at its largest, imports included (each engine's imports alone are in the JSON as base_mb).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fusion_passes.lower import nhwc_layout, pack_qkv
from sd_ort.benchmark import other_optimizers
from sd_ort.optimize.optimizer import COUNTED
from sd_ort.runtime import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
EXPORTERS = (("dynamo", 18), ("dynamo", 20), ("dynamo", 21), ("dynamo", 23), ("torchscript", 17), ("torchscript", 20))
FIRST = ("dynamo-20", "torchscript-17")  # whose peers are measured before the others'
# Families whose other components are those of SD 1.5 or SDXL.
OWN = {"sd15-inpaint": ["unet"], "sd15-controlnet": ["unet", "controlnet"], "sdxl-refiner": ["unet"]}
KEYS = ("family", "exporter", "component", "engine")
# Names that mean the same in the outputs of the peers.
SAME = {"Attention": "MultiHeadAttention"}


def ours(source: Path, output: Path, component: str) -> None:
    """Our fusions in the layout of the GPU targets (channels last, projections packed), before what a target adds."""
    from sd_ort.optimize.optimizer import optimize_component
    from sd_ort.optimize.targets import Target

    optimize_component(source, output, Target("fused", (nhwc_layout.PASS, pack_qkv.PASS)))


def ort_default(source: Path, output: Path, component: str) -> None:
    """onnxruntime.transformers as a user finds it: the model type given, everything else left alone."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(str(source), model_type=other_optimizers.onnxruntime_type(component)).save_model_to_file(
        str(output), True
    )


def ort_best(source: Path, output: Path, component: str) -> None:
    """onnxruntime.transformers with every fusion for Stable Diffusion on a GPU switched on, its crash mended."""
    other_optimizers.optimize_by_onnxruntime(source, output, component, "cuda")


def onnxscript_ort(source: Path, output: Path, component: str) -> None:
    """onnxscript's optimizer, then its fusions for ONNX Runtime."""
    other_optimizers.optimize_by_onnxscript(source, output)


ENGINES = {"ours": ours, "ort best": ort_best, "ort default": ort_default, "onnxscript": onnxscript_ort}


MODULES = {
    "ours": ["sd_ort.optimize.optimizer"],
    "ort best": ["onnxruntime.transformers.optimizer"],
    "ort default": ["onnxruntime.transformers.optimizer"],
    "onnxscript": ["onnxscript.optimizer", "onnxscript.rewriter.ort_fusions"],
}


def one(engine: str, source: Path, output: Path, component: str) -> dict[str, Any]:
    """Run one engine in this process; its counts, seconds and peak memory, or the error that ended it."""
    import onnx

    for module in MODULES[engine]:
        importlib.import_module(module)
    base = _peak()
    output.parent.mkdir(parents=True, exist_ok=True)
    started, used = time.perf_counter(), _cpu_seconds()
    try:
        ENGINES[engine](source, output, component)
    except Exception as error:  # whatever a peer raises is its result
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return {"error": f"{type(error).__name__}: {lines[0][:160]}", "seconds": time.perf_counter() - started}
    seconds, used = time.perf_counter() - started, _cpu_seconds() - used
    peak = _peak()
    nodes = [n.op_type for n in onnx.load(output, load_external_data=False).graph.node]
    counts = Counter(SAME.get(op, op) for op in nodes)
    return {
        "nodes": len(nodes),
        "counts": {op: counts[op] for op in COUNTED},
        "seconds": seconds,
        "cpu_seconds": used,
        "peak_mb": peak,
        "base_mb": base,
    }


def _peak() -> float:
    """Largest resident set of this process, in MB; getrusage would count the parent it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_apart(engine: str, source: Path, component: str) -> dict[str, Any]:
    """`one` in a process of its own."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        command = [
            sys.executable,
            __file__,
            "--one",
            engine,
            str(source),
            str(Path(scratch) / component / "model.onnx"),
            component,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def graphs(folder: Path | None, exports: Path | None, scratch: Path) -> list[tuple[str, str, Path]]:
    """(export, component, model.onnx) of what is compared."""
    if folder is not None:
        return [(folder.name, p.parent.name, p) for p in sorted(folder.glob("*/model.onnx"))]
    from scripts.fixtures import graph_fixtures

    found = {}
    for path in sorted(exports.glob("[!.]*-tiny-*/*/model.onnx")) if exports is not None else []:
        found[path.parent.parent.name, path.parent.name] = path
    for name in graph_fixtures.NAMES:
        export, component = name.rsplit(".", 1)
        if (export, component) not in found:
            path = graph_fixtures.make_folder(scratch / name, name)
            found[export, component] = path / component / "model.onnx"
    return [(*key, path) for key, path in sorted(found.items()) if key[1] in OWN.get(split_name(key[0])[0], [key[1]])]


def make_exports(exports: Path) -> None:
    """Export every tiny preset with every exporter and opset, but for those that are there."""
    from sd_ort.checkpoints.presets import PRESETS

    for preset in (name for name, p in PRESETS.items() if name.endswith("-tiny") and "unet" in p.models):
        for exporter, opset in EXPORTERS:
            out = exports / f"{preset}-{exporter}-{opset}"
            command = ["export", "--preset", preset, "--random-weights", "--exporter", exporter, "--opset", str(opset)]
            program = [sys.executable, "-c", "import sd_ort.cli; sd_ort.cli.main()"]
            subprocess.run([*program, *command, str(out)], cwd=ROOT, check=True)


def measured_with() -> dict[str, Any]:
    """What the numbers were measured with."""
    about = {"commit": machine.commit(), **machine.machine(), "load_average": os.getloadavg()[0]}
    return about | {"versions": machine.versions()}


def summary(rows: list[dict[str, Any]]) -> str:
    """How many of our graphs are equal within their family and component."""
    mine: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        if row["engine"] == "ours":
            mine.setdefault((row["family"], row["component"]), []).append(row.get("counts"))
    unequal = [" ".join(key) for key, counts in mine.items() if any(c != counts[0] or c is None for c in counts)]
    exported = sum(map(len, mine.values()))
    verdict = f"NOT equal: {', '.join(unequal)}" if unequal else "within each the counts are equal from all exporters"
    return f"**Ours: {exported} graphs of {len(mine)} components; {verdict}.**"


def table(result: dict[str, Any]) -> str:
    """Markdown: a section per family and component, a row per exporter and engine."""
    about = result["machine"]
    lines = [
        f"Measured at commit {about['commit']} on {about['cores']} cores of {about['cpu']}, {about['memory_GB']} GB "
        f"(load average {about['load_average']:.1f}), "
        + ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        + ".",
        "",
        "Nodes left in the optimized graph, by `scripts/bench/compare_fusion.py`; s is wall time, shared machine, "
        "CPU s the time of all threads. The graphs have the topology of the full models at small width (but for those "
        "of a --folder); components that are those of another family are not repeated. `ours`: every fusion in the GPU "
        "layout, before what a target adds. `ort best`: onnxruntime.transformers with every Stable Diffusion fusion on "
        "and its crash under NumPy 2.4 mended; `ort default`: with its model type only, as a user finds it; "
        "`onnxscript`: optimize_for_ort. Peers are measured on "
        + " and ".join(FIRST)
        + " first; where a row is missing, they were not measured.",
        "",
        summary(result["rows"]),
        "",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["family"], row["component"]), []).append(row)
    for (family, component), rows in groups.items():
        ops = [op for op in COUNTED if any(row.get("counts", {}).get(op) for row in rows)]
        mine = [row["counts"] for row in rows if row["engine"] == "ours" and "counts" in row]
        equal = "equal from all exporters" if all(c == mine[0] for c in mine) else "NOT equal"
        lines += [f"### {family} {component}", "", f"Ours: {equal} ({len(mine)}).", ""]
        lines += [
            "| exporter | engine | " + " | ".join(ops) + " | nodes | s | CPU s | MB |",
            "|---" * (len(ops) + 6) + "|",
        ]
        for row in rows:
            if "error" in row:
                cells = [row["error"].replace("|", "/")] + [""] * (len(ops) + 3)
            else:
                cells = [str(row["counts"][op]) for op in ops]
                cells += [
                    str(row["nodes"]),
                    f"{row['seconds']:.1f}",
                    f"{row['cpu_seconds']:.1f}",
                    f"{row['peak_mb']:.0f}",
                ]
            lines.append(f"| {row['exporter']} | {row['engine']} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an exported pipeline folder instead of the committed graphs")
    parser.add_argument("--exports", type=Path, help="a folder of exports of the tiny presets")
    parser.add_argument("--export", action="store_true", help="make the exports that are missing there")
    parser.add_argument("--only", default="", help="only graphs whose name contains this")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--one", nargs=4, metavar=("ENGINE", "IN", "OUT", "COMPONENT"), help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help="keep the rows there are and measure those missing")
    options = parser.parse_args()
    if options.one:
        engine, source, output, component = options.one
        print(json.dumps(one(engine, Path(source), Path(output), component)))
        return
    if options.export:
        make_exports(options.exports)
    name = "fusion_counts" if options.folder is None else f"fusion_{options.folder.name}"
    there = RESULTS / f"{name}.json"
    with tempfile.TemporaryDirectory() as scratch:
        found = graphs(options.folder, options.exports, Path(scratch))
        tasks = [
            (dict(zip(KEYS, (*split_name(export), component, engine), strict=True)), path)
            for engine in options.engines
            for export, component, path in found
            if options.only in f"{export}.{component}"
        ]
        rows: list[dict[str, Any]] = json.loads(there.read_text())["rows"] if options.resume and there.is_file() else []
        real = {(*split_name(export), component) for export, component, _ in found}
        rows = [row for row in rows if tuple(row[key] for key in KEYS[:3]) in real]
        done = {tuple(row[key] for key in KEYS) for row in rows if row["engine"] != "ours"}
        # Ours first, then the peers on two exporters of every family, then on the others, small graphs first.
        tasks.sort(key=lambda task: (task[0]["engine"] != "ours", _rank(task[0]["exporter"]), task[1].stat().st_size))
        for row, path in tasks:
            key = tuple(row.values())
            if key in done:
                continue
            result = run_apart(row["engine"], path, row["component"])
            rows = [old for old in rows if tuple(old[k] for k in KEYS) != key] + [{**row, **result}]
            print(json.dumps(rows[-1]), flush=True)
            write(rows, name)


def _rank(exporter: str) -> int:
    return FIRST.index(exporter) if exporter in FIRST else len(FIRST)


def split_name(export: str) -> tuple[str, str]:
    """(family, exporter-opset) of an export's name such as sd15-tiny-dynamo-20."""
    family, _, exporter = export.partition("-tiny-")
    return family, exporter


def write(rows: list[dict[str, Any]], name: str) -> None:
    """Write what there is by now: a run of all graphs takes most of an hour, nearly all of it the peers'."""
    rows.sort(key=lambda row: (row["family"], row["component"], row["exporter"], list(ENGINES).index(row["engine"])))
    result = {"machine": measured_with(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table(result))


if __name__ == "__main__":
    main()
