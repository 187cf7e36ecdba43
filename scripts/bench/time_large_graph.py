"""Time the optimization of a graph of many UNet-like nodes (scripts/fixtures/large_graphs.py), file to file.

    python scripts/bench/time_large_graph.py [--nodes 50000] [--target cuda] [--out results/large_graph.json]

Seconds of this process's CPU, which other work on the machine lengthens less than it lengthens time, and of time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import onnx

from scripts.fixtures.large_graphs import BLOCK, blocks
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.machine import commit, machine, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--target", choices=TARGETS, default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source.onnx"
        onnx.save(blocks(BLOCK, options.nodes // 10), source)
        started, cpu = time.perf_counter(), time.process_time()
        entry = optimize_component(source, Path(work) / "out" / "model.onnx", TARGETS[options.target], embed=True)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    result = {
        "target": options.target,
        "nodes_before": entry["nodes_before"],
        "nodes": entry["nodes"],
        "counts": entry["counts"],
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds": round(seconds, 1),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
