"""Hashes of every fused graph, which a refactoring must not change.

    python scripts/checks/fused_hashes.py OUT.json [--only WORD] [--compare BEFORE.json]

Each graph of tests/graphs, and the transformers among the foreign ones, is filled with random weights and optimized for
every target in float32 and float16; the hash is over nodes (operators, names, attributes, edges), functions, and the
bytes of all weights. `--compare` prints a table in Markdown of what differs, of graphs that are in both, and the exit
code is 1 where something does. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import onnx
from google.protobuf.message import Message

from scripts.fixtures import graph_fixtures
from scripts.report import table as markdown
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime import machine

# The graphs' names, and the component that each is.
TRANSFORMERS = ("flux-dynamo-20", "sd3-dynamo-20", "sd3-torchscript-17", "auraflow-dynamo-20")
COMPONENTS = {name: name.rsplit(".", 1)[1] for name in graph_fixtures.NAMES}
COMPONENTS |= {f"other_architectures/{name}": "transformer" for name in TRANSFORMERS}


def digest(messages: Iterable[Message]) -> str:
    """The first 16 digits of the SHA-256 over messages."""
    return hashlib.sha256(b"".join(m.SerializeToString(deterministic=True) for m in messages)).hexdigest()[:16]


def described(path: Path) -> dict[str, Any]:
    """A saved model: the digests of its parts, and how many nodes of each operator it has."""
    model = onnx.load(path)
    model.producer_version = ""
    weights, functions = list(model.graph.initializer), list(model.functions)
    parts = {"all": digest([model]), "weights": digest(weights), "functions": digest(functions)}
    del model.graph.initializer[:], model.functions[:]
    nodes = Counter(f"{node.domain}.{node.op_type}".removeprefix(".") for node in model.graph.node)
    return {**parts, "graph": digest([model]), "nodes": dict(sorted(nodes.items()))}


def fused(graph: str, target: str, dtype: str) -> dict[str, Any]:
    """One fused graph as `described`, or the first line of the error that optimizing raised."""
    component = COMPONENTS[graph]
    with tempfile.TemporaryDirectory() as scratch:
        source, out = (Path(scratch) / name / component / "model.onnx" for name in ("raw", "out"))
        source.parent.mkdir(parents=True)
        onnx.save(graph_fixtures.load(graph), source)
        try:
            optimize_component(source, out, TARGETS[target], dtype, calibrate=False)
        except Exception as error:
            return {"all": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
        return described(out)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the differences of two fused graphs in words; empty if there are none."""
    if before["all"] == after["all"]:
        return ""
    if "nodes" not in before or "nodes" not in after:
        return " -> ".join("fused" if "nodes" in one else one["all"] for one in (before, after))
    old, new = Counter(before["nodes"]), Counter(after["nodes"])
    counts = [f"{name} {new[name] - old[name]:+d}" for name in sorted(old | new) if old[name] != new[name]]
    parts = [part for part in ("graph", "weights", "functions") if before[part] != after[part]]
    return ", ".join(counts) or "as many nodes of each operator, other " + " and ".join(parts)


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Markdown: how many graphs are equal, and every difference with the graphs that have it."""
    both = [name for name in after["graphs"] if name in before["graphs"]]
    groups: dict[str, list[str]] = {}
    for name in both:
        groups.setdefault(difference(before["graphs"][name], after["graphs"][name]), []).append(name)
    equal = f"{len(groups.pop('', []))} of {len(both)} fused graphs are the same byte for byte"
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    rows = ((words, len(names), ", ".join(names[:3])) for words, names in largest_first)
    lines = markdown(("what differs", "graphs", "of them, for example"), rows)
    return "\n".join([f"{equal} at {after['commit']} as at {before['commit']}.\n", *lines]) + "\n"


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--only", default="", help="Only graphs whose name has this word.")
@click.option(
    "--compare", type=click.Path(path_type=Path, exists=True), help="What this script wrote before the change."
)
def main(out: Path, only: str, compare: Path | None) -> None:
    report: dict[str, Any] = {"commit": machine.commit(), "versions": machine.versions(), "graphs": {}}
    if out.exists() and (last := json.loads(out.read_text()))["commit"] == report["commit"]:
        report = last
    before = json.loads(compare.read_text()) if compare else None
    graphs = report["graphs"]
    for graph in (name for name in COMPONENTS if only in name):
        for target, dtype in itertools.product(TARGETS, ("float32", "float16")):
            name = f"{graph} {target} {dtype}"
            if name not in graphs and (before is None or name in before["graphs"]):
                graphs[name] = fused(graph, target, dtype)
        out.write_text(json.dumps(report) + "\n")
    if before is None:
        return
    click.echo(table(before, report))
    sys.exit(any(difference(before["graphs"][name], graphs[name]) for name in graphs if name in before["graphs"]))


if __name__ == "__main__":
    main()
