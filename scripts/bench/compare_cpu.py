"""One UNet step on the CPU: ours beside the raw export, ONNX Runtime's own fusions and onnxscript's, in one run.

    sd-ort export --preset sd15 --random-weights --component unet EXPORT
    sd-ort export --preset sd15 --random-weights --component unet --exporter torchscript --opset 17 EXPORT17
    pip install '.[openvino]'
    python scripts/bench/compare_cpu.py EXPORT EXPORT17 --threads 2

writes results/cpu_unet_sd15.{json,md}. Instead of a folder a graph of scripts/fixtures/make_graph_fixtures.py will do
(GRAPH.onnx.xz, weights left out): it gets random weights of the right scale, the same in every run.

Every engine is a process of its own, which gives its peak resident memory. All are open at once and take turns, step
by step, so that a busy machine slows all of them alike; ratios are medians of the ratios within a turn. ONNX Runtime's
optimizer was written for TorchScript's graphs: it runs on EXPORT17 (and, as "ort fusions, same export", on EXPORT).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sd_ort.core.metrics import relative_l2_error
from sd_ort.runtime.glibc_malloc import given_back
from sd_ort.runtime.library import library_path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "unet/model.onnx"
BATCH = 2
TURNS = {32: 5, 64: 2}  # latent edge -> measured steps of each engine, after one that is not counted


def make_raw(source: Path, out: Path) -> None:
    """The export, unchanged."""
    out.parent.mkdir(parents=True)
    for path in source.parent.iterdir():
        os.symlink(path.resolve(), out.parent / path.name)


def make_ours(target: str, dtype: str = "float32") -> Callable[[Path, Path], None]:
    """`sd-ort optimize --target ...`"""

    def make(source: Path, out: Path) -> None:
        from sd_ort.optimize.optimizer import optimize_component
        from sd_ort.optimize.targets import TARGETS

        optimize_component(source, out, TARGETS[target], dtype)

    return make


def make_ort(source: Path, out: Path) -> None:
    """onnxruntime.transformers with every fusion that its CPU provider runs, its crash on NumPy 2.4 mended."""
    from sd_ort.benchmark.other_optimizers import optimize_by_onnxruntime

    out.parent.mkdir(parents=True)
    optimize_by_onnxruntime(source, out, "unet", "cpu")


def make_onnxscript(source: Path, out: Path) -> None:
    """onnxscript's optimizer, then its fusions for ONNX Runtime."""
    from sd_ort.benchmark.other_optimizers import optimize_by_onnxscript

    out.parent.mkdir(parents=True)
    optimize_by_onnxscript(source, out)


@dataclass(frozen=True)
class Contender:
    """A way to run the UNet: `model` names what `make` makes, `library` says whether the op library is registered.

    `peer`: whether it is one of those that the fastest is chosen from; bfloat16 is beside the contest of float32.
    `openvino`: run by OpenVINO, in this precision.
    """

    name: str
    model: str
    make: Callable[[Path, Path], None]
    library: bool = False
    torchscript: bool = False
    peer: bool = False
    openvino: str = ""


ENGINES = (
    Contender("raw", "raw", make_raw, peer=True),
    Contender("raw, TorchScript export", "raw17", make_raw, torchscript=True, peer=True),
    Contender("ort fusions", "ort17", make_ort, torchscript=True, peer=True),
    Contender("ort fusions, same export", "ort", make_ort, peer=True),
    Contender("onnxscript", "onnxscript", make_onnxscript, peer=True),
    Contender("OpenVINO", "raw", make_raw, peer=True, openvino="float32"),
    Contender("OpenVINO, bfloat16", "raw", make_raw, openvino="bfloat16"),
    Contender("ours cpu, no library", "cpu", make_ours("cpu")),
    Contender("ours cpu", "cpu", make_ours("cpu"), library=True),
    Contender("ours cpu, float16", "cpu-float16", make_ours("cpu", "float16"), library=True),
    Contender("ours cpu, bfloat16", "cpu-bfloat16", make_ours("cpu", "bfloat16"), library=True),
    Contender("ours portable, no library", "portable", make_ours("portable")),
    Contender("ours portable", "portable", make_ours("portable"), library=True),
)


def inputs(context: int, edge: int) -> dict[str, np.ndarray]:
    """Random inputs of the UNet, the same for every engine; `context`: elements of a token."""
    random = np.random.default_rng(edge)
    return {
        "sample": random.standard_normal((BATCH, 4, edge, edge)).astype(np.float32),
        "timestep": np.array([501], np.float32),
        "encoder_hidden_states": random.standard_normal((BATCH, 77, context)).astype(np.float32),
    }


Step = Callable[[dict[str, np.ndarray]], np.ndarray]


