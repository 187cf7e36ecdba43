#!/usr/bin/env python3
"""Microseconds of the host for a replayed run in our provider, without the driver's launch: on the host vendor, whose
launches are dropped, so that what is left is ONNX Runtime, its Python and the provider.

    python scripts/bench/replay.py [--runs 20000]

The graph is the one between two UNet calls, captured; a UNet's replay takes the same way. The least of ten rounds.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["SD_ORT_SIMULATED_IDLE"] = "1"

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.runtime import build
from sd_ort.runtime.bound_run import BoundRun
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import DTYPES, open_graph

SIZES = {"window": 4, "kinds": 3, "b": 1, "c": 4, "h": 64, "w": 64, "t1": 52, "n": 12, "rows": 2}
ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    options = parser.parse_args()
    library = build.build(cpu=True, provider=True).with_name(PROVIDER_LIBRARIES["simulated"])
    provider = f"plugin:{library}"
    what = sampling_graphs.SchedulerStepSpec(
        np.dtype(np.float16), np.dtype(np.float32), window=SIZES["window"], scales_input=False
    )
    session = open_graph(sampling_graphs.scheduler_step_graph(what), provider, capture=True)
    arrays: dict[str, np.ndarray] = {
        value.name: np.zeros([size if isinstance(size, int) else SIZES[size] for size in value.shape],
                             DTYPES[value.type])
        for value in session.get_inputs()
    }  # fmt: skip
    bound = BoundRun(session, arrays, provider_named(provider).device, graph_id=0)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(options.runs // ROUNDS):
            bound.run(wait=False)
        times.append((time.perf_counter() - start) / (options.runs // ROUNDS))
    print(f"a replayed run takes {1e6 * min(times):.2f} us of the host beside the driver's launch")


if __name__ == "__main__":
    main()
