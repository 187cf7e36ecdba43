"""What the targets make of graphs that nobody tuned for: results/fusion_other_architectures.md.

    python scripts/bench/fusion_other_architectures.py [NAME ...]

For every graph of tests/graphs/other_architectures (scripts/fixtures/make_other_architectures.py exports them, with
random weights): attentions and group normalizations that became one node, of those that are there (a target may take a
ScaledDotProductAttention apart again, where its heads are not split and merged by Reshape and Transpose), nodes and
Transposes for every target, and the relative error of the portable and of the channels-last graph against the source
at two shapes, float32, ONNX Runtime's CPU provider. Beside them the nodes that onnxscript's optimizer leaves with its
fusions for ONNX Runtime, ONNX Runtime's own (extended, CPU) and `onnxruntime.transformers.optimizer` with the model
type that it has for such a graph. `!` behind a target's nodes: two nodes or two Transposes more than before are
exceeded (an Einsum that transposes inside counts as its Transposes do).

It takes ten minutes of CPU; rows are written as they come.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
from onnxruntime.transformers.optimizer import optimize_model
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from fusion_passes.lower import nhwc_layout
from scripts.fixtures import other_architectures
from sd_ort.optimize.targets import PORTABLE, TARGETS, Target

ROOT = Path(__file__).parents[2]

NHWC = Target("nhwc", lowering_passes=(nhwc_layout.PASS,))
HEAD = ["graph", "nodes", "attention", "group norm", *TARGETS, "error", "onnxscript", "ORT level 2", "ORT transformers"]
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


def row(name: str) -> list[str]:
    source = other_architectures.load(name)
    before = other_architectures.operators(ir.from_proto(source))
    sites = [sum(before[op] for op in ops) for ops in (other_architectures.ATTENTION, other_architectures.NORM)]
    cells, fused, start = [], {}, other_architectures.canonical(source)
    for target in TARGETS.values():
        after = other_architectures.fuse(ir.from_proto(start), target)
        fused[target.name] = after
        worse = "!" if other_architectures.why_worse(source, after) else ""
        cells.append(f"{after.total()} / {after['Transpose']}{worse}")
    after = fused["portable"]
    attention = after["MultiHeadAttention"] + after["ScaledDotProductAttention"]
    norms = after["GroupNorm"] + after["SkipGroupNorm"]
    error = attempt(
        lambda: f"{max(e for t in (PORTABLE, NHWC) for e in other_architectures.errors(source, start, t)):.0e}"
    )
    nodes = f"{before.total()} / {before['Transpose']}"
    counts = [f"{found} of {there}" if there else "" for found, there in zip((attention, norms), sites, strict=True)]
    others = [attempt(onnxscript_nodes, source), attempt(onnxruntime_nodes, source)]
    return [name, nodes, *counts, *cells, error, *others, attempt(transformers_nodes, source, name)]


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("onnxruntime", "onnxscript", "onnx_ir"))
    lines = ["# Foreign graphs", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), "",
             f"Commit {commit.strip()}; {versions}. Nodes and Transposes as `nodes / Transposes`.", "",
             " | ".join(HEAD), " | ".join("---" for _ in HEAD)]  # fmt: skip
    for name in sys.argv[1:] or other_architectures.NAMES:
        try:
            lines.append(" | ".join(row(name)))
        except Exception as error:
            lines.append(f"{name} | fails: {type(error).__name__}: {str(error)[:200]}")
        print(lines[-1], flush=True)
        if len(sys.argv) < 2:
            (ROOT / "results" / "fusion_other_architectures.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
