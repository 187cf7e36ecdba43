"""Committed graphs without weights (scripts/fixtures/make_graph_fixtures.py), made whole again with random numbers."""

from __future__ import annotations

import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import onnx

from sd_ort.core import folder
from sd_ort.family.presets import PRESETS
from sd_ort.family.signatures import MODEL_OF

GRAPHS = Path(__file__).parent / "graphs"
NAMES = sorted(path.name.removesuffix(".onnx.xz") for path in GRAPHS.glob("*.onnx.xz"))


def make_folder(path: Path, name: str) -> Path:
    """A pipeline folder at `path` with the one component that the graph `name` (preset-exporter-opset.component) is."""
    export, component = name.rsplit(".", 1)
    preset = PRESETS[export.rsplit("-", 2)[0]]
    (path / component).mkdir(parents=True)
    onnx.save(load(name), path / component / folder.MODEL)
    (path / component / "config.json").write_text(json.dumps(preset.models[MODEL_OF.get(component, component)]))
    (path / "model_index.json").write_text(json.dumps({"_class_name": preset.pipeline}))
    return path


def load(name: str) -> onnx.ModelProto:
    """The graph with weights: random, the same at every call, distinct, and such that activations keep their scale."""
    model = onnx.load_from_string(lzma.decompress((GRAPHS / f"{name}.onnx.xz").read_bytes()))
    first_use = {}
    for node in reversed(model.graph.node):
        for index, value in enumerate(node.input):
            first_use[value] = (node.op_type, index)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            numbers = weight(tensor.name, list(tensor.dims), *first_use.get(tensor.name, ("", 0)))
            filled = onnx.numpy_helper.from_array(
                numbers.astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            )
            tensor.raw_data = filled.raw_data
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    return model


def weight(name: str, shape: list[int], op_type: str, index: int) -> np.ndarray:
    """Matrices and kernels with variance 1/fan_in, scales of normalizations around 1, biases around 0."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if sum(size > 1 for size in shape) > 1:
        fan_in = shape[0] if op_type == "MatMul" else int(np.prod(shape[1:]))
        return random.normal(0, fan_in**-0.5, shape)
    is_scale = op_type == "Mul" or (index == 1 and op_type.endswith("Normalization"))
    return random.normal(float(is_scale), 0.1, shape)
