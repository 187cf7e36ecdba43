#!/usr/bin/env python3
"""Raw exports without weights, to be filled on a machine that has no exporter: `weightless_graphs.py OUT sd15 demo`.

Writes OUT/<preset>.<component>.onnx.xz, some 100 kB each, in the form that `bench_gpu.py --graphs` and `plain_call.py`
take: weights are references named after the preset's parameters. Large parameters are hardly touched here, so the
export takes little memory.
"""

from __future__ import annotations

import argparse
import gc
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sd_ort.core.quiet import quiet
from sd_ort.export.exporter import NOISY, TRACE, example
from sd_ort.export.tracing import DEFAULT_OPSET, export_dynamo, tidy
from sd_ort.family.checkpoints import Source, class_name, component_signature, is_sdxl, model_class, open_source
from sd_ort.family.modules import wrap
from sd_ort.family.signatures import MODEL_OF

UNTOUCHED = 1 << 20  # elements; most of a larger parameter stays as allocated: no exporter compares those


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("presets", nargs="+")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for preset in options.presets:
        source = open_source("demo", None, False, 0) if preset == "demo" else open_source(None, preset, True, 0)
        components = [*(n for n in source.configs if n != "vae"), "vae_encoder", "vae_decoder"]
        for component in components:
            out = options.out / f"{preset}.{component}.onnx.xz"
            if not out.is_file():
                out.write_bytes(lzma.compress(graph(source, component).SerializeToString()))
                print(f"{out}: {out.stat().st_size / 1e3:.0f} kB", flush=True)
            gc.collect()


def graph(source: Source, component: str) -> onnx.ModelProto:
    """One component as `sd-ort export` writes it, its parameters as external data of no file."""
    model: Any = unfilled(source.configs[MODEL_OF.get(component, component)])
    config = dict(model.config) if hasattr(model, "save_config") else model.config.to_dict()
    signature = component_signature(source, component, config)
    module = wrap(component, model, is_sdxl(source), "controlnet" in source.configs)
    weights = {name: corner(parameter.detach().numpy()) for name, parameter in model.named_parameters()}
    by_corner = {value: name for name, value in weights.items()}
    with quiet(*NOISY), torch.no_grad():
        args = [example(tensor, TRACE, config, 1) for tensor in signature.inputs]
        exported = export_dynamo(module, args, signature, DEFAULT_OPSET, Path())
        tidy(exported, signature)
    for value in list(exported.graph.initializers.values()):
        tensor, name = value.const_value, str(value.name)
        assert tensor is not None
        if name not in weights and len(tensor.shape) == 2 and (found := by_corner.get(corner(tensor.numpy().T))):
            value.name = name = f"{found}.T"  # a folded transpose
        if name.removesuffix(".T") in weights:
            value.const_value = ir.ExternalTensor(
                "random", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
            )
    return ir.to_proto(exported)


def corner(array: np.ndarray) -> bytes:
    """The first numbers of a parameter, which tell it from all others."""
    return array[(slice(4),) * array.ndim].tobytes() + str(array.shape).encode()


def unfilled(config: dict[str, Any]) -> torch.nn.Module:
    """The model, its small parameters all different, its large ones untouched memory."""
    cls = model_class(class_name(config))
    skip = lambda tensor, *args, **kwargs: tensor  # noqa: E731
    inits = ["kaiming_uniform_", "uniform_", "normal_", "xavier_uniform_", "trunc_normal_"]
    kept = {name: getattr(torch.nn.init, name) for name in inits}
    for name in inits:
        setattr(torch.nn.init, name, skip)
    try:
        made = cls(cls.config_class(**config)) if "model_type" in config else cls.from_config(config)
    finally:
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)
    with torch.no_grad():
        for parameter in made.parameters():
            touched = parameter if parameter.numel() < UNTOUCHED else parameter[(slice(4),) * parameter.ndim]
            touched.normal_()
    return made.eval()


if __name__ == "__main__":
    main()
