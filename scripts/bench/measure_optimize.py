"""What `sd-ort optimize --float16` takes for all components of a full-size pipeline: seconds, CPU seconds, memory.

    python scripts/bench/measure_optimize.py WORK [--presets sd15 sdxl] [--target cuda]

makes WORK/<preset> first, where it is missing: the exporter's real graph, weights drawn from N(0, 0.02) while they are
written, so that a pipeline is made that would not fit into memory (disk: 4.3 GB for sd15, 14 GB for sdxl, half of that
again for the result; with --holes the weights are zeros in a sparse file, which take no room). Then the time of the
fusions alone over the number of nodes, on the graphs in tests/graphs. Writes results/optimize_time.json. Peak memory is
the resident set of the process at its largest, imports included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fusion_passes.canonicalize import canonicalize
from fusion_passes.fuse import fuse

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 1 << 24  # random numbers drawn at once; weights are cut from it, from another place each


def make_pipeline(preset: str, folder: Path, holes: bool) -> None:
    """Export `preset` into `folder` with memory for one graph: parameters are allocated and never written."""
    import gc

    import torch

    from sd_ort.checkpoints import signatures
    from sd_ort.checkpoints.checkpoint import build_model, class_name, component_signature, is_sdxl, select_components
    from sd_ort.checkpoints.modules import wrap
    from sd_ort.checkpoints.presets import open_preset
    from sd_ort.core.quiet import quiet
    from sd_ort.export.exporter import NOISY_LOGGERS, TRACE_SIZES, example_input, save_config
    from sd_ort.export.tracing import export_dynamo, normalize_exported_names

    def load_uninitialized(config: dict[str, Any]) -> torch.nn.Module:
        """Return a model with uninitialized parameters: memory pages that are never written are not allocated."""
        with torch.device("meta"):
            module: torch.nn.Module = build_model(class_name(config), config)
        module = module.to_empty(device="cpu").eval()
        for name, buffer in module.named_buffers():
            if name.endswith("position_ids"):
                buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        return module

    source = open_preset(preset, 0)
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    block = np.random.default_rng(0).normal(0, 0.02, BLOCK).astype(np.float32)
    for component in select_components(source, None):
        (work / component).mkdir()
        with quiet(*NOISY_LOGGERS), torch.no_grad():
            model = load_uninitialized(source.configs[signatures.MODEL_OF.get(component, component)])
            config = save_config(model, work / component)
            signature = component_signature(source, component, config)
            module = wrap(component, model, is_sdxl(source), "controlnet" in source.configs)
            args = [example_input(t, TRACE_SIZES, config, 1) for t in signature.inputs]
            graph = export_dynamo(module, args, signature, 20, work)
            normalize_exported_names(graph, signature)
        (_save_holes if holes else _save)(graph, work / component / "model.onnx", block)
        print(f"made {preset} {component}", flush=True)
        del model, module, args, graph
        torch.compiler.reset()
        gc.collect()
    source.write_configs(work)
    work.rename(folder)


def _save(model: Any, path: Path, block: np.ndarray) -> None:
    """Save `model` with random numbers for its weights, drawn one tensor at a time."""
    import onnx_ir as ir

    for index, value in enumerate(model.graph.initializers.values()):
        tensor = value.const_value
        if _is_hollow(tensor):
            value.const_value = _random(value.name, list(tensor.shape.numpy()), block, index * 7919)
    ir.save(model, path, external_data="model.onnx.data", alignment=65536)
    for value in model.graph.initializers.values():  # onnxscript's rules keep the last graph they saw: not its weights
        value.const_value = None


def _save_holes(model: Any, path: Path, block: np.ndarray) -> None:
    """Save `model` with weights of zeros in a file that takes no room."""
    import onnx_ir as ir

    end = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if _is_hollow(tensor):
            value.const_value = ir.ExternalTensor(
                "model.onnx.data", end, tensor.nbytes, tensor.dtype, name=name, shape=tensor.shape, base_dir=path.parent
            )
            end += -(-tensor.nbytes // 65536) * 65536
    with (path.parent / "model.onnx.data").open("wb") as data:
        data.truncate(end)
    ir.save(model, path)


def _is_hollow(tensor: Any) -> bool:
    """Whether a tensor comes from parameters nobody wrote, and is no small constant or table of the graph."""
    return bool(tensor.size > 64 and tensor.dtype.is_floating_point() and not tensor.numpy().any())


def _random(name: str, shape: list[int], block: np.ndarray, start: int) -> Any:
    import onnx_ir as ir

    def draw() -> ir.Tensor:
        numbers = np.resize(np.roll(block, -start)[: math.prod(shape)], shape)
        return ir.Tensor(numbers + np.float32(len(shape) == 1), name=name)  # vectors around 1: scales

    return ir.LazyTensor(draw, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), name=name)


def measure(source: Path, output: Path, target: str) -> dict[str, Any]:
    """One run of the command line in a process of its own."""
    log = output.with_suffix(".log")
    shutil.rmtree(output, ignore_errors=True)
    started = time.perf_counter()
    program = [sys.executable, "-c", "import sd_ort.cli; sd_ort.cli.main()"]
    command = [*program, "optimize", str(source), str(output), "--float16", "--target", target]
    with log.open("w") as text:
        process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(log.read_text())
    manifest = json.loads((output / "sd_ort.json").read_text())
    entries = manifest["components"]
    result = {
        "target": target,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "user_seconds": round(used.ru_utime, 1),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "load_average": os.getloadavg()[0],
        "weights": "zeros, in a sparse file" if _is_sparse(source) else "random",
        "read_gb": round(sum(f.stat().st_size for f in source.glob("*/*.data")) / 1e9, 2),
        "written_gb": round(sum(f.stat().st_size for f in output.glob("*/*.data")) / 1e9, 2),
        "components": {
            name: {key: entry.get(key) for key in ("nodes_before", "nodes", "seconds", "calibration")}
            for name, entry in entries.items()
        },
    }
    shutil.rmtree(output)
    log.unlink()
    return result


def _is_sparse(source: Path) -> bool:
    files = [file.stat() for file in source.glob("*/*.data")]
    return sum(file.st_blocks * 512 for file in files) < sum(file.st_size for file in files) / 2


def growth(repeats: int = 1) -> dict[str, Any]:
    """CPU seconds of canonicalization, fusion and lowering for each committed graph, and the exponent over nodes."""
    import onnx_ir as ir

    from fusion_passes.graph_pass import run_all
    from scripts.fixtures import graph_fixtures
    from sd_ort.optimize.targets import TARGETS

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in graph_fixtures.NAMES:
            component = name.rsplit(".", 1)[1]
            path = graph_fixtures.make_folder(Path(scratch) / name, name) / component / "model.onnx"
            best = math.inf
            for _ in range(repeats):
                model = ir.load(path)
                nodes = sum(1 for _ in model.graph)
                started = time.process_time()
                canonicalize(model)
                fuse(model)
                run_all(model, TARGETS["cuda"].lowering_passes)
                best = min(best, time.process_time() - started)
            rows.append({"graph": name, "nodes": nodes, "cpu_seconds": round(best, 3)})
    exponent = {
        exporter: round(_exponent([row for row in rows if f"-{exporter}-" in str(row["graph"])]), 2)
        for exporter in ("dynamo", "torchscript")
    }
    return {"exponent": exponent, "graphs": rows}


def _exponent(rows: list[dict[str, Any]]) -> float:
    """Slope of log(seconds) over log(nodes): 1 is linear. Graphs below 300 nodes are left out: fixed costs."""
    large = [row for row in rows if row["nodes"] >= 300]
    nodes, seconds = (np.log([row[key] for row in large]) for key in ("nodes", "cpu_seconds"))
    return float(np.polyfit(nodes, seconds, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--presets", nargs="*", default=["sd15", "sdxl"])
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--holes", action="store_true", help="make pipelines whose weights are zeros in a sparse file")
    parser.add_argument("--only-make", action="store_true", help="make the pipelines, measure nothing")
    options = parser.parse_args()
    for preset in options.presets:
        if not (options.work / preset).is_dir():
            make_pipeline(preset, options.work / preset, options.holes)
    if options.only_make:
        return
    from scripts.bench.compare_fusion import measured_with

    path = ROOT / "results" / "optimize_time.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"pipelines": {}}
    for preset in options.presets:
        row = measure(options.work / preset, options.work / f"{preset}-out", options.target)
        result["pipelines"][preset] = row
        print(json.dumps({preset: row}), flush=True)
    result["growth"] = growth()
    path.write_text(json.dumps({"machine": measured_with(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
