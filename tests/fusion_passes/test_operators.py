"""Every fused operator has one definition; its function body agrees with the reference of its kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from custom_ops import operator_spec as spec
from fusion_passes import DOMAIN
from fusion_passes.operators import BY_NAME, OPERATORS, function_bodies
from fusion_passes.operators.definition import FusedOperator

# Folders of custom_ops by fused operator. The other operators have bodies of one or two standard operators; the cases
# of their fusions compare their outputs.
KERNELS = {
    "AdaptiveNorm": "adaptive_norm",
    "Bfloat16Attention": "bfloat16_attention",
    "Bfloat16Conv": "bfloat16_conv",
    "Bfloat16MatMul": "bfloat16_matmul",
    "BiasAdd": "bias_add",
    "BiasSplitGelu": "bias_split_gelu",
    "GroupNorm": "group_norm",
    "LinearAdd": "linear_add",
    "LinearSplitGelu": "linear_split_gelu",
    "MultiHeadAttention": "multi_head_attention",
    "QuantizedConv": "quantized_conv",
    "RotaryEmbedding": "rotary_embedding",
    "RotaryQkv": "rotary_qkv",
    "SkipGroupNorm": "skip_group_norm",
    "SkipLayerNormalization": "skip_layer_norm",
    "SubpixelShuffle": "subpixel_shuffle",
    "SwiGlu": "swiglu",
    "UpsampleNearest": "upsample_nearest",
    "WinogradConv": "winograd_conv",
}


def fused(operator: FusedOperator, kernel: spec.CustomOperator, case: spec.OperatorCase) -> bool:
    """Return whether fusions create nodes with the inputs of a case; kernels support more."""
    inputs = set(case.inputs)
    if "quantized_scale" in case.attributes:  # tests/fusion_passes/test_eight_bits.py has these bodies
        return False
    images = all(len(case.inputs[kernel.inputs[i]]) == 4 for i in operator.image_inputs)
    if operator.name == "MultiHeadAttention":
        return not {"bias", "key_padding_mask"} & inputs
    if operator.name == "LinearSplitGelu":
        return inputs == {"X", "W", "bias"}
    if operator.name == "SkipLayerNormalization":
        return "beta" in inputs
    return images and ("bias" not in inputs or case.attributes.get("channels_last", 1) == 1)


def small(case: spec.OperatorCase) -> bool:
    """Return whether a case runs fast on a CPU."""
    elements = [int(np.prod(shape)) for shape in case.inputs.values()]
    return not case.benchmark and case.distribution == "normal" and min(elements) > 0 and sum(elements) < 50_000


def cases() -> list[tuple[FusedOperator, spec.CustomOperator, spec.OperatorCase]]:
    selected = []
    for name, folder in KERNELS.items():
        kernel = spec.load(folder)
        operator = BY_NAME[name]
        selected += [(operator, kernel, case) for case in kernel.cases if small(case) and fused(operator, kernel, case)]
    return selected


@pytest.mark.parametrize(("operator", "kernel", "case"), cases(), ids=lambda x: getattr(x, "name", ""))
def test_the_body_matches_the_kernels_reference(
    operator: FusedOperator, kernel: spec.CustomOperator, case: spec.OperatorCase
) -> None:
    arrays = spec.generate_inputs(kernel, case, "float32")
    names = [name if name in arrays else "" for name in kernel.inputs]
    while not names[-1]:
        names.pop()
    defaults: dict[str, int | float] = {"channels_last": 1, "unidirectional": 0, "scale": 0.3, "epsilon": 1e-5}
    defaults |= {"stride": 1, "x_last": 0, "y_last": 0, "gated": 0, "gelu": 0, "to": onnx.TensorProto.FLOAT}
    available = defaults | case.attributes
    attributes = {name: available[name] for name in operator.attributes if name != "kv_num_heads" or name in available}
    results = [name for name in kernel.outputs if name != spec.QUANTIZED]
    node = onnx.helper.make_node(operator.name, names, results, domain=DOMAIN)
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    expected = kernel.reference(arrays, attributes)
    inputs, outputs = (
        [
            onnx.helper.make_tensor_value_info(name, integers or onnx.TensorProto.FLOAT, array.shape)
            for name, array in values.items()
            for integers in [array.dtype.kind == "i" and onnx.helper.np_dtype_to_tensor_dtype(array.dtype)]
        ]
        for values in (arrays, expected)
    )
    graph = onnx.helper.make_graph([node], "g", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    function_bodies.attach(model, list(model.graph))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    for actual, (name, want) in zip(session.run(list(expected), arrays), expected.items(), strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(initial=0), err_msg=name)


def test_definitions() -> None:
    assert len(BY_NAME) == len(OPERATORS)
    assert {operator.name for operator in OPERATORS if operator.image_inputs} == {"GroupNorm", "SkipGroupNorm"}
    assert all("channels_last" in operator.attributes for operator in OPERATORS if operator.image_inputs)
