"""Write results/fusion_other_architectures.md: optimized graphs of architectures that no pass was written for.

    python scripts/bench/fusion_other_architectures.py [--rows FILE] [NAME ...]

For every graph of tests/graphs/other_architectures (scripts/fixtures/make_other_architectures.py exports them, with
random weights): attentions and group normalizations that became one node, of those that are there (a target may take a
ScaledDotProductAttention apart again, where its heads are not split and merged by Reshape and Transpose), nodes and
Transposes for every target, and the relative error of the portable and of the channels-last graph against the source
at two shapes, float32, ONNX Runtime's CPU provider. Beside them the nodes that onnxscript's optimizer leaves with its
fusions for ONNX Runtime, ONNX Runtime's own (extended, CPU) and `onnxruntime.transformers.optimizer` with the model
type that it has for such a graph; `cpu, level 2` are the nodes that run of the graph for target cpu, after ONNX
Runtime's own optimizations, without the op library (its operators count as their bodies). `!` behind a target's nodes:
two nodes or two Transposes more than before are exceeded (an Einsum that transposes inside counts as its Transposes
do). `+` behind a target's nodes: the best of onnxscript and ONNX Runtime has fewer, of the graphs that the target runs.
For portable, rocm and migraphx a peer's graph with an operator that does not run there is replaced by what the peer
makes without its fusions for ONNX Runtime (onnxscript's optimizer alone, ONNX Runtime's basic level): portable takes
ai.onnx alone, the ROCm provider has no kernel of MultiHeadAttention that runs and a wrong one of
SimplifiedLayerNormalization on RDNA, and MIGraphX takes no FusedConv and no FusedMatMul.

Where a `+` stays: rocm and migraphx write no com.microsoft Attention, which has the products inside, and no RMS
normalization and rotary embedding of com.microsoft: nobody has run these kernels for us. cuda, rocm and migraphx run
convolutions by com.microsoft NhwcConv, which has no activation, where hip and gpu have our own (vae-tiny); the peers'
FusedConv is of NCHW images, and not for MIGraphX, where two Transposes around the region are what is more. Slower with
fewer nodes: attention with capped scores takes 1.6 times the time of its products on the CPU (Gemma 2), and TAESD with
our convolutions on the CUDA provider 1.8 times that of ONNX Runtime's (results/gpu_experiments.md).

It takes twenty minutes of CPU. `--rows` keeps finished rows of a commit, so that a run can be continued, or shared by
processes with other NAMEs; the page is written as soon as FILE has all rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
from onnxruntime.transformers.optimizer import optimize_model
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from fusion_passes.lower import nhwc_layout
from scripts.fixtures import other_architectures
from sd_ort.optimize.optimizer import lower_operators
from sd_ort.optimize.targets import PORTABLE, TARGETS, Target
from sd_ort.runtime.machine import commit
from sd_ort.runtime.rocm_kernels import NEWEST_OPSET, unsupported_reason

T = TypeVar("T")
Operators = Counter[tuple[str, str]]
ROOT = Path(__file__).parents[2]
BASIC = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC

NHWC = Target("nhwc", lowering_passes=(nhwc_layout.PASS,))
PEERS = ("onnxscript", "ORT level 2", "ORT transformers")
HEAD = ["graph", "nodes", "attention", "group norm", *TARGETS, "cpu, level 2", "error", *PEERS]
# Model types of onnxruntime.transformers by the beginning of a graph's name; "unet" for all others.
TYPES = {
    "auraflow": "mmdit", "bart": "bart", "bert": "bert", "clip": "clip", "dinov2": "vit", "dit": "mmdit",
    "flux": "mmdit", "gpt2": "gpt2", "llama": "gpt2", "sd3": "mmdit", "swin": "swin", "t5": "bert", "vae": "vae",
    "vit": "vit", "vq": "vae",
}  # fmt: skip


def transformers_nodes(model: onnx.ModelProto, name: str) -> Operators:
    """Operators that ONNX Runtime's optimizer of transformer models leaves."""
    kind = next((kind for start, kind in TYPES.items() if name.startswith(start)), "unet")
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, f"{scratch}/in.onnx")
        optimized = optimize_model(
            f"{scratch}/in.onnx", kind, opt_level=0
        )  # its fusions alone, not the level 2 beside it
        return operators_of(optimized.model.graph.node)


def onnxruntime_nodes(model: onnx.ModelProto, level: Any = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED) -> Operators:
    """Operators of the graph that ONNX Runtime makes for its CPU provider."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath, options.log_severity_level = f"{scratch}/out.onnx", 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return operators_of(onnx.load(f"{scratch}/out.onnx").graph.node)


def onnxscript_nodes(model: onnx.ModelProto, fusions: bool = True) -> Operators:
    """Operators that onnxscript's optimizer leaves, with its fusions for ONNX Runtime or without."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # `optimize_for_ort` changes tensors in place
    optimized = ir.from_proto(copy)
    onnxscript.optimizer.optimize(optimized)
    return operators_of(optimize_for_ort(optimized)[0].graph if fusions else optimized.graph)


