"""What the targets make of graphs that nobody tuned for: results/fusion_other_architectures.md.

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
do). `+` behind a target's nodes: the best of onnxscript and ONNX Runtime has fewer.

Where a `+` stays: portable counts calls of functions that any runtime inlines, and uses no operator of com.microsoft.
rocm and migraphx have no right kernels of RMS normalization, rotary embedding and (rocm) attention, and none of an
attention with its products inside. On cuda, hip and gpu it stays for a VAE of convolutions with Relu (vae-tiny), of
which ONNX Runtime's CPU optimizations make one FusedConv: channels-last convolutions have no activation there. Slower
with fewer nodes: attention with capped scores takes 1.6 times the time of its products on the CPU (Gemma 2).

It takes twenty minutes of CPU. `--rows` keeps finished rows of a commit, so that a run can be continued, or shared by
processes with other NAMEs; the page is written as soon as FILE has all rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path

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

ROOT = Path(__file__).parents[2]

NHWC = Target("nhwc", lowering_passes=(nhwc_layout.PASS,))
PEERS = ("onnxscript", "ORT level 2", "ORT transformers")
HEAD = ["graph", "nodes", "attention", "group norm", *TARGETS, "cpu, level 2", "error", *PEERS]
# Model types of onnxruntime.transformers by the beginning of a graph's name; "unet" for all others.
TYPES = {
    "auraflow": "mmdit", "bart": "bart", "bert": "bert", "clip": "clip", "dinov2": "vit", "dit": "mmdit",
    "flux": "mmdit", "gpt2": "gpt2", "llama": "gpt2", "sd3": "mmdit", "swin": "swin", "t5": "bert", "vae": "vae",
    "vit": "vit", "vq": "vae",
}  # fmt: skip


def transformers_nodes(model: onnx.ModelProto, name: str) -> str:
    """Nodes that ONNX Runtime's optimizer of transformer models leaves."""
    kind = next((kind for start, kind in TYPES.items() if name.startswith(start)), "unet")
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, f"{scratch}/in.onnx")
        optimized = optimize_model(
            f"{scratch}/in.onnx", kind, opt_level=0
        )  # its fusions alone, not the level 2 beside it
        return str(len(optimized.model.graph.node))


def onnxruntime_nodes(model: onnx.ModelProto) -> str:
    """Nodes of the graph that ONNX Runtime makes for its CPU provider."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath, options.log_severity_level = f"{scratch}/out.onnx", 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return str(len(onnx.load(f"{scratch}/out.onnx").graph.node))


def onnxscript_nodes(model: onnx.ModelProto) -> str:
    """Nodes that onnxscript's optimizer leaves, with its fusions for ONNX Runtime."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # `optimize_for_ort` changes tensors in place
    optimized = ir.from_proto(copy)
    onnxscript.optimizer.optimize(optimized)
    return str(len(optimize_for_ort(optimized)[0].graph))


def attempt(measure, *arguments) -> str:  # type: ignore[no-untyped-def]
    try:
        return measure(*arguments)
    except Exception as error:
        return f"fails: {type(error).__name__}"


def session_nodes(start: onnx.ModelProto) -> str:
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
    best = min(int(nodes) for nodes in others if nodes.isdigit())
    for target in TARGETS.values():
        after = other_architectures.fuse(ir.from_proto(start), target)
        fused[target.name] = after
        mark = ("!" if other_architectures.why_worse(source, after) else "") + ("+" if after.total() > best else "")
        cells.append(f"{after.total()} / {after['Transpose']}{mark}")
    after = fused["portable"]
    attention = after["MultiHeadAttention"] + after["ScaledDotProductAttention"] + after["Attention"]
    norms = after["GroupNorm"] + after["SkipGroupNorm"]
    nodes = f"{before.total()} / {before['Transpose']}"
    counts = [f"{found} of {there}" if there else "" for found, there in zip((attention, norms), sites, strict=True)]
    cells += [attempt(session_nodes, start), attempt(error, source, start)]
    return [name, nodes, *counts, *cells, *others]


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
