"""What other optimizers make of a graph: ONNX Runtime's for transformer models, its own, and onnxscript's."""

from __future__ import annotations

import tempfile

import onnx
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
from onnxruntime.transformers.optimizer import optimize_model
from onnxscript.rewriter.ort_fusions import optimize_for_ort


def by_transformers(model: onnx.ModelProto, model_type: str) -> ir.Model:
    """Return the graph with the fusions of `onnxruntime.transformers.optimizer` for a model type, and no others."""
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, f"{scratch}/in.onnx")
        return ir.from_proto(optimize_model(f"{scratch}/in.onnx", model_type, opt_level=0).model)


def by_onnxscript(model: onnx.ModelProto) -> ir.Model:
    """Return the graph that onnxscript's optimizer leaves, with its fusions for ONNX Runtime."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # `optimize_for_ort` changes tensors in place
    optimized = ir.from_proto(copy)
    onnxscript.optimizer.optimize(optimized)
    return optimize_for_ort(optimized)[0]


def by_onnxruntime(model: onnx.ModelProto) -> ir.Model:
    """Return the graph that ONNX Runtime makes for its CPU provider, at its extended level."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath, options.log_severity_level = f"{scratch}/out.onnx", 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return ir.from_proto(onnx.load(f"{scratch}/out.onnx"))
