"""Mutants of foreign graphs that mean the same must be fused as often: 2000 of them by default.

    python scripts/checks/mutate_exports.py [--mutants 2000] [--first 0] [NAME ...]

The graphs are those of tests/graphs/other_architectures with at most 700 nodes (or those named), the mutations those of
scripts/fixtures/mutations.py. A mutant whose counts differ is told with its seed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys

import onnx_ir as ir

from scripts.fixtures import other_architectures
from scripts.fixtures.mutations import fused, mutate
from sd_ort.runtime.machine import commit, machine, versions

SMALL = 700  # nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", default=other_architectures.NAMES)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    print(f"{machine()}\n{versions()}, commit {commit()}")
    sources = {name: other_architectures.load(name) for name in options.names}
    sources = {name: model for name, model in sources.items() if len(model.graph.node) <= SMALL or len(sources) < 9}
    expected = {name: fused(ir.from_proto(model)) for name, model in sources.items()}
    names, wrong = list(sources), 0
    for seed in range(options.first, options.first + options.mutants):
        name = names[seed % len(names)]
        mutant, done = mutate(sources[name], seed)
        actual = fused(mutant)
        if actual != expected[name]:
            wrong += 1
            lost, more = expected[name] - actual, actual - expected[name]
            print(f"{name}, seed {seed}: lost {dict(lost)}, more {dict(more)}: {'; '.join(done)}", flush=True)
    print(f"{options.mutants} mutants of {len(names)} graphs, {wrong} fused otherwise")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
