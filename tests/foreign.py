"""The foreign graphs: what is in them, inputs for them, and what the targets make of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import graph_fixtures
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import fusion_passes
from fusion_passes import DOMAIN
from fusion_passes.operators import bodies
from fusion_passes.pass_ import run_all
from sd_ort.optimize.targets import Target

GRAPHS = Path(__file__).parent / "graphs" / "foreign"
NAMES = sorted(path.name.removesuffix(".onnx.xz") for path in GRAPHS.glob("*.onnx.xz"))
ATTENTION = ("Softmax", "Attention")  # what an attention looks like before it is fused
NORM = ("InstanceNormalization", "GroupNormalization")
# Batch, and the two sides of an image or the one of a text.
SHAPES = ((1, 16, 24), (2, 24, 16))


def load(name: str) -> onnx.ModelProto:
    """A foreign graph with random weights."""
    return graph_fixtures.load(f"foreign/{name}")


def feeds(model: onnx.ModelProto, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Random inputs: positive where they are one number a picture (times), small where they are ids or labels."""
    batch, *sides = shape
    random = np.random.default_rng(0)
    text = 7 if any("mask" in value.name for value in model.graph.input) else sides[0] // 4
    made = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        free = iter(sides if len(dims) == 4 else [text])
        sizes = [d.dim_value or (batch if i == 0 else next(free)) for i, d in enumerate(dims)]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if np.issubdtype(dtype, np.integer):
            made[value.name] = random.integers(0, 2 if "mask" in value.name else 4, sizes).astype(dtype)
        else:
            numbers = random.normal(0, 1, sizes)
            made[value.name] = (np.abs(numbers) * 100 if len(sizes) < 2 else numbers).astype(dtype)
    return made


def canonical(source: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in the one spelling, from which every target starts."""
    model = ir.from_proto(source)
    fusion_passes.canonicalize(model)
    return ir.to_proto(model)


def fuse(model: ir.Model, target: Target) -> Counter[str]:
    """Fuse a canonical graph for a target, in place; returns the operators afterwards."""
    fusion_passes.fuse(model, target.fusions)
    run_all(model, target.passes)
    return operators(model)


def operators(model: ir.Model) -> Counter[str]:
    """How many nodes of each operator, in the graph and those inside it."""
    return Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph))


def run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    """The first output."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in given.items() if name in wanted})[0]


def errors(source: onnx.ModelProto, start: onnx.ModelProto, target: Target) -> list[float]:
    """Relative L2 errors of what the target's passes make of `start`, as function bodies, at each of SHAPES."""
    model = ir.from_proto(start)
    fuse(model, target)
    bodies.attach(model, [node for node in model.graph if node.domain == DOMAIN])
    fused = ir.to_proto(model)
    found = []
    for shape in SHAPES:
        given = feeds(source, shape)
        want, got = run(source, given), run(fused, given)
        found.append(float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)))
    return found
