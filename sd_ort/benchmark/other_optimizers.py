"""ONNX Runtime's own optimizer, and onnxscript's, on a raw export."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fusion_passes.operators import OPERATORS
from fusion_passes.operators.definition import never
from sd_ort.core import pipeline_folder
from sd_ort.graphs.load import load


class _AnyInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(int, metaclass=_AnyInt):
    """int() that also converts arrays of one element."""

    def __new__(cls, number: Any) -> int:  # type: ignore[misc]
        return int(number.item() if hasattr(number, "item") else number)


# Results of ONNX Runtime's optimizer without CPU kernels, as its options name them (enable_nhwc_conv) without
# underscores: operators with the names of sd-ort's, and two packed forms of attention.
_NOT_ON_CPU = {op.name.lower() for op in OPERATORS if op.has_cpu_kernel is never} | {"packedqkv", "packedkv"}
# Options that are no fusions for Stable Diffusion, or that change its results.
_NOT_FUSIONS = ("enable_shape_inference", "enable_gemm_fast_gelu", "enable_gelu_approximation")


def onnxruntime_type(component: str) -> str:
    """Return the model type of a component in onnxruntime.transformers."""
    return "unet" if component in ("unet", "controlnet") else "vae" if component.startswith("vae") else "clip"


def optimize_by_onnxruntime(source: Path, out: Path, component: str, provider: str, dtype: str = "float32") -> None:
    """Run onnxruntime.transformers with every Stable Diffusion fusion that the provider has kernels for.

    Its attention fusion calls int() on arrays of one element, which NumPy 2.4 rejects; this process replaces that int.
    """
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    model_type, on_cpu = onnxruntime_type(component), provider == "cpu"
    vars(sys.modules["fusion_attention_unet"])["int"] = _Int  # ORT puts its own folder on the path
    options = FusionOptions(model_type)
    for name in [name for name in vars(options) if name.startswith("enable_") and name not in _NOT_FUSIONS]:
        setattr(options, name, not (on_cpu and name.removeprefix("enable_").replace("_", "") in _NOT_ON_CPU))
    optimized = optimize_model(
        str(source), model_type, opt_level=0, optimization_options=options, use_gpu=not on_cpu, only_onnxruntime=False
    )
    if dtype == "float16":
        optimized.convert_float_to_float16(keep_io_types=False, op_block_list=["RandomNormalLike"])
    optimized.save_model_to_file(str(out), True)


def optimize_by_onnxscript(source: Path, out: Path, dtype: str = "float32") -> None:
    """Run onnxscript's optimizer and `optimize_for_ort`; ONNX Runtime's float16 converter follows, it has none."""
    import onnx
    import onnx_ir as ir
    import onnxscript.optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = load(source)
    onnxscript.optimizer.optimize(model)
    optimized, _ = optimize_for_ort(model)
    if dtype != "float16":
        ir.save(optimized, out, external_data=pipeline_folder.DATA)
        return
    OnnxModel = importlib.import_module("onnxruntime.transformers.onnx_model").OnnxModel
    full = out.with_name("float32.onnx")
    ir.save(optimized, full, external_data="float32.data")
    half = OnnxModel(onnx.load(full))
    half.convert_float_to_float16(keep_io_types=False)
    # The converter repeats the cast of a value that two nodes read in float32, under one name.
    casts = {tuple(node.output): node for node in half.model.graph.node}
    del half.model.graph.node[:]
    half.model.graph.node.extend(casts.values())
    half.topological_sort()
    half.save_model_to_file(str(out), True)
    for path in (full, out.with_name("float32.data")):
        path.unlink()
