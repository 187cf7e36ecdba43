"""Skipped blocks of a Stable Diffusion 3 transformer, for skip-layer guidance.

A block adds to its streams what its attention and MLP return, times gates that its modulation computes. With a
modulation of zeros the block returns its inputs. So only the modulation is edited, in any export or fused graph, and in
a hoisted folder only the graph of the timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries, weight_recipes
from fusion_passes.weight_recipes import WeightRecipe
from sd_ort.core.errors import InputError

NORMS = ("norm1", "norm1_context")
FORWARDING_OPS = ("Cast", "Identity")


def skip_blocks(model: ir.Model, recipes: Mapping[str, WeightRecipe], blocks: Sequence[int]) -> None:
    """Make blocks of a transformer return their inputs. `recipes`: of the initializers, which tell the layer of each.

    Raises:
        InputError: if a block is not found in the graph.
    """
    graph = model.graph
    by_source: dict[str, list[ir.Value]] = {}
    for name in graph.initializers.keys() & recipes.keys():
        for source in weight_recipes.sources(recipes[name]):
            by_source.setdefault(source, []).append(graph.initializers[name])
    for block in blocks:
        for norm in NORMS:
            layer = f"transformer_blocks.{block}.{norm}.linear"
            node = _bias_consumer(by_source.get(f"{layer}.bias", ()))
            if node is None:
                raise InputError(f"skip_guidance_layers: block {block} is not found in the transformer's graph.")
            _multiply_by_zero(graph, node.outputs[0], f"{layer}.skipped")
    graph.sort()


def _bias_consumer(values: Sequence[ir.Value]) -> ir.Node | None:
    """Return the node that adds a bias; None if there is not one."""
    biases, found = [*values], dict[ir.Node, None]()
    for value in biases:  # the list grows
        for node in value_queries.consumers(value):
            if node.op_type in FORWARDING_OPS:
                biases.append(node.outputs[0])
            else:
                found[node] = None
    return next(iter(found)) if len(found) == 1 else None


def _multiply_by_zero(graph: ir.Graph, value: ir.Value, name: str) -> None:
    dtype = value.dtype
    assert dtype is not None
    zero = ir.Tensor(np.zeros((), dtype.numpy()), dtype=dtype, name=f"{name}.zero")
    factor = ir.Value(name=zero.name, shape=zero.shape, type=ir.TensorType(dtype), const_value=zero)
    graph.register_initializer(factor)
    product = ir.node("Mul", [value, factor])
    product.outputs[0].name, product.outputs[0].type, product.outputs[0].shape = name, value.type, value.shape
    graph.append(product)
    ir.convenience.replace_all_uses_with(value, product.outputs[0])
    product.replace_input_with(0, value)
