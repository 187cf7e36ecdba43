"""Checks for nodes that onnxruntime-rocm would run wrong or on the CPU, before it opens a graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.core.errors import InputError, ProviderError
from sd_ort.runtime.op_library import build_command
from sd_ort.runtime.ort_wheel import ERRORS_ONLY, import_onnxruntime
from sd_ort.runtime.provider_table import CPU_EP, PROVIDERS
from sd_ort.runtime.providers import warn_once
from sd_ort.runtime.rocm_kernels import CONTRIB, WRONG_ON_RDNA, newer_operators, standard_opset

if TYPE_CHECKING:
    import onnx

_SOFTMAX = """<ir_version: 8, opset_import: ["" : 17]>
softmax (float[2,64] x) => (float[2,64] y) { y = Softmax (x) }"""


def check_graph(path: Path, model_bytes: bytes | None, *, has_ops: bool) -> None:
    """Check the graph at `path`, or `model_bytes` in its place, before the rocm provider opens it.

    `has_ops`: the op library is registered, so function bodies of its domain do not run. Warns of an opset whose
    operators run on the CPU. Raises InputError for a node that no kernel of the wheel takes, ProviderError for
    a Softmax or LayerNormalization where the wheel's is wrong.
    """
    import onnx

    model = onnx.ModelProto.FromString(model_bytes or path.read_bytes())
    again = "optimize it again for target rocm"
    if any((node.domain, node.op_type) == (CONTRIB, "MultiHeadAttention") for node in model.graph.node):
        raise InputError(f"{path} has ONNX Runtime's MultiHeadAttention, which onnxruntime-rocm cannot run: {again}.")
    if slow := newer_operators(model):
        warn_once(
            f"{path} is of opset {standard_opset(model.opset_import)}, at which onnxruntime-rocm runs "
            f"{', '.join(slow)} on the CPU and captures no graphs: {again}."
        )
    wrong = sorted({node.op_type for node in _nodes_that_run(model, has_ops)} & WRONG_ON_RDNA)
    if wrong and has_wrong_wave_size():
        advice = [again] if any(node.op_type in wrong for node in model.graph.node) else []
        advice += [] if has_ops else [f"build the op library: {build_command('rocm')}"]
        raise ProviderError(
            f"{path} has {', '.join(wrong)}, for which onnxruntime-rocm gives wrong values on this GPU: "
            f"{', and '.join(advice)}."
        )


@cache
def has_wrong_wave_size() -> bool:
    """Return whether the installed ROCm provider gives wrong values for `WRONG_ON_RDNA` on this GPU.

    Their kernels are compiled for waves of 64 lanes, which have 32 on RDNA. Tried by Softmax on rows of 64 columns.
    """
    import onnx

    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    graph = onnx.parser.parse_model(_SOFTMAX).SerializeToString()
    session = import_onnxruntime().InferenceSession(graph, options, providers=[(PROVIDERS["rocm"].ep, {}), CPU_EP])
    x = np.linspace(-2, 2, 128, dtype=np.float32).reshape(2, 64)
    expected = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    return not np.allclose(session.run(None, {"x": x})[0], expected, rtol=1e-3)


def _nodes_that_run(model: onnx.ModelProto, has_ops: bool) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of the graph and, without the op library, of its functions."""
    yield from model.graph.node
    if not has_ops:
        for function in model.functions:
            yield from function.node
