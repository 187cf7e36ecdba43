#!/usr/bin/env python3
"""A diffusion transformer of full size as a template, traced on torch's meta device: no weights, little memory.

    python scripts/bench/transformer_template.py flux-dev flux-dev.onnx.xz

writes a template as sd_ort.export.templates reads it, for bench_transformer_step.py. Tracing the 57 blocks of FLUX.1
takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch

from sd_ort.checkpoints.checkpoint import build_model, class_name, component_signature
from sd_ort.checkpoints.modules import derived_weights, wrap
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.quiet import quiet
from sd_ort.export import tracing
from sd_ort.export.exporter import NOISY_LOGGERS, TRACE_SIZES, example_input
from sd_ort.export.templates import write_template

SMALL = 1 << 19  # elements of the file that stands for the weights; rewrite rules read biases
SPACING = 128  # bytes between two weights in it, so that no two are equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--opset", type=int, default=23)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        count = export(options.preset, options.opset, options.out, Path(scratch))
    print(f"{options.out}: {count} nodes, {options.out.stat().st_size / 1e3:.0f} kB", flush=True)


def export(preset: str, opset: int, out: Path, scratch: Path) -> int:
    """Write the template; return the number of nodes."""
    config = open_preset(preset, 0).configs["transformer"]
    with torch.device("meta"):
        model: Any = build_model(class_name(config), config).eval()
    if size := getattr(getattr(model, "pos_embed", None), "pos_embed_max_size", None):
        # A table of which every part is zero stands for SD3's, whose parts are compared.
        width = model.pos_embed.proj.out_channels
        model.pos_embed.register_buffer("pos_embed", torch.zeros(1).expand(1, size * size, width))
    signature = component_signature(open_preset(preset, 0), "transformer", dict(model.config))
    module = wrap("transformer", model, True, False)
    derived = derived_weights(module)
    for name in derived:
        part = model.get_submodule(name.rpartition(".")[0])
        part.register_buffer(name.rpartition(".")[2], model.get_buffer(name).to("meta"))
    constants = {}  # computed, not loaded: they keep their values
    for name, part in model.named_modules():
        if (frequencies := getattr(part, "frequencies", None)) is not None:
            constants[f"{name}.frequencies"] = frequencies.clone()
            part.frequencies = torch.empty_like(frequencies, device="meta")
    arguments = [example_input(each, TRACE_SIZES, dict(model.config), 1).to("meta") for each in signature.inputs]
    weights = scratch / "weights"
    weights.write_bytes(np.random.default_rng(0).standard_normal(SMALL).astype(np.float32).tobytes())
    with weights.open("ab") as file:
        file.truncate(1 << 32)
    optimize = onnxscript.optimizer.optimize_ir

    def optimize_weightless(graph: ir.Model, **options: Any) -> None:
        for index, (name, value) in enumerate(graph.graph.initializers.items()):
            tensor = value.const_value
            if tensor is not None and getattr(getattr(tensor, "raw", None), "is_meta", False):
                shape = ir.Shape(tensor.shape.numpy())
                value.const_value = ir.ExternalTensor(
                    weights.name, SPACING * index, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=scratch
                )
        optimize(graph, should_fold=lambda node: False if any(map(_is_weight, node.inputs)) else None, **options)

    onnxscript.optimizer.optimize_ir = optimize_weightless  # type: ignore[assignment]
    try:
        with quiet(*NOISY_LOGGERS), torch.no_grad():
            traced = tracing.export_dynamo(module, arguments, signature, opset, scratch)
    finally:
        onnxscript.optimizer.optimize_ir = optimize
    tracing.normalize_exported_names(traced, signature)
    graph = traced.graph
    for name, values in constants.items():
        graph.initializers[name].const_value = ir.Tensor(values.numpy(), name=name)
    recipes: dict[str, Any] = {
        str(value.name): derived.get(str(value.name), value.name)
        for value in graph.initializers.values()
        if _is_weight(value)
    }
    for node in list(graph):
        if node.op_type == "Transpose" and _is_weight(node.inputs[0]):
            _fold_transpose(graph, node, recipes)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
        recipes.pop(name, None)
    write_template(out, traced, recipes, json.loads(model.to_json_string()))
    return len(graph)


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and isinstance(value.const_value, ir.ExternalTensor)


def _fold_transpose(graph: ir.Graph, node: ir.Node, recipes: dict[str, Any]) -> None:
    """Replace the Transpose of a weight by a weight of that recipe."""
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    assert source.const_value is not None
    permutation, sizes = list(node.attributes["perm"].as_ints()), source.const_value.shape.numpy()
    name = f"{source.name}.T"
    if name not in graph.initializers:
        shape, tensor = ir.Shape([sizes[axis] for axis in permutation]), source.const_value
        weight = ir.ExternalTensor("weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir="")
        graph.register_initializer(ir.Value(name=name, const_value=weight, shape=shape, type=output.type))
        recipes[name] = ["transpose", permutation, source.name]
    ir.convenience.replace_all_uses_with(output, graph.initializers[name])
    graph.remove(node, safe=True)


if __name__ == "__main__":
    main()
