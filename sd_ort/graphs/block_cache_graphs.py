"""Graphs of a transformer for caches of block outputs between steps, as in diffusers.

FirstBlockCache:

    head   computes the first block, and the output from it and the cached residual of the later blocks; returns the
           change of the first block's residual since the last full step, and the streams after it
    rest   computes the later blocks from these streams, and their residual; copies the first block's residual: its
           outputs are inputs of the head in later steps

    residual = h1 - h0, change = mean |residual - last residual| / mean |last residual|
    full     output(hN), later residual = hN - h1
    reused   output(h1 + later residual)

MagCache:

    blocks      computes all blocks, and returns their residual hN - h0
    no blocks   computes output(h0 + residual) from a residual of an earlier step

TaylorSeer:

    attentions      computes all blocks, and returns what each attention gives before its last linear layer
    no attentions   computes all but the attentions, from their values as inputs

h0: the image's tokens before the first block, h1 behind it, hN behind the last block. All graphs are cut from the
optimized one. Head and rest, and the graphs of MagCache, share only the weights before and after the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from fusion_passes.graph_edits import new_initializer
from fusion_passes.value_queries import operand
from fusion_passes.weight_recipes import WeightRecipe
from sd_ort.core.errors import InputError
from sd_ort.graphs.layers import initializers_by_source, only_consumer
from sd_ort.graphs.step_cache import add_input, add_output, remove_unused_parts, replace_by_input

STREAM = "first_block_stream_{}"  # outputs of the head and inputs of the rest
RESIDUAL, LAST_RESIDUAL = "first_block_residual", "last_first_block_residual"
LATER_RESIDUAL, CHANGE = "later_residual", "first_block_change"
BLOCKS_RESIDUAL = "blocks_residual"
ATTENTION = "attention_{}"  # outputs and inputs of the graphs of TaylorSeer
ATTENTIONS = ("MultiHeadAttention", "Attention", "ScaledDotProductAttention")
NORMS = ("LayerNormalization", "AdaptiveNorm")
EMBEDDERS = ("x_embedder.bias", "img_in.bias")  # of the image's tokens in FLUX.1, in Qwen-Image
SECOND_BLOCK = "transformer_blocks.1.attn"


def keep_head(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Reduce a transformer to its first block. recipes: of the initializers. Raises InputError for another model."""
    graph = model.graph
    cut = _Cut(graph, recipes)
    residual = _node(graph, "Sub", [cut.after_first, cut.before_first], f"{RESIDUAL}.now")
    last = add_input(graph, residual, LAST_RESIDUAL)
    later = add_input(graph, residual, LATER_RESIDUAL)
    cached_stream = _node(graph, "Add", [cut.after_first, later], "kept_stream")
    ir.convenience.replace_all_uses_with(cut.after_last, cached_stream)
    numbers = [
        _node(graph, "Cast", [value], f"{value.name}.float32", {"to": ir.DataType.FLOAT}) for value in (residual, last)
    ]
    difference = _node(graph, "Sub", numbers, f"{RESIDUAL}.difference")
    means = []
    for value in (difference, numbers[1]):
        magnitude = _node(graph, "Abs", [value], f"{value.name}.magnitude")
        means.append(_mean(graph, magnitude))
    tiny = new_initializer(graph, f"{CHANGE}.tiny", np.asarray(np.finfo(np.float32).tiny))
    divisor = _node(graph, "Max", [means[1], tiny], f"{CHANGE}.divisor")
    add_output(graph, _node(graph, "Div", [means[0], divisor], f"{CHANGE}.ratio"), CHANGE)
    add_output(graph, residual, RESIDUAL)
    for index, value in enumerate(cut.streams):
        add_output(graph, value, STREAM.format(index))
    remove_unused_parts(model)


