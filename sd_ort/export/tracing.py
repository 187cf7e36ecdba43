"""Exports a torch module to an ONNX graph with torch's dynamo or TorchScript exporter, and normalizes the names."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_ort.checkpoints.signatures import Signature, join_axis, split_axis
from sd_ort.core.package_version import package_version
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.export import DEFAULT_OPSET as DEFAULT_OPSET

if TYPE_CHECKING:
    import onnx_ir as ir


# Tested opsets of each exporter of torch 2.13. Dynamo's own opset is 18; later ones add Gelu (20), GroupNormalization
# (21) and Attention (23).
OPSETS = {"dynamo": (18, 20, 21, 23), "torchscript": (17, 20)}

# Upper bounds for torch.export, which the graphs do not enforce. From a batch of 64, diffusers' upsampling makes its
# input contiguous, which has no effect in ONNX.
AXIS_LIMITS = {"batch": 63, "sequence": 4096, "images": 63, "height": 4096, "width": 4096, "image_sequence": 1 << 18,
               "windows": 1 << 12, "patches": 1 << 18}  # fmt: skip

# Node metadata that stays: the module that a node comes from. The rest is stack traces with paths of this machine.
RETAINED_METADATA = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")


def export_dynamo(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, opset: int, scratch: Path
) -> ir.Model:
    """Return the module as an ONNX graph, through torch.export. The graph shares the weights of the module."""
    traced = trace(module, args, signature)
    with disable_slice_split_rule():
        program = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=[t.name for t in signature.inputs],
            output_names=[t.name for t in signature.outputs],
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    return program.model


def trace(module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature) -> torch.export.ExportedProgram:
    """Return the torch program of the module, which is the same for every opset."""
    return torch.export.export(module, tuple(args), dynamic_shapes=dynamic_shapes(module, signature), strict=False)


@contextlib.contextmanager
def disable_slice_split_rule() -> Iterator[None]:
    """Disable the rule of onnxscript's optimizer that merges two Slices into a Split, which these graphs do not have.

    The rule searches the whole graph for the second Slice at every node. That takes 22 of the 26 s of optimizing a
    small SD 1.5 UNet of 4700 nodes, and grows with the square of the nodes.
    """
    from onnxscript.rewriter.rules.common import slice_split_rule

    rule: Any = slice_split_rule
    rule.try_rewrite = lambda *arguments, **options: None
    try:
        yield
    finally:
        del rule.try_rewrite


def dynamic_shapes(module: torch.nn.Module, signature: Signature) -> tuple[Any, ...]:
    """Return the axes of `signature` for torch.export, with related symbols as multiples of one Dim.

    A UNet's height is declared as 8 times a Dim. The sizes at every level are then integers by construction, and the
    graph has no rounding arithmetic.
    """
    from torch.export import Dim

    dims: dict[str, Any] = {}

    def dim(axis: str) -> Any:
        symbol, times, divisor = split_axis(axis)
        unit = signature.multiples.get(symbol, 1)
        limit = signature.limits[symbol] // unit if symbol in signature.limits else AXIS_LIMITS[symbol]
        base = dims.setdefault(symbol, Dim(f"_{symbol}", max=limit))
        count = unit * times // divisor
        return base if count == 1 else count * base

    shapes = [{i: dim(axis) for i, axis in t.dynamic_axes.items()} for t in signature.inputs]
    positional = len([p for p in _parameters(module) if p.kind != p.VAR_POSITIONAL])
    return (*shapes[:positional], tuple(shapes[positional:])) if len(shapes) > positional else tuple(shapes)


def _parameters(module: torch.nn.Module) -> list[Any]:
    return list(inspect.signature(module.forward).parameters.values())


def export_torchscript(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, opset: int, scratch: Path
) -> ir.Model:
    """Return the module as an ONNX graph, through the TorchScript tracer. The weights stay in files in `scratch`."""
    import onnx_ir as ir

    path = scratch / MODEL
    torch.onnx.export(
        module,
        tuple(args),
        str(path),
        dynamo=False,
        dynamic_axes={t.name: t.dynamic_axes for t in (*signature.inputs, *signature.outputs)},
        input_names=[t.name for t in signature.inputs],
        output_names=[t.name for t in signature.outputs],
        opset_version=opset,
    )
    return ir.load(path)


EXPORTERS = {"dynamo": export_dynamo, "torchscript": export_torchscript}


def normalize_exported_names(model: ir.Model, signature: Signature) -> None:
    """Rename all axes as in `signature`, and remove the wrapper's prefix of weights and other metadata.

    RETAINED_METADATA stays.
    """
    import onnx_ir as ir

    graph = model.graph
    symbols = axis_symbols(graph.inputs, signature)
    for node in graph.all_nodes():
        for key in [key for key in node.metadata_props if key not in RETAINED_METADATA]:
            del node.metadata_props[key]
        for value in node.outputs:
            value.metadata_props.clear()
            if value.shape is not None:
                sizes = [d if isinstance(d, int) else rename_axis(d.value, symbols) for d in value.shape]
                value.shape = ir.Shape(sizes)
    tensors = [*signature.inputs, *signature.outputs]
    for value, tensor in zip([*graph.inputs, *graph.outputs], tensors, strict=True):
        value.shape = ir.Shape(tensor.axes)
        value.metadata_props.clear()
    for value in list(graph.initializers.values()):
        value.name = (value.name or "").removeprefix("model.")
        value.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "sd-ort", package_version("sd-ort")


def axis_symbols(inputs: Sequence[ir.Value], signature: Signature) -> dict[str, str]:
    """Return symbol of the exporter -> axis name, from the graph's inputs.

    Example: `8*s26` at axis `height` gives {"s26": "height/8"}. Empty for the TorchScript exporter, which uses the axis
    names of the signature.
    """
    symbols = {}
    for value, tensor in zip(inputs, signature.inputs, strict=True):
        assert value.shape is not None
        for i, axis in tensor.dynamic_axes.items():
            if str(value.shape[i]) == axis:
                continue
            factor, symbol = re.fullmatch(r"(?:(\d+)\*)?(\w+)", str(value.shape[i])).groups()  # type: ignore[union-attr]
            name, times, divisor = split_axis(axis)
            symbols[symbol] = join_axis(name, times, divisor * int(factor or 1))
    return symbols


def rename_axis(axis: str | None, symbols: Mapping[str, str]) -> str | None:
    """Return a size with axis names for the exporter's symbols; None is an unknown size.

    Example: with s26 = height/8, `4*s26` is `height/2`.
    """
    if axis is None:
        return None
    if match := re.fullmatch(r"(?:(\d+)\*)?(\w+)", axis):
        factor, symbol = match.groups()
        if symbol in symbols:
            name, times, divisor = split_axis(symbols[symbol])
            return join_axis(name, times * int(factor or 1), divisor)
    names = {symbol: f"({name})" if "/" in name else name for symbol, name in symbols.items()}
    return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), axis)
