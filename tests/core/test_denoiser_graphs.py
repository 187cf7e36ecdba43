"""Tests of DenoiserGraphs: the inputs of each graph, the order of runs, and the message for a missing input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sd_ort.core.denoiser_graphs import ArrayDenoiserGraphs
from sd_ort.core.errors import InputError


class Graph:
    """A graph whose one output is the sum of its inputs, times `factor`."""

    def __init__(self, output: str, factor: float, *inputs: str) -> None:
        self.output, self.factor, self.inputs = output, factor, dict.fromkeys(inputs)

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        assert arrays.keys() == self.inputs.keys()
        return {self.output: self.factor * sum(arrays.values())}


def test_hoisted() -> None:
    graphs = ArrayDenoiserGraphs(
        "unet",
        {
            "unet_prompt": Graph("keys", 2, "context"),
            "unet_time": Graph("modulation", 3, "timestep", "keys"),
            "unet": Graph("out_sample", 1, "sample", "keys", "modulation"),
        },
    )
    assert graphs.input_names() == {"context", "timestep", "keys", "sample", "modulation"}
    context, timesteps = {"context": np.array([1.0, 2.0])}, np.array([10.0, 20.0, 30.0])
    shared = {**context, **graphs.prompt_outputs(context)}
    by_step = graphs.steps_outputs(shared, timesteps, rows=2)
    np.testing.assert_array_equal(by_step["modulation"], [[36, 42], [66, 72], [96, 102]])
    one = graphs.step_tensors(context, np.array([20.0, 20.0]))
    np.testing.assert_array_equal(one["modulation"], [66, 72])
    assert graphs.feed("step", {**one, "sample": context["context"], "more": timesteps}).keys() == {
        "sample", "keys", "modulation"
    }  # fmt: skip
    with pytest.raises(InputError, match="the unet needs sample, modulation, which"):
        graphs.feed("step", shared)


def test_one_graph() -> None:
    graphs = ArrayDenoiserGraphs("transformer", {"transformer": Graph("out", 1, "hidden_states", "timestep")})
    assert graphs.input_names() == {"hidden_states", "timestep"}
    assert graphs.steps_outputs({}, np.zeros(3), rows=2) == graphs.prompt_outputs({}) == {}
