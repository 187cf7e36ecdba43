"""Graphs without weights, for tests/test_families.py: every exporter's spelling of every family in a few hundred kB.

    sd-ort export --preset sd15-tiny --random-weights --exporter torchscript --opset 17 EXPORTS/sd15-tiny-torchscript-17
    python scripts/make_graph_fixtures.py EXPORTS/*

writes tests/graphs/<folder>.<component>.onnx.xz for each component. Weights become references to a file that does not
exist: their names, shapes and types are kept, and a test fills them with random numbers. What a fusion must read
(shapes, scales, masks, tables of ones) is kept as it is.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

import numpy as np
import onnx

GRAPHS = Path(__file__).parent.parent / "tests" / "graphs"
SMALLEST_WEIGHT = 24  # elements; below it lie scales, epsilons and the tiny models' tables of frequencies
LARGEST_WEIGHT = 1e4  # in magnitude; above it lie masks
KEPT_METADATA = "pkg.torch.onnx.name_scopes"


def is_weight(tensor: onnx.TensorProto, numbers: np.ndarray) -> bool:
    """Whether a tensor is a parameter: floating, not tiny, not all alike, and of a parameter's size."""
    if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) or numbers.size < SMALLEST_WEIGHT:
        return False
    return bool(np.abs(numbers).max() < LARGEST_WEIGHT and np.any(numbers != numbers.ravel()[0]))


def strip(path: Path) -> onnx.ModelProto:
    """The model at `path` without its weights."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if is_weight(tensor, onnx.numpy_helper.to_array(tensor)):
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value="random")
    for node in model.graph.node:
        kept = [prop for prop in node.metadata_props if prop.key == KEPT_METADATA]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    return model


def main() -> None:
    GRAPHS.mkdir(exist_ok=True)
    for folder in map(Path, sys.argv[1:]):
        for path in sorted(folder.glob("*/model.onnx")):
            out = GRAPHS / f"{folder.name}.{path.parent.name}.onnx.xz"
            out.write_bytes(lzma.compress(strip(path).SerializeToString(), preset=9))
            print(f"{out.name}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
