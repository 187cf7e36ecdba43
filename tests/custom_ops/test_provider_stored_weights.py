"""DequantizeLinear of stored weights on our provider: its values, its memory, and the demo with `--weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from cli_type import Cli, success
from onnx import TensorProto, helper, numpy_helper
from provider_sessions import assigned_operators, session_of
from stored_values import dequantize, stored_parts

from fusion_passes import weight_recipes
from fusion_passes.quantized_weights import StoredArgument
from sd_ort.core.metrics import psnr
from sd_ort.demo.styles import lora_path
from sd_ort.optimize.weight_storage import WeightStorage, store_weights
from sd_ort.pipelines.text_to_image import StableDiffusionPipeline

RANDOM = np.random.default_rng(0)
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Blocks and channels along the last axis, another and in the middle; whole vectors of 8 elements, and odd sizes.
LAYOUTS = [
    ((64, 24), 0, 32), ((64, 7), 0, 32), ((24, 64), 1, 32), ((5, 96), 1, 32), ((3, 64, 10), 1, 64),
    ((24, 40), 0, 0), ((6, 3, 3, 8), 0, 0), ((40, 24), 1, 0), ((9, 5), 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("int8", False), ("int4", True), ("int4", False),
                                                 ("float8", True)])  # fmt: skip
def test_values(name: str, symmetric: bool, dtype: str, provider: str) -> None:
    """Every layout, to the last bit of float32, and of a rounding of it."""
    nodes, constants, outputs, expected = [], [], [], []
    for index, (shape, axis, block) in enumerate(LAYOUTS):
        argument: StoredArgument = (name, axis, block, symmetric)
        parts = stored_parts(argument, RANDOM.normal(size=shape).astype(np.float32) + 0.3, FLOATS[dtype])
        names = [f"{part}_{index}" for part in ("x", "scale", "zero")[: len(parts)]]
        for each, part in zip(names, parts, strict=True):
            constants.append(ir.to_proto(ir.Tensor(part, name=each)))
        attributes: dict[str, Any] = {"axis": axis} | ({"block_size": block} if block else {})
        nodes.append(helper.make_node("DequantizeLinear", names, [f"w_{index}"], **attributes))
        nodes.append(helper.make_node("Cast", [f"w_{index}"], [f"y_{index}"], to=TensorProto.FLOAT))
        outputs.append(helper.make_tensor_value_info(f"y_{index}", TensorProto.FLOAT, shape))
        expected.append(dequantize(argument, parts).astype(FLOATS[dtype]))
    graph = helper.make_graph(nodes, "stored", [], outputs, constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = session_of(proto.SerializeToString(), provider)
    assert assigned_operators(session)["SdOrtSimulated"]["DequantizeLinear"] == len(LAYOUTS)
    for value, exact in zip(session.run(None, {}), expected, strict=True):
        np.testing.assert_array_equal(value, exact.astype(np.float32))


def test_memory(provider: str) -> None:
    """One layer's weight at a time: eight of 2 MiB in float32 run in 5 MiB, stored in 4 bits."""
    weights = [
        numpy_helper.from_array(0.05 * RANDOM.normal(size=(512, 1024)).astype(np.float32), f"w{i}") for i in range(4)
    ]
    back = [
        numpy_helper.from_array(0.05 * RANDOM.normal(size=(1024, 512)).astype(np.float32), f"v{i}") for i in range(4)
    ]
    nodes = []
    for i in range(4):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        nodes.append(helper.make_node("MatMul", [f"y{i}", f"v{i}"], [f"x{i + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 512]) for name in ("x0", "x4")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights + back)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(proto)
    weight_recipes.init_recipes(model)
    assert store_weights(model, WeightStorage("int4")) == 8
    limit = {"memory_limit": str(7 << 20)}
    x = RANDOM.normal(size=(2, 512)).astype(np.float32)
    (result,) = session_of(ir.to_proto(model).SerializeToString(), provider, limit).run(None, {"x0": x})
    (exact,) = session_of(proto.SerializeToString(), provider).run(None, {"x0": x})
    assert 0.001 < np.linalg.norm(result - exact) / np.linalg.norm(exact) < 0.3
    with pytest.raises(Exception, match="memory"):
        session_of(proto.SerializeToString(), provider, limit).run(None, {"x0": x})


def test_the_demo(sd_ort: Cli, provider: str, tmp_path: Path) -> None:
    """Images by stored weights are near those in 16 bits; nothing runs elsewhere; a LoRA is stored as well."""
    out, plain = tmp_path / "stored", tmp_path / "plain"
    for folder, options in ((plain, ()), (out, ("--weights", "int8", "--weight-group", "32"))):
        success(sd_ort, "optimize", "demo", folder, "--target", "gpu", "--float16", *options)
    assert sd_ort("verify", "demo", out)[0] == 0
    sizes = [(folder / "unet" / "model.onnx.data").stat().st_size for folder in (plain, out)]
    assert sizes[1] < 0.62 * sizes[0]
    call: dict[str, Any] = {"prompt": "a red circle", "generator": 3, "progress": False, "num_inference_steps": 8}
    images = []
    for folder in (plain, out):
        pipeline = StableDiffusionPipeline.from_pretrained(folder, provider)
        images.append(np.asarray(pipeline(**call).images[0]))
    assert 25 < psnr(images[1], images[0]) < 90
    pipeline.load_lora_weights(lora_path("gold"), "gold")
    with_lora = np.asarray(pipeline(**call).images[0])
    assert psnr(with_lora, images[1]) < 30
    pipeline.unload_lora_weights()
    np.testing.assert_array_equal(np.asarray(pipeline(**call).images[0]), images[1])
