"""Skipped blocks of a Stable Diffusion 3 transformer, for skip-layer guidance.

A block adds to its streams what its attention and MLP return, times gates that its modulation computes. With a
modulation of zeros the block returns its inputs. So only the modulation is edited, in any export or fused graph, and in
a hoisted folder only the graph of the timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from fusion_passes.graph_edits import new_initializer
from fusion_passes.weight_recipes import WeightRecipe
from sd_ort.core.errors import InputError
from sd_ort.graphs.layers import initializers_by_source, only_consumer

NORMS = ("norm1", "norm1_context")
FORWARDING_OPS = ("Cast", "Identity")


def skip_blocks(model: ir.Model, recipes: Mapping[str, WeightRecipe], blocks: Sequence[int]) -> None:
    """Make blocks of a transformer return their inputs. `recipes`: of the initializers, which tell the layer of each.

    Raises:
        InputError: if a block is not found in the graph.
    """
    graph = model.graph
    by_source = initializers_by_source(graph, recipes)
    for block in blocks:
        for norm in NORMS:
            layer = f"transformer_blocks.{block}.{norm}.linear"
            node = only_consumer(by_source.get(f"{layer}.bias", ()), FORWARDING_OPS)
            if node is None:
                raise InputError(f"skip_guidance_layers: block {block} is not found in the transformer's graph.")
            _multiply_by_zero(graph, node.outputs[0], f"{layer}.skipped")
    graph.sort()


def _multiply_by_zero(graph: ir.Graph, value: ir.Value, name: str) -> None:
    assert value.dtype is not None
    zero = new_initializer(graph, f"{name}.zero", np.zeros((), value.dtype.numpy()))
    product = ir.node("Mul", [value, zero])
    product.outputs[0].name, product.outputs[0].type, product.outputs[0].shape = name, value.type, value.shape
    graph.append(product)
    ir.convenience.replace_all_uses_with(value, product.outputs[0])
    product.replace_input_with(0, value)