def keep_rest(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Reduce a transformer to the blocks behind the first one. Arguments and errors as of `keep_head`."""
    graph = model.graph
    cut = _Cut(graph, recipes)
    after_first = cut.after_first
    for index, value in enumerate(cut.streams):
        source = replace_by_input(graph, value, STREAM.format(index))
        after_first = source if value is cut.after_first else after_first
    later = _node(graph, "Sub", [cut.after_last, after_first], f"{LATER_RESIDUAL}.difference")
    add_output(graph, later, LATER_RESIDUAL)
    add_output(graph, add_input(graph, later, RESIDUAL), LAST_RESIDUAL)
    remove_unused_parts(model)


def return_residual(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Add the residual of all blocks to the outputs of a transformer. Arguments and errors as of `keep_head`."""
    ends = _Ends(model.graph, recipes)
    residual = _node(model.graph, "Sub", [ends.after_last, ends.before_first], f"{BLOCKS_RESIDUAL}.now")
    add_output(model.graph, residual, BLOCKS_RESIDUAL)


def leave_blocks_out(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Replace the blocks of a transformer by a new input, their residual. Arguments and errors: see `keep_head`."""
    graph = model.graph
    ends = _Ends(graph, recipes)
    residual = add_input(graph, ends.before_first, BLOCKS_RESIDUAL)
    cached_stream = _node(graph, "Add", [ends.before_first, residual], "kept_stream")
    ir.convenience.replace_all_uses_with(ends.after_last, cached_stream)
    remove_unused_parts(model)


def return_attentions(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Add the outputs of each attention to the outputs of a transformer. Arguments and errors: see `keep_head`."""
    for index, value in enumerate(_attentions(model.graph, recipes)):
        add_output(model.graph, value, ATTENTION.format(index))


def leave_attentions_out(model: ir.Model, recipes: Mapping[str, WeightRecipe]) -> None:
    """Replace the attentions of a transformer by inputs with their outputs. Arguments and errors: see `keep_head`."""
    for index, value in enumerate(_attentions(model.graph, recipes)):
        replace_by_input(model.graph, value, ATTENTION.format(index))
    remove_unused_parts(model)


def _attentions(graph: ir.Graph, recipes: Mapping[str, WeightRecipe]) -> list[ir.Value]:
    _Ends(graph, recipes)  # raises for transformers for which diffusers has no cache
    return [node.outputs[0] for node in graph if node.op_type in ATTENTIONS]


class _Ends:
    """The image's tokens of a transformer before its first block and after its last: before_first, after_last."""

    def __init__(self, graph: ir.Graph, recipes: Mapping[str, WeightRecipe]) -> None:
        """Raises InputError if a value is not found."""
        self.by_source = initializers_by_source(graph, recipes)
        embedded = self._consumer(next((name for name in EMBEDDERS if name in self.by_source), EMBEDDERS[0]))
        self.before_first = embedded.outputs[0]
        norm = self._normalized("proj_out.weight")
        if _adds_stream(norm):
            _split_sum(graph, norm)
        self.after_last = operand(norm, 0)

    def _consumer(self, tensor: str, index: int | None = None) -> ir.Node:
        node = only_consumer(self.by_source.get(tensor, ()), (), index)
        if node is None:
            raise InputError(
                f"enable_cache: layer {tensor.rpartition('.')[0]} is not found in the transformer's graph; the cache "
                "is for FLUX.1 with two double blocks or more and for Qwen-Image, not in 8 bits."
            )
        return node

    def _stream(self, tensor: str) -> list[ir.Value]:
        """Return the values that a norm before a layer shares with other nodes, the normalized stream at the end.

        The norm reads the stream, or computes it as its second output, beside the normalized values.
        """
        norm = self._normalized(tensor)
        if _adds_stream(norm):
            return [norm.outputs[0], norm.outputs[1]]
        return [operand(norm, 0)]

    def _normalized(self, tensor: str) -> ir.Node:
        norm = _norm(self._consumer(tensor, 1).inputs[0])
        if norm is None:
            raise InputError(f"enable_cache: the norm before {tensor} is not found in the transformer's graph.")
        return norm


class _Cut(_Ends):
    """The values between the first block of a transformer and the later blocks.

    after_first: the image's tokens. streams: all that the second block reads of the first.
    """

    def __init__(self, graph: ir.Graph, recipes: Mapping[str, WeightRecipe]) -> None:
        """Raises InputError if a value is not found."""
        super().__init__(graph, recipes)
        image, text = (self._stream(f"{SECOND_BLOCK}.{name}.weight") for name in ("to_q", "add_q_proj"))
        self.after_first = image[-1]
        self.streams = [*image, *text]


def _norm(value: ir.Value | None, modulations: int = 2) -> ir.Node | None:
    """Return the norm that a value is the result of, also with a scale and a shift of each token; None for others."""
    node = None if value is None else value.producer()
    if node is None or node.op_type in NORMS:
        return node
    if node.op_type not in ("Add", "Mul") or not modulations:
        return None
    return next((norm for each in node.inputs if (norm := _norm(each, modulations - 1))), None)


def _adds_stream(norm: ir.Node) -> bool:
    """Return whether a norm is an AdaptiveNorm that adds a gated value and the stream before it normalizes."""
    return len(norm.inputs) > 4 and norm.inputs[4] is not None


def _split_sum(graph: ir.Graph, norm: ir.Node) -> None:
    """Split an AdaptiveNorm: nodes before it compute its gated sum, which it then only normalizes."""
    total = operand(norm, 0)
    for op_type, factor in (("Mul", norm.inputs[3]), ("Add", norm.inputs[4])):  # gate, skip
        if factor is None:
            continue
        node = ir.node(op_type, [total, factor])
        value = node.outputs[0]
        value.name, value.shape, value.type = f"{total.name}.{op_type}", total.shape, total.type
        graph.insert_before(norm, node)
        total = value
    if len(norm.outputs) > 1:
        ir.convenience.replace_all_uses_with(norm.outputs[1], total)
    norm.replace_input_with(0, total)
    for index in (3, 4):
        norm.replace_input_with(index, None)


def _mean(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Append nodes and return the mean of a tensor of three axes, a number.

    The last axis alone comes first: a GPU computes each number of a reduction with one block of threads.
    """
    axis = new_initializer(graph, f"{value.name}.last_axis", np.asarray([2], np.int64))
    of_tokens = _node(graph, "ReduceMean", [value, axis], f"{value.name}.means", {"keepdims": 0})
    of_tokens.shape = None if value.shape is None else ir.Shape(value.shape[:2])
    mean = _node(graph, "ReduceMean", [of_tokens], f"{value.name}.mean", {"keepdims": 0})
    mean.shape = ir.Shape([])
    return mean


def _node(
    graph: ir.Graph, op_type: str, inputs: list[ir.Value], name: str, attributes: dict[str, int] | None = None
) -> ir.Value:
    """Append a node and return its output, which has the shape of the first input."""
    node = ir.node(op_type, inputs, attributes or {})
    value = node.outputs[0]
    is_cast = op_type == "Cast"
    value.name, value.shape = name, inputs[0].shape
    value.type = ir.TensorType(ir.DataType.FLOAT) if is_cast else inputs[0].type
    graph.append(node)
    return value
