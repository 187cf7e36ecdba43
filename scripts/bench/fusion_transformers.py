"""Write results/fusion_transformers.md: fused nodes of diffusion transformers, by sd-ort and by other optimizers.

    python scripts/bench/fusion_transformers.py [--work FOLDER] [--preset NAME ...]

The transformers of tiny presets (random weights, the topology of the published models with fewer blocks) are exported
by the default exporter for opsets 20 and 23. Each row is what one optimizer makes of an export: sd-ort for a target,
ONNX Runtime's `onnxruntime.transformers.optimizer` with its model type mmdit and all else off, onnxscript's optimizer
with its fusions for ONNX Runtime, ONNX Runtime's own at its extended level for the CPU.

- attention: attentions that are one node, of any operator
- rotary: rotary embeddings that are one node; RotaryQkv does those of query and key of an attention (SD 3 has none)
- RMS: RMS normalizations that are one node, AdaptiveNorm with a weight as its scale too, or part of a RotaryQkv
- adaptive norm: layer normalizations whose computed scale and shift are inputs of their node
- bias: products that add their bias
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
from onnxruntime.transformers.optimizer import optimize_model
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from scripts.report import table as markdown
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.export.exporter import export
from sd_ort.graphs.load import load
from sd_ort.runtime import machine
from sd_ort.stages import optimize

PAGE = Path(__file__).parents[2] / "results" / "fusion_transformers.md"
PRESETS = (
    "flux-dev-tiny", "flux2-klein-4b-tiny", "flux2-dev-tiny", "sd35-medium-tiny", "z-image-turbo-tiny",
    "qwen-image-tiny", "qwen-image-edit-2511-tiny", "krea2-tiny",
)  # fmt: skip
OPSETS = (20, 23)
TARGETS = ("portable", "cpu", "cuda", "gpu", "hip")
ATTENTIONS = ("MultiHeadAttention", "Attention", "GroupQueryAttention", "PackedMultiHeadAttention")
RMS_NORMS = ("RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
LAYER_NORMS = ("AdaptiveNorm", "LayerNormalization", "SkipLayerNormalization")
BIASED = ("LinearAdd", "LinearGelu", "Gemm", "FusedGemm", "FusedMatMulBias")
COS = 6  # input of RotaryQkv; without it, as in SD 3, nothing is rotated
COLUMNS = ("attention", "rotary", "RMS", "adaptive norm", "bias", "Transpose", "nodes")


def measure(graph: ir.Graph) -> tuple[int, ...]:
    """Return the numbers of `COLUMNS`."""
    counts = Counter(node.op_type for node in graph)
    rotary_qkv = [node for node in graph if node.op_type == "RotaryQkv"]
    # Query, key and value of each stream; norms of query and key are scales among the inputs.
    norms = sum(sum(value is not None and "norm" in str(value.name) for value in node.inputs) for node in rotary_qkv)
    fixed_rms = [node for node in graph if node.op_type == "AdaptiveNorm" and _is_constant(node.inputs[1])]
    adaptive = [node for node in graph if node.op_type in LAYER_NORMS and not _is_constant(node.inputs[1])]
    return (
        sum(counts[op] for op in ATTENTIONS),
        counts["RotaryEmbedding"]
        + 2 * sum(len(node.inputs) > COS and node.inputs[COS] is not None for node in rotary_qkv),
        sum(counts[op] for op in RMS_NORMS) + norms + len(fixed_rms),
        len(adaptive),
        sum(counts[op] for op in BIASED),
        counts["Transpose"],
        len(graph),
    )


def _is_constant(value: ir.Value | None) -> bool:
    return value is None or value.is_initializer() or value.const_value is not None


def by_onnxruntime_transformers(path: Path, scratch: Path) -> ir.Model:
    optimized = optimize_model(str(path), "mmdit", opt_level=0)
    return ir.from_proto(optimized.model)


def by_onnxscript(path: Path, scratch: Path) -> ir.Model:
    model = ir.from_proto(onnx.load(path))
    onnxscript.optimizer.optimize(model)
    return optimize_for_ort(model)[0]


def by_onnxruntime(path: Path, scratch: Path) -> ir.Model:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(scratch / "extended.onnx"), 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return ir.load(scratch / "extended.onnx")


PEERS: dict[str, Callable[[Path, Path], ir.Model]] = {
    "ORT transformers, mmdit": by_onnxruntime_transformers,
    "onnxscript": by_onnxscript,
    "ORT extended": by_onnxruntime,
}


def rows(preset: str, opset: int, work: Path) -> list[list[str]]:
    """Return the rows of one export."""
    source = work / f"{preset}-{opset}"
    if not source.is_dir():
        export(None, source, preset=preset, random_weights=True, opset=opset, components=["transformer"])
    path = source / "transformer" / MODEL
    results = {"export": measure(load(path).graph)}
    for target in TARGETS:
        out = work / f"{preset}-{opset}-{target}"
        shutil.rmtree(out, ignore_errors=True)  # else `optimize` leaves what an older commit made
        optimize(source, out, target=target, components=["transformer"], hoist=False)
        results[f"sd-ort, {target}"] = measure(load(out / "transformer" / MODEL).graph)
    table = [[preset, str(opset), name, *map(str, numbers)] for name, numbers in results.items()]
    for name, run in PEERS.items():
        try:
            numbers = [str(number) for number in measure(run(path, work).graph)]
        except Exception as error:
            numbers = [f"fails: {type(error).__name__}", *[""] * (len(COLUMNS) - 1)]
        table.append([preset, str(opset), name, *numbers])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="keeps the exports here")
    parser.add_argument("--preset", choices=PRESETS, action="append", help="only this; rows of others stay as they are")
    arguments = parser.parse_args()
    work: Path | None = arguments.work
    with tempfile.TemporaryDirectory() as scratch:
        work = work or Path(scratch)
        work.mkdir(exist_ok=True)
        measured = arguments.preset or PRESETS
        tables = {preset: [row for opset in OPSETS for row in rows(preset, opset, work)] for preset in measured}
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    commits = [f"Commit {machine.commit()}; {versions}."]
    if arguments.preset:
        former = PAGE.read_text().splitlines()
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in former if line.startswith("|")):
            if cells[0] in PRESETS and cells[0] not in measured:
                tables.setdefault(cells[0], []).append(cells)
        commits = [line for line in former if line.startswith("Commit ")]
        commits.append(f"Commit {machine.commit()}; {versions}: {', '.join(measured)} alone.")
    head = ["model", "opset", "optimizer", *COLUMNS]
    text = [f"# Fusions of diffusion transformers\n\n{(__doc__ or '').partition('NAME ...]')[2].strip()}\n"]
    text += [f"{line}\n" for line in commits]
    table = [row for preset in PRESETS for row in tables.get(preset, [])]
    PAGE.write_text("\n".join([*text, *markdown(head, table)]) + "\n")


if __name__ == "__main__":
    main()
