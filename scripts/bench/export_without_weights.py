#!/usr/bin/env python3
"""Export presets without weights, for machines without an exporter: `export_without_weights.py OUT sd15 demo`.

Writes OUT/<preset>.<component>.onnx.xz, some 100 kB each, in the form that `bench_gpu_step.py --graph` and
`default_pipeline.py --graphs` take: each weight is a reference to a "file" named after its parameter, with .T
where the exporter transposed it. Large parameters are hardly touched here, so the export takes little memory.
"""

from __future__ import annotations

import argparse
import gc
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sd_ort.checkpoints.checkpoint import Checkpoint, build_model, class_name, component_signature, is_sdxl
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.open import open_checkpoint
from sd_ort.checkpoints.presets import open_preset
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core.quiet import quiet
from sd_ort.export.exporter import NOISY_LOGGERS, TRACE_SIZES, example_input
from sd_ort.export.tracing import DEFAULT_OPSET, export_dynamo, normalize_exported_names

UNTOUCHED = 1 << 20  # elements; most of a larger parameter stays as allocated: no exporter compares those
MARK = 5000.0  # about what parameters hold here, and no other constant does


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("presets", nargs="+")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for preset in options.presets:
        source = open_checkpoint("demo") if preset == "demo" else open_preset(preset, 0)
        components = [*(n for n in source.configs if n != "vae"), "vae_encoder", "vae_decoder"]
        for component in components:
            out = options.out / f"{preset}.{component}.onnx.xz"
            if not out.is_file():
                out.write_bytes(lzma.compress(graph(source, component).SerializeToString()))
                print(f"{out}: {out.stat().st_size / 1e3:.0f} kB", flush=True)
            gc.collect()


def graph(source: Checkpoint, component: str) -> onnx.ModelProto:
    """One component as `sd-ort export` writes it, its parameters as external data of no file."""
    model: Any = unfilled(source.configs[MODEL_OF.get(component, component)])
    config = dict(model.config) if hasattr(model, "save_config") else model.config.to_dict()
    signature = component_signature(source, component, config)
    module = wrap(component, model, is_sdxl(source), "controlnet" in source.configs)
    weights = {beginning(parameter.detach().numpy()): name for name, parameter in model.named_parameters()}
    with quiet(*NOISY_LOGGERS), torch.no_grad():
        args = [example_input(tensor, TRACE_SIZES, config, 1) for tensor in signature.inputs]
        exported = export_dynamo(module, args, signature, DEFAULT_OPSET, Path())
        normalize_exported_names(exported, signature)
    for value in list(exported.graph.initializers.values()):
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            refer(value, weights)
    return ir.to_proto(exported)


def refer(value: ir.Value, weights: Mapping[bytes, str]) -> None:
    """Replace a constant that holds a parameter, reshaped or transposed, by a reference to the parameter.

    Raises SystemExit for one that holds a parameter's numbers in another way: it would keep those of this machine.
    """
    tensor = value.const_value
    assert tensor is not None
    array = tensor.numpy()
    name = weights.get(beginning(array))
    if name is None and array.ndim == 2 and (weight := weights.get(beginning(array.T))):
        name = f"{weight}.T"
    if name is not None:
        value.const_value = ir.ExternalTensor(
            name, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=str(value.name), base_dir=""
        )
    elif (np.abs(array - MARK) < 100).any():
        raise SystemExit(f"{value.name} {list(array.shape)} is made from a parameter in a way that is not known here")


def beginning(array: np.ndarray) -> bytes:
    """The first numbers of a parameter and how many it has, which tell it from all others in any shape."""
    return array.flat[:4].tobytes() + str(array.size).encode()


def unfilled(config: dict[str, Any]) -> torch.nn.Module:
    """The model, its small parameters all different, its large ones untouched memory."""
    skip = lambda tensor, *args, **kwargs: tensor  # noqa: E731
    inits = ["kaiming_uniform_", "uniform_", "normal_", "xavier_uniform_", "trunc_normal_"]
    initializers = {name: getattr(torch.nn.init, name) for name in inits}
    for name in inits:
        setattr(torch.nn.init, name, skip)
    try:
        model: torch.nn.Module = build_model(class_name(config), config)
    finally:
        for name, function in initializers.items():
            setattr(torch.nn.init, name, function)
    with torch.no_grad():
        for parameter in model.parameters():
            values = parameter if parameter.numel() < UNTOUCHED else parameter[(slice(4),) * parameter.ndim]
            values.normal_(MARK)
    return model.eval()


if __name__ == "__main__":
    main()
