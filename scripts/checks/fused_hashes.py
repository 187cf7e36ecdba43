"""Hashes of every fused graph: what a change of the house must leave as it is, node for node and byte for byte.

    python scripts/checks/fused_hashes.py OUT.json [--only WORD] [--compare BEFORE.json]

Each graph of tests/graphs is filled with small made-up weights and optimized for every target in float32 and float16;
the hash is over nodes (operators, names, attributes, edges), functions, and the bytes of all weights. Exit code 1 when
`--compare` finds a difference, which is printed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tempfile
import zlib
from pathlib import Path

import click
import numpy as np
import onnx

from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS

GRAPHS = Path(__file__).resolve().parents[2] / "tests" / "graphs"


def filled(path: Path) -> onnx.ModelProto:
    """The graph with weights that are random, distinct, and the same at every call."""
    model = onnx.load_from_string(lzma.decompress(path.read_bytes()))
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            random = np.random.default_rng(zlib.crc32(tensor.name.encode()))
            numbers = random.normal(0.1, 0.05, list(tensor.dims))
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.raw_data = onnx.numpy_helper.from_array(numbers.astype(dtype)).raw_data
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    return model


def hashed(path: Path) -> str:
    """SHA-256, 16 digits, over a saved model: its graph without the producer's version, then its weights in order."""
    model = onnx.load(path)
    model.producer_version = ""
    digest = hashlib.sha256(model.SerializeToString(deterministic=True))
    return digest.hexdigest()[:16]


def fused(graph: Path, target: str, dtype: str) -> str:
    """The hash of one fused graph, or the first line of the error that optimizing raised."""
    component = graph.name.removesuffix(".onnx.xz").rsplit(".", 1)[1]
    with tempfile.TemporaryDirectory() as scratch:
        source, out = (Path(scratch) / name / component / "model.onnx" for name in ("raw", "out"))
        source.parent.mkdir(parents=True)
        onnx.save(filled(graph), source)
        try:
            optimize_component(source, out, TARGETS[target], dtype, calibrate=False)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return hashed(out)


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--only", default="", help="Only graphs whose name has this word.")
@click.option("--compare", type=click.Path(path_type=Path, exists=True), help="Hashes made before the change.")
def main(out: Path, only: str, compare: Path | None) -> None:
    found: dict[str, str] = {}
    for graph in sorted(path for path in GRAPHS.glob("*.onnx.xz") if only in path.name):
        for target in TARGETS:
            for dtype in ("float32", "float16"):
                found[f"{graph.name.removesuffix('.onnx.xz')} {target} {dtype}"] = fused(graph, target, dtype)
        out.write_text(json.dumps(found, indent=1) + "\n")
    if compare is None:
        return
    before = json.loads(compare.read_text())
    changed = [name for name, value in found.items() if name in before and before[name] != value]
    print(*changed, f"{len(changed)} of {len(found)} fused graphs differ.", sep="\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
