"""Matrix products that add their bias and a residual themselves: LinearAdd, for GPU libraries with such epilogues.

    MatMul(x, w) -> BiasAdd(., b, skip)                     =>  LinearAdd(x, w, b, skip)
    NhwcConv 1x1 (x, w, b?)                                 =>  LinearAdd(x, w', b?)
    NhwcConv 1x1 (x, w) -> BiasAdd(., b, skip)              =>  LinearAdd(x, w', b, skip)
    NhwcConv 1x1 (x, w) -> SkipGroupNorm(., g, h, skip, b)  =>  LinearAdd(x, w', b, skip) -> s -> GroupNorm(s, g, h)
    MatMul(x, w)                                            =>  LinearAdd(x, w)

A convolution of one pixel is a matrix product over NHWC tensors. The last rule only gives the product to the operator
whose algorithm can be tuned. Left alone: weights that are not constant matrices, grouped, strided or padded
convolutions, results that something else reads too. Runs after `nhwc_layout`, `pack_qkv` and `fold_bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.rewriting import derived


@dataclass
class _Product:
    """A node that multiplies `x` (..., K) by a matrix (K, N), and the bias it adds."""

    node: ir.Node
    x: ir.Value
    bias: ir.Value | None


def linear_add(model: ir.Model) -> int:
    """Rewrite the products of `model` in place; returns how many."""
    made = 0
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "BiasAdd":
            made += _bias_add(model.graph, node)
        elif node.domain == DOMAIN and node.op_type == "SkipGroupNorm":
            made += _skip_group_norm(model.graph, node)
    for node in list(model.graph):
        product = _product(node)
        if product is not None:
            _insert(model.graph, node, product, node.outputs[0], product.bias, None)
            model.graph.remove(node, safe=True)
            made += 1
    return made


def _product(node: ir.Node | None) -> _Product | None:
    if node is None or node.op_type not in ("MatMul", "NhwcConv"):
        return None
    x, weight = node.inputs[:2]
    if x is None or not c.is_constant(weight) or (c.rank(x) or 0) < 2:
        return None
    if node.op_type == "MatMul":
        return _Product(node, x, None) if c.rank(weight) == 2 else None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return _Product(node, x, bias) if _is_one_pixel(node) else None


def _is_one_pixel(conv: ir.Node) -> bool:
    attributes = conv.attributes
    plain = attributes.get_int("group", 1) == 1 and attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    strides, pads = attributes.get_ints("strides", [1, 1]), attributes.get_ints("pads", [0, 0, 0, 0])
    size = [c.size(conv.inputs[1], axis) for axis in (1, 2)]
    return plain and size == [1, 1] and not any(pads or ()) and all(stride == 1 for stride in strides or ())


def _alone(value: ir.Value | None) -> _Product | None:
    """The product without a bias that yields `value` for one reader."""
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    product = _product(value.producer())
    return product if product is not None and product.bias is None else None


def _bias_add(graph: ir.Graph, node: ir.Node) -> bool:
    x, bias, skip = node.inputs
    for value, other in ((x, skip), (skip, x)):
        product = _alone(value)
        if product is not None and c.same_shape(value, other):
            _insert(graph, node, product, node.outputs[0], bias, other)
            graph.remove(node, safe=True)
            graph.remove(product.node, safe=True)
            return True
    return False


def _skip_group_norm(graph: ir.Graph, node: ir.Node) -> bool:
    x, gamma, beta, skip = node.inputs[:4]
    bias = node.inputs[4] if len(node.inputs) > 4 else None
    for value, other in ((x, skip), (skip, x)):
        product = _alone(value)
        if product is None or not c.same_shape(value, other):
            continue
        normal, total = node.outputs
        summed = _insert(graph, node, product, total, bias, other)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        norm = ir.node("GroupNorm", [summed, gamma, beta], attributes, domain=DOMAIN)
        norm.metadata_props.update(node.metadata_props)
        _take_place(graph, node, norm, normal)
        graph.remove(node, safe=True)
        graph.remove(product.node, safe=True)
        return True
    return False


def _insert(
    graph: ir.Graph,
    before: ir.Node,
    product: _Product,
    output: ir.Value,
    bias: ir.Value | None,
    skip: ir.Value | None,
) -> ir.Value:
    """A LinearAdd in front of `before`, whose result takes the place of `output`."""
    inputs: list[ir.Value | None] = [product.x, _matrix(graph, product.node), bias, skip]
    while inputs[-1] is None:
        inputs.pop()
    new = ir.node("LinearAdd", inputs, domain=DOMAIN)
    new.metadata_props.update(product.node.metadata_props)
    _take_place(graph, before, new, output)
    return new.outputs[0]


def _take_place(graph: ir.Graph, before: ir.Node, new: ir.Node, output: ir.Value) -> None:
    made = new.outputs[0]
    made.name, made.type, made.shape = output.name, output.type, output.shape
    graph.insert_before(before, new)
    ir.convenience.replace_all_uses_with(output, made, replace_graph_outputs=True)


def _matrix(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """The weight as (K, N)."""
    weight = node.inputs[1]
    assert weight is not None
    if node.op_type == "MatMul":
        return weight
    filters, channels = c.size(weight, 0), c.size(weight, 3)
    assert filters is not None
    assert channels is not None

    def matrix(a: np.ndarray) -> np.ndarray:
        return a.reshape(filters, channels).T

    return derived(graph, f"{node.outputs[0].name}.matrix", [weight], [channels, filters], matrix)
