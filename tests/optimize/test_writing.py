"""Weights are written in graph order and hashed; calibration gives the same results from memory as from a file."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from sd_ort.core.pipeline_folder import sha256
from sd_ort.graphs import external_data_writer
from sd_ort.graphs.save import save
from sd_ort.optimize import calibration


def model() -> ir.Model:
    """Two products, whose weights are large, and a scale, which stays in the graph."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["batch", 64]), type=ir.TensorType(ir.DataType.FLOAT))
    weights = []
    for name, shape in {"weight": (64, 64), "other": (64, 64), "small": (64,)}.items():
        tensor = ir.Tensor(rng.standard_normal(shape, np.float32), name=name)
        weights.append(ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor))
    nodes = []
    for last, op, weight, name in zip("xps", ("MatMul", "MatMul", "Mul"), weights, "psy", strict=True):
        before = x if last == "x" else nodes[-1].outputs[0]
        nodes.append(ir.node(op, [before, weight]))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].dtype = name, ir.DataType.FLOAT
    nodes[-1].outputs[0].shape = x.shape
    return ir.Model(
        ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, initializers=weights, opset_imports={"": 21}, name="net"),
        ir_version=10,
    )


def test_data_file_has_every_tensor_and_the_returned_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_data_writer, "MAX_PENDING", 1000)  # fewer than the bytes of all tensors
    monkeypatch.setattr(external_data_writer, "MIN_ALIGNED", 300)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(size).astype(dtype) for size in (100, 7, 600) for dtype in (np.float32, np.float16)]
    arrays.append(arrays[0].astype(ml_dtypes.bfloat16))
    (tmp_path / "source.data").write_bytes(arrays[0].tobytes())
    outside = ir.ExternalTensor("source.data", 0, 400, ir.DataType.FLOAT, shape=ir.Shape([100]), name="outside",
                                base_dir=str(tmp_path))  # fmt: skip
    packed = ir.Tensor(np.arange(8, dtype=np.uint8).astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4, name="packed")
    lazy = ir.LazyTensor(lambda: ir.Tensor(arrays[2][::2]), dtype=ir.DataType.FLOAT, shape=ir.Shape([4]), name="lazy")
    tensors = [*(ir.Tensor(array, name=f"t{i}") for i, array in enumerate(arrays)), outside, packed, lazy]
    stored, digest = external_data_writer.write(tmp_path / "x.data", tensors)
    assert digest == sha256(tmp_path / "x.data")
    content = (tmp_path / "x.data").read_bytes()
    for tensor, actual in zip(tensors, stored, strict=True):
        assert (actual.name, actual.dtype, actual.shape) == (tensor.name, tensor.dtype, tensor.shape)
        assert content[actual.offset : actual.offset + actual.length] == tensor.tobytes()
        assert actual.tobytes() == tensor.tobytes()
        assert actual.offset % external_data_writer.ALIGNMENT == 0 or tensor.nbytes <= 300


def test_exception_of_a_lazy_weight_ends_the_writing(tmp_path: Path) -> None:
    def fail() -> ir.Tensor:
        raise ValueError("no such weight")

    lazy = ir.LazyTensor(fail, dtype=ir.DataType.FLOAT, shape=ir.Shape([4]), name="lazy")
    with pytest.raises(ValueError, match="no such weight"):
        external_data_writer.write(tmp_path / "x.data", [lazy])

    def stop() -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        save(model(), tmp_path / "model.onnx", stop)
    assert not (tmp_path / "model.onnx").exists()


def test_calibration_from_memory_is_that_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(source := model(), tmp_path / "model.onnx")  # its weights lie in a file from here on
    feeds = [{"x": np.random.default_rng(2).standard_normal((3, 64), np.float32)}]
    monkeypatch.setattr(calibration, "MIN_SHARED_BYTES", 1 << 13)
    in_memory = calibration.measure(source, feeds, tmp_path)
    monkeypatch.setattr(calibration, "SIZE_LIMIT", 0)
    assert calibration.measure(source, feeds, tmp_path) == in_memory
    weights = {
        name: value.const_value.numpy() for name, value in source.graph.initializers.items() if value.const_value
    }
    product = feeds[0]["x"] @ weights["weight"]
    assert in_memory["p"] == pytest.approx(np.abs(product).max(), rel=1e-5)
    assert in_memory["y"] == pytest.approx(np.abs(product @ weights["other"] * weights["small"]).max(), rel=1e-5)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_sizes_of_a_file_are_stored_in_the_next_one(tmp_path: Path) -> None:
    """Shape inference reads int64 tensors in the model file alone; one of a source's data file moves there."""
    sizes = np.arange(77)
    (tmp_path / "source.data").write_bytes(sizes.tobytes())
    stored = ir.ExternalTensor("source.data", 0, sizes.nbytes, ir.DataType.INT64, shape=ir.Shape([77]), name="sizes",
                               base_dir=str(tmp_path))  # fmt: skip
    value = ir.Value(name="sizes", shape=stored.shape, type=ir.TensorType(stored.dtype), const_value=stored)
    node = ir.node("Reshape", [ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT)), value])
    node.outputs[0].name, node.outputs[0].dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph([node.inputs[0]], [node.outputs[0]], nodes=[node], initializers=[value], opset_imports={"": 21})
    save(ir.Model(graph, ir_version=10), tmp_path / "out" / "model.onnx")
    (saved,) = ir.load(tmp_path / "out" / "model.onnx").graph.initializers.values()
    assert not isinstance(saved.const_value, ir.ExternalTensor)
    np.testing.assert_array_equal(saved.const_value.numpy(), sizes)