def open_openvino(model: str, threads: int, precision: str) -> tuple[Step, int]:
    """A function that runs a step, and the elements of a token."""
    from sd_ort.benchmark.engines.openvino import compile_model

    compiled = compile_model(Path(model), precision, threads)
    context = compiled.input("encoder_hidden_states").partial_shape[2].get_length()
    return lambda feed: np.array(compiled(feed)[0]), context


def serve(model: str, threads: int, library: str, profile: str, pattern: str, openvino: str) -> None:
    """In an engine's process: open the model, then run a step for every line on stdin that holds a latent edge.

    Peers have ONNX Runtime's default options, ours are opened as `runtime.session` does: without a memory pattern, what
    is freed given back.

    Answers with a line of JSON: seconds of the step, MB of resident memory at its peak so far. The line
    "save EDGE FILE" writes the output.
    """
    started = time.perf_counter()
    session = None
    if openvino:
        step, context = open_openvino(model, threads, openvino)
    else:
        session = open_onnxruntime(model, threads, library, profile, pattern)
        step = lambda feed: session.run(None, feed)[0]  # noqa: E731
        context = next(i.shape[-1] for i in session.get_inputs() if i.name == "encoder_hidden_states")
    answer({"open_s": time.perf_counter() - started})
    for line in sys.stdin:
        words = line.split()
        save = words[0] == "save"
        feed = inputs(context, int(words[1] if save else words[0]))
        started = time.perf_counter()
        output = step(feed)
        seconds = time.perf_counter() - started
        if save:
            np.save(words[2], output)
        answer({"s": seconds})
    if session is not None and profile:
        session.end_profiling()