def operators_of(nodes: Iterable[Any]) -> Operators:
    """The domain and type of each node."""
    return Counter((node.domain, node.op_type) for node in nodes)


def attempt(measure: Callable[..., T], *arguments: Any) -> T | str:
    try:
        return measure(*arguments)
    except Exception as error:
        return f"fails: {type(error).__name__}"


def total(measured: Operators | str) -> str:
    return measured if isinstance(measured, str) else str(measured.total())


def runs(target: str, domain: str, op_type: str) -> bool:
    """Return whether a target runs an operator. True of operators that the peers write for cpu, cuda, hip and gpu."""
    if target == "portable":
        return not domain and onnx.defs.has(op_type)
    if target == "rocm":
        is_wrong = (domain, op_type) == ("", "SimplifiedLayerNormalization")
        return not is_wrong and (not domain or unsupported_reason(domain, op_type, NEWEST_OPSET) is None)
    return target != "migraphx" or op_type not in ("FusedConv", "FusedMatMul")


def session_nodes(start: onnx.ModelProto) -> Operators:
    """Nodes that run of the graph for target cpu, in a session of ONNX Runtime."""
    model = ir.from_proto(start)
    other_architectures.fuse(model, TARGETS["cpu"])
    lower_operators(model, TARGETS["cpu"])
    return onnxruntime_nodes(ir.to_proto(model))


def error(source: onnx.ModelProto, start: onnx.ModelProto) -> str:
    """Relative error of the portable and of the channels-last graph, or why there is none."""
    try:
        expected = other_architectures.run(source, other_architectures.feeds(source, other_architectures.SHAPES[0]))
    except Exception:
        return "ONNX Runtime refuses the source"
    if not np.isfinite(expected).all():
        return "the source gives NaN"
    return f"{max(e for t in (PORTABLE, NHWC) for e in other_architectures.errors(source, start, t)):.0e}"


def row(name: str) -> list[str]:
    source = other_architectures.load(name)
    before = other_architectures.operators(ir.from_proto(source))
    sites = [sum(before[op] for op in ops) for ops in (other_architectures.ATTENTION, other_architectures.NORM)]
    cells, fused, start = [], {}, other_architectures.canonical(source)
    others = [attempt(onnxscript_nodes, source), attempt(onnxruntime_nodes, source)]
    others.append(attempt(transformers_nodes, source, name))
    plain = [attempt(onnxscript_nodes, source, False), attempt(onnxruntime_nodes, source, BASIC)]
    for target in TARGETS.values():
        after = other_architectures.fuse(ir.from_proto(start), target)
        fused[target.name] = after
        peers = [each for each in (*others, *plain) if not isinstance(each, str)]
        best = min((p.total() for p in peers if all(runs(target.name, *op) for op in p)), default=after.total())
        mark = ("!" if other_architectures.why_worse(source, after) else "") + ("+" if after.total() > best else "")
        cells.append(f"{after.total()} / {after['Transpose']}{mark}")
    after = fused["portable"]
    attention = after["MultiHeadAttention"] + after["ScaledDotProductAttention"] + after["Attention"]
    norms = after["GroupNorm"] + after["SkipGroupNorm"]
    nodes = f"{before.total()} / {before['Transpose']}"
    counts = [f"{count} of {there}" if there else "" for count, there in zip((attention, norms), sites, strict=True)]
    cells += [total(attempt(session_nodes, start)), attempt(error, source, start)]
    return [name, nodes, *counts, *cells, *map(total, others)]


def page(rows: dict[str, list[str]]) -> str:
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("onnxruntime", "onnxscript", "onnx_ir"))
    paragraphs = [" ".join(text.split()) for text in (__doc__ or "").split("\n\n")[2:4]]
    lines = ["# Foreign graphs", "", paragraphs[0], "", paragraphs[1], "",
             f"Commit {commit()}; {versions}. Nodes and Transposes as `nodes / Transposes`.", "",
             " | ".join(HEAD), " | ".join("---" for _ in HEAD)]  # fmt: skip
    return "\n".join([*lines, *(" | ".join(rows[name]) for name in other_architectures.NAMES if name in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[str]] = {}

    def read() -> None:
        if options.rows and options.rows.exists():
            entries = map(json.loads, options.rows.read_text().splitlines())
            rows.update({entry["row"][0]: entry["row"] for entry in entries if entry["commit"] == commit()})

    for name in options.names or other_architectures.NAMES:
        read()
        if name in rows:
            continue
        try:
            rows[name] = row(name)
        except Exception as fault:
            rows[name] = [name, f"fails: {type(fault).__name__}: {str(fault)[:200]}"]
        print(" | ".join(rows[name]), flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps({"commit": commit(), "row": rows[name]}) + "\n")
    read()
    if rows.keys() >= set(other_architectures.NAMES):
        (ROOT / "results" / "fusion_other_architectures.md").write_text(page(rows))


if __name__ == "__main__":
    main()
