"""Fuse random graphs and compare the numbers: blocks that fusions look for, spoiled and mixed with other operators.

    python scripts/checks/fuzz_fusions.py [--graphs 600] [--first 0]

The graphs are those of scripts/fixtures/random_graphs.py, plain and mixed in turn. One whose numbers differ, or that is
not taken, is told with its seed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys

from scripts.fixtures.random_graphs import Graph, Mixed, difference
from sd_ort.runtime.machine import commit, machine, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--graphs", type=int, default=600)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    print(f"{machine()}\n{versions()}, commit {commit()}", flush=True)
    wrong = 0
    for seed in range(options.first, options.first + options.graphs):
        kind = (Graph, Mixed)[seed % 2]
        try:
            fault = difference(kind(seed))
        except Exception as error:  # whatever it is, it is a finding
            fault = f"{type(error).__name__}: {error}"
        if fault:
            wrong += 1
            print(f"{kind.__name__}, seed {seed}: {fault}", flush=True)
    print(f"{options.graphs} graphs from seed {options.first} on, {wrong} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
