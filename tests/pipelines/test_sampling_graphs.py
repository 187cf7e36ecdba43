"""Helper graphs of the device sampling loop."""

from __future__ import annotations

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.runtime.session import open_graph


def test_conditioning_graph() -> None:
    """Rows are in the order of `row`, zeroed ones are zeros, and check_<i> is NaN for the input with a NaN."""
    parts = [np.arange(6, dtype=np.float16).reshape(2, 1, 3), np.full((2, 1, 2), 7, np.float32)]
    parts[1][1, 0, 0] = np.nan
    session = open_graph(
        sampling_graphs.conditioning_graph((np.dtype(np.float32), 3, (np.dtype("f2"), np.dtype("f4")))), "cpu"
    )
    feed = {
        "part_0": parts[0],
        "part_1": parts[1],
        "row": np.array([1, 0, 0]),
        "zeroed": np.array([True, False, False]),
    }
    rows, first, second = session.run(["conditioning", "check_0", "check_1"], feed)
    np.testing.assert_array_equal(rows, [[[0] * 5], [[0, 1, 2, 7, 7]], [[0, 1, 2, 7, 7]]])
    assert first == 0
    assert np.isnan(second)
