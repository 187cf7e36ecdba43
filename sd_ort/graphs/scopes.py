"""The torch module that a node was exported from, for messages only."""

from __future__ import annotations

import ast

import onnx_ir as ir

SCOPES = "pkg.torch.onnx.name_scopes"


def scope(node: ir.Node) -> str:
    """Return a node's module, such as `down_blocks.0.attentions.0.transformer_blocks.0.attn1`, or "" if unknown."""
    names = node.metadata_props.get(SCOPES)
    if names:
        modules = ast.literal_eval(names.split("],")[0].rstrip("]") + "]")[:-1]  # the last name is the node itself
        named = [str(name) for name in modules if not str(name).startswith("_")]  # torch.export adds names with _
        return named[-1].removeprefix("model").removeprefix(".") if named else ""
    for name in (node.name, *(output.name for output in node.outputs)):
        if name and name.startswith("/"):
            modules = name.strip("/").split("/")[:-1]
            return ".".join(modules[1:] if modules[:1] == ["model"] else modules)
    return ""