def open_onnxruntime(model: str, threads: int, library: str, profile: str, pattern: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = pattern == "pattern"
    if library:
        options.register_custom_ops_library(library)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    with given_back() if pattern == "no pattern" else nullcontext():
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def answer(values: dict[str, float]) -> None:
    status = Path("/proc/self/status").read_text()
    print(json.dumps(values | {"peak_mb": int(status.split("VmHWM:")[1].split()[0]) / 1e3}), flush=True)


class Process:
    """An engine's process, which answers one request at a time."""

    def __init__(self, engine: Contender, model: Path, options: argparse.Namespace) -> None:
        library = str(options.library) if engine.library else ""
        profile = str(options.profile / engine.name.replace(" ", "_")) if options.profile else ""
        command = [sys.executable, __file__, "--serve", str(model), str(options.threads), library, profile]
        command += ["pattern" if engine.peer else "no pattern", engine.openvino]
        pinned = ["taskset", "-c", options.cpus] if options.cpus else []
        self.process = subprocess.Popen(pinned + command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine's process ended with {self.process.wait()}")
        result: dict[str, float] = json.loads(line)
        return result

    def ask(self, request: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(engines: list[Contender], models: dict[str, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per engine: seconds of every step by latent edge, peak MB, relative error against its own raw export."""
    processes = [Process(engine, models[engine.model], options) for engine in engines]
    rows: list[dict[str, Any]] = [
        {"engine": engine.name, "peer": engine.peer, **process.hear(), "seconds": {}, "peaks": {}}
        for engine, process in zip(engines, processes, strict=True)
    ]
    outputs: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for edge in options.edges:
            for engine, row, process in zip(engines, rows, processes, strict=True):
                process.ask(f"save {edge} {scratch}/output.npy")  # not counted
                outputs[engine.name] = np.load(f"{scratch}/output.npy")
                row["seconds"][edge] = []
            for _ in range(options.turns or TURNS.get(edge, 3)):
                for row, process in zip(rows, processes, strict=True):
                    step = process.ask(str(edge))
                    row["seconds"][edge].append(step["s"])
                    row["peaks"][edge] = step["peak_mb"]
            for engine, row in zip(engines, rows, strict=True):
                raw = outputs.get("raw, TorchScript export" if engine.torchscript else "raw")
                if raw is not None:
                    row.setdefault("relative_error", {})[edge] = relative_l2_error(outputs[engine.name], raw)
    for process in processes:
        process.close()
    return rows


def prepare(
    engines: list[Contender], sources: dict[bool, Path], scratch: Path
) -> tuple[dict[str, Path], dict[str, str]]:
    """The models of all engines, each made in a process of its own; and for those that failed, why."""

    def run(engine: Contender) -> str:
        command = [sys.executable, __file__, "--make", engine.name, str(sources[engine.torchscript])]
        done = subprocess.run([*command, str(scratch / engine.model / MODEL)], capture_output=True, text=True)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1][:200]

    first = {engine.model: engine for engine in reversed(engines)}
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2)) as pool:
        failures = dict(zip(first, pool.map(run, first.values()), strict=True))
    models = {name: scratch / name / MODEL for name, failure in failures.items() if not failure}
    return models, {name: failure for name, failure in failures.items() if failure}


def unpack(source: Path, scratch: Path) -> Path:
    """The model.onnx of an export folder, or of a graph without weights, made whole with random ones."""
    if source.is_dir():
        return source / MODEL
    import onnx

    from scripts.fixtures import graph_fixtures

    graph_fixtures.GRAPHS = source.parent
    path = scratch / source.name.partition(".onnx")[0] / MODEL
    path.parent.mkdir(parents=True)
    model = graph_fixtures.load(source.name.removesuffix(".onnx.xz"))
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    return path


def table(result: dict[str, Any]) -> str:
    """Markdown: a row per engine; ratios against the raw export and against the fastest peer of this run."""
    edges = [str(edge) for edge in result["edges"]]
    rows = result["rows"]
    machine = result["machine"]
    lines = [
        f"# One step of {result['model']}'s UNet on the CPU",
        "",
        f"Measured by `scripts/bench/compare_cpu.py` at commit {result['commit']}, {result['threads']} threads on "
        f"{machine['cpu']} ({machine['cores']} cores, {machine['memory_GB']} GB), {machine['system']}, "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        + f". {result['weights']}. One step in float32 where no other type is named, batch {BATCH}; medians of "
        + ", ".join(f"{len(rows[0]['seconds'][edge])} steps at {edge} x {edge}" for edge in edges)
        + ", engines in turn, a process each. Peak memory is resident, mapped weights included.",
        "",
        "| engine | " + " | ".join(f"{e}²: s | of raw | of the best peer | peak MB | error" for e in edges) + " |",
        "|---" * (1 + 5 * len(edges)) + "|",
    ]
    for row in rows:
        cells = []
        for edge in edges:
            best = min((r for r in rows if r["peer"]), key=lambda r: median(r["seconds"][edge]))
            cells += [
                f"{median(row['seconds'][edge]):.3f}",
                f"{ratio(row, rows[0], edge):.3f}",
                f"{ratio(row, best, edge):.3f}",
                f"{row['peaks'][edge]:.0f}",
                f"{row['relative_error'][edge]:.1e}" if "relative_error" in row else "-",
            ]
        lines.append(f"| {row['engine']} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{name}: {failure}" for name, failure in result["failures"].items())]
    return "\n".join(lines).rstrip() + "\n"


def ratio(row: dict[str, Any], other: dict[str, Any], edge: str) -> float:
    """Median over the turns of one engine's time by another's."""
    return median(a / b for a, b in zip(row["seconds"][edge], other["seconds"][edge], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, nargs="?", help="folder of `sd-ort export`, or GRAPH.onnx.xz")
    parser.add_argument(
        "torchscript", type=Path, nargs="?", help="the same by TorchScript, opset 17, for ORT's fusions"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpus", help="processors to keep to, as taskset takes them: 0,2")
    parser.add_argument("--edges", type=int, nargs="*", default=list(TURNS), help="latent edges")
    parser.add_argument("--turns", type=int, help="measured steps of each engine")
    parser.add_argument("--engines", nargs="*", default=[e.name for e in ENGINES], help="some of the engines only")
    parser.add_argument("--library", type=Path, help="libsd_ort_ops.so, instead of the one `sd-ort build-ops` built")
    parser.add_argument("--name", default="SD 1.5", help="of the model, for the title")
    parser.add_argument("--weights", default="Random weights", help="what they are, for the text")
    parser.add_argument("--profile", type=Path, help="folder for ONNX Runtime's profiles")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cpu_unet_sd15")
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve[0], int(options.serve[1]), *options.serve[2:])
    if options.make:
        engine = next(engine for engine in ENGINES if engine.name == options.make[0])
        return engine.make(Path(options.make[1]), Path(options.make[2]))
    if options.export is None:
        parser.error("give an export")

    options.library = options.library or library_path()
    if options.library is None:
        parser.error("no op library: run `sd-ort build-ops --cpu`, or give --library")
    engines = [e for e in ENGINES if e.name in options.engines and (options.torchscript or not e.torchscript)]
    scratch = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
    try:
        report(options, engines, scratch)
    finally:
        shutil.rmtree(scratch)


def report(options: argparse.Namespace, engines: list[Contender], scratch: Path) -> None:
    """Make the models, measure, write the results."""
    from sd_ort.runtime import machine as about

    sources = {False: unpack(options.export, scratch)}
    if options.torchscript:
        sources[True] = unpack(options.torchscript, scratch)
    started = time.perf_counter()
    models, failures = prepare(engines, sources, scratch)
    print(f"models made in {time.perf_counter() - started:.0f} s", failures or "", flush=True)
    rows = measure([engine for engine in engines if engine.model in models], models, options)
    result = {
        "commit": about.commit(),
        "machine": about.machine(),
        "versions": about.versions(),
        "threads": options.threads,
        "cpus": options.cpus,
        "batch": BATCH,
        "edges": options.edges,
        "model": options.name,
        "weights": options.weights,
        "failures": failures,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(text + "\n")
    markdown = table(json.loads(text))
    options.out.with_suffix(".md").write_text(markdown)
    print(markdown)


if __name__ == "__main__":
    main()
