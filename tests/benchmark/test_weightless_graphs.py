"""Raw exports without weights: every constant that an exporter folds a parameter into comes back with its numbers."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from scripts.bench.export_without_weights import MARK, beginning, refer
from scripts.bench.gpu_models import fill
from sd_ort.core import pipeline_folder


def constant(name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
    return value


def test_folded_parameters_are_filled_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    traced = {name: (MARK + rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    weights = {beginning(array): name for name, array in traced.items()}
    frequencies = np.linspace(0, 1, 8, dtype=np.float32)
    folded = {
        "conv.weight": traced["conv.weight"],
        "val_1": traced["norm.weight"].reshape(8, 1, 1),
        "val_2": traced["linear.weight"].T.copy(),
        "val_3": frequencies,
    }
    values = [constant(name, array) for name, array in folded.items()]
    for value in values:
        refer(value, weights)
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values, name="g", opset_imports={"": 21}), ir_version=10)
    graph = tmp_path / "graph.onnx.xz"
    graph.write_bytes(lzma.compress(ir.to_proto(model).SerializeToString()))
    random = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    fill(graph, random, tmp_path / "out")
    filled = ir.load(tmp_path / "out" / pipeline_folder.MODEL).graph.initializers
    read = {name: value.const_value.numpy() for name, value in filled.items() if value.const_value is not None}
    np.testing.assert_array_equal(read["conv.weight"], random["conv.weight"])
    np.testing.assert_array_equal(read["val_1"], random["norm.weight"].reshape(8, 1, 1))
    np.testing.assert_array_equal(read["val_2"], random["linear.weight"].T)
    np.testing.assert_array_equal(read["val_3"], frequencies)
    with pytest.raises(ValueError, match=r"val_1 is no norm\.weight"):
        fill(graph, random | {"norm.weight": torch.randn(9)}, tmp_path / "other")


def test_other_derivations_of_a_parameter_are_refused() -> None:
    """Its numbers would be those of the machine that traced the graph."""
    with pytest.raises(SystemExit, match="val_1"):
        refer(constant("val_1", np.full((2, 2), MARK + 1, np.float32)), {})


SHAPES = {"conv.weight": (4, 2, 3, 3), "norm.weight": (8,), "linear.weight": (6, 4)}
