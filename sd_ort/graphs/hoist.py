"""Hoisting: a UNet as three graphs, of which only one runs at every step.

    prompt   reads all inputs but sample and timestep                once a prompt: the K and V of every cross-attention
    time     reads timestep (and results of `prompt`)                once a schedule: the time embeddings
    step     reads sample and the results of both                    every step

What belongs where is read off the dataflow: a node goes into the first graph that has all it depends on. The nodes are
those of the whole UNet and compute the same. The time graph takes any number of rows (timestep [rows] instead of [1]),
so that one call serves all steps of a schedule; its results are packed side by side into one tensor,
`time_embedding` [rows, width], which the step graph splits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.graph_edits import new_initializer
from sd_ort.core.errors import InputError
from sd_ort.core.folder import MODEL
from sd_ort.graphs.inline import inline, subgraphs
from sd_ort.graphs.load import load
from sd_ort.graphs.timestep import TIMESTEP, give_axis

PROMPT_INPUTS = frozenset(
    "encoder_hidden_states text_embeds time_ids timestep_cond class_labels image_embeds ip_adapter_scale".split()
)
TIME_EMBEDDING = "time_embedding"
# Components of a hoisted pipeline folder, by graph. The step graph keeps the name of the UNet.
PARTS = {"prompt": "unet_prompt", "time": "unet_time", "step": "unet"}

# A node's level: the graph it belongs to. ANYWHERE is constants and the batch size, which every graph can make.
ANYWHERE, PROMPT, TIME, STEP = range(4)
BATCH_SIZES = ("sample.shape", "sample.batch")  # what reads the batch size: a whole Shape, and its first element
VIEWS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})


def is_hoisted(folder: Path) -> bool:
    """Whether the UNet of a pipeline folder was split by `optimize --hoist`."""
    return (folder / PARTS["prompt"] / MODEL).is_file() and (folder / PARTS["time"] / MODEL).is_file()


def folders_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """The folders that hold a component, of which a manifest has `entry`: its parts where it is hoisted."""
    return list(PARTS.values()) if "hoisted" in entry else [name]


def split(model: ir.Model) -> dict[str, ir.Model]:
    """The graphs "prompt", "time" and "step" of a UNet.

    Raises InputError for a model without the inputs of a UNet, or in which nothing depends on prompt or time alone.
    """
    names = {str(value.name) for value in model.graph.inputs}
    if not {"sample", TIMESTEP, "encoder_hidden_states"} <= names:
        raise InputError(f"a graph that reads {', '.join(sorted(names))} is no UNet: only a UNet can be hoisted.")
    if not give_axis(model):
        raise InputError("this UNet computes with its timestep, which has no axis, at once: leave out --hoist.")
    common.NameFixPass()(model)
    _separate_batch_sizes(model.graph)
    levels = _levels(model.clone().graph)  # a clone: nodes that a pass took out still count as readers in the original
    parts = {
        "prompt": _part(model.clone(), levels, PROMPT),
        "time": _part(model.clone(), levels, TIME),
        "step": _part(model.clone(), levels, STEP),
    }
    if not parts["prompt"].graph.outputs or not parts["time"].graph.outputs:
        raise InputError("nothing in this UNet depends on the prompt or the time alone: leave out --hoist.")
    _pack(parts["time"].graph, parts["step"].graph)
    for part in parts.values():
        _clean(part)
    return parts


def join(folder: Path) -> ir.Model:
    """The UNet of a hoisted pipeline folder as the one graph it was before, to verify it. Weights stay on disk."""
    parts = {name: load(folder / component / MODEL) for name, component in PARTS.items()}
    step = parts["step"]
    named = {str(v.name): v for part in parts.values() for v in part.graph.inputs}
    made = {str(v.name) for part in parts.values() for v in part.graph.outputs}
    order = [name for name in ("sample", TIMESTEP, *sorted(PROMPT_INPUTS), *named) if name in named]
    inputs = {name: like(named[name]) for name in dict.fromkeys(order) if name not in made}
    inputs[TIMESTEP].shape = ir.Shape([1])
    graph = ir.Graph(
        list(inputs.values()), [], nodes=[], opset_imports=dict(step.graph.opset_imports), name=step.graph.name
    )
    whole = ir.Model(graph, ir_version=step.ir_version)
    batch = ir.node("Shape", [inputs["sample"]], {"start": 0, "end": 1})
    rows = ir.node("Expand", [inputs[TIMESTEP], batch.outputs[0]])
    batch.outputs[0].name, rows.outputs[0].name = "join.batch", "join.timestep"
    graph.extend([batch, rows])
    values = {**inputs, TIMESTEP: rows.outputs[0]}
    for name, part in parts.items():
        values |= inline(whole, part, {str(v.name): values[str(v.name)] for v in part.graph.inputs}, f"{name}.")
    graph.outputs.append(values["out_sample"])
    values["out_sample"].name = "out_sample"
    return whole


# --- Which graph a node belongs to ----------------------------------------------------------------------------------


def _levels(graph: ir.Graph) -> dict[str, int]:
    """Level of every node, and of those in its subgraphs, by the name of its first output."""
    by_input = {str(v.name): PROMPT if v.name in PROMPT_INPUTS else STEP for v in graph.inputs}
    by_input[TIMESTEP] = TIME
    values: dict[ir.Value, int] = {value: by_input[str(value.name)] for value in graph.inputs}
    levels: dict[str, int] = {}
    for node in graph:
        level = max((values.get(v, ANYWHERE) for v in reads(node)), default=ANYWHERE)
        if _key(node) in BATCH_SIZES:
            level = ANYWHERE
        levels |= {_key(n): level for n in (node, *_inner(node))}
        values |= dict.fromkeys(node.outputs, level)
    # A view costs nothing: behind the cut, it leaves the time embeddings as rows that can be packed.
    for node in reversed(list(graph)):
        users = [user for output in node.outputs for user, _ in output.uses()]
        if levels[_key(node)] == TIME and node.op_type in VIEWS and users:
            levels[_key(node)] = min(levels[_key(user)] for user in users)
    return levels


def _key(node: ir.Node) -> str:
    return str(node.outputs[0].name)


def reads(node: ir.Node) -> list[ir.Value]:
    """All values a node depends on, those that its subgraphs take from outside included."""
    found = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        own = {output for inner in graph for output in inner.outputs} | set(graph.inputs)
        found += [v for inner in graph for v in reads(inner) if v not in own and v.producer() is not None]
        found += [v for v in graph.outputs if v not in own]
    return found


def _inner(node: ir.Node) -> list[ir.Node]:
    """The nodes of a node's subgraphs."""
    return [n for graph in subgraphs(node) for inner in graph for n in (inner, *_inner(inner))]


def _separate_batch_sizes(graph: ir.Graph) -> None:
    """Let those that read the batch size off the shape of any value read one of two Shapes of `sample`, named as
    `BATCH_SIZES`: all three graphs can make those.

    Spellings: Shape with start 0 and end 1, and a whole Shape of which a user gathers or slices element 0.
    """
    sample = next(v for v in graph.inputs if v.name == "sample")
    batched = _batched(graph)
    batch = None if sample.shape is None else sample.shape[0]
    whole, first = ir.node("Shape", [sample]), ir.node("Shape", [sample], {"start": 0, "end": 1})
    for node in [n for n in graph if n.op_type == "Shape"]:
        read = node.inputs[0]
        named = batch not in (None, ir.SymbolicDim(None)) and read is not None and read.shape and read.shape[0] == batch
        start, end = (node.attributes.get_int(name, None) for name in ("start", "end"))
        if not (named or read in batched) or start:
            continue
        for user, place in list(node.outputs[0].uses()):
            if end == 1:
                user.replace_input_with(place, first.outputs[0])
            elif end is None and _picks_first(user):
                user.replace_input_with(place, whole.outputs[0])
    for own, name in zip((whole, first), BATCH_SIZES, strict=True):
        if own.outputs[0].uses():
            own.outputs[0].name = name
            graph.insert_before(graph[0], own)


def _picks_first(node: ir.Node) -> bool:
    constants = [ir.convenience.get_const_tensor(v) for v in node.inputs[1:] if v is not None]
    if any(tensor is None or tensor.size != 1 for tensor in constants):
        return False
    numbers = [int(tensor.numpy().reshape(())) for tensor in constants if tensor is not None]
    return (node.op_type == "Gather" and numbers == [0]) or (node.op_type == "Slice" and numbers[:2] == [0, 1])


def _batched(graph: ir.Graph) -> list[ir.Value]:
    """Graph inputs with a row for each image."""
    sample = next(v for v in graph.inputs if v.name == "sample")
    batch = None if sample.shape is None else sample.shape[0]
    return [v for v in graph.inputs if v.shape is not None and len(v.shape) and v.shape[0] == batch]


# --- Cutting --------------------------------------------------------------------------------------------------------


def _part(model: ir.Model, levels: dict[str, int], level: int) -> ir.Model:
    """Reduce a copy of the UNet to one level: what lower levels made comes in, what higher levels read goes out."""
    graph = model.graph
    sample = next(v for v in graph.inputs if v.name == "sample")
    batch = sample.shape[0] if sample.shape is not None else None
    mine = [node for node in graph if levels[_key(node)] == level]
    read = [v for node in mine for v in reads(node)] + (list(graph.outputs) if level == STEP else [])
    incoming = [v for v in dict.fromkeys(read) if _made_below(v, levels, level)]
    outgoing = [v for node in mine for v in node.outputs if any(levels[_key(u)] > level for u, _ in v.uses())]
    if level == STEP:
        outgoing = list(graph.outputs)
    names = [v.name for v in outgoing]
    cut = [like(value) for value in incoming]
    for value, new in zip(incoming, cut, strict=True):
        ir.convenience.replace_all_uses_with(value, new)
        value.name = f"{value.name}.elsewhere"
    graph.inputs.extend(cut)
    if level == TIME:
        timestep = next(v for v in graph.inputs if v.name == TIMESTEP)
        timestep.shape = ir.Shape([batch])
    for node in list(graph):  # the batch size, from an input that this graph has
        if _key(node) in BATCH_SIZES:
            names_here = {PROMPT: PROMPT_INPUTS, TIME: {TIMESTEP}, STEP: {"sample"}}[level]
            node.replace_input_with(0, next(v for v in _batched(graph) if v.name in names_here))
    graph.outputs.clear()
    graph.outputs.extend(outgoing)
    for value, name in zip(outgoing, names, strict=True):
        value.name = name
    common.RemoveUnusedNodesPass()(model)
    for value in [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]:
        graph.inputs.remove(value)
    return model


def _made_below(value: ir.Value, levels: dict[str, int], level: int) -> bool:
    producer = value.producer()
    return producer is not None and ANYWHERE < levels[_key(producer)] < level


def like(value: ir.Value) -> ir.Value:
    """A value of the same name, type and shape that nothing makes: an input."""
    shape = None if value.shape is None else ir.Shape(list(value.shape))
    return ir.Value(name=value.name, type=value.type, shape=shape)


def _pack(time: ir.Graph, step: ir.Graph) -> None:
    """Concatenate the outputs [batch, width] of the time graph into one, and split it again in the step graph.

    Outputs of another rank, an open width, or another type than most have stay as they are.
    """
    rows = [v for v in time.outputs if v.shape is not None and len(v.shape) == 2 and _width(v)]
    types = [v.type for v in rows]
    rows = [v for v in rows if v.type == max(types, key=types.count)]
    if len(rows) < 2:
        return
    widths = [_width(v) for v in rows]
    whole = ir.Shape([rows[0].shape[0], sum(widths)])  # type: ignore[index]
    packed = ir.node("Concat", rows, {"axis": 1})
    packed.outputs[0].name, packed.outputs[0].type, packed.outputs[0].shape = TIME_EMBEDDING, rows[0].type, whole
    time.append(packed)
    others = [v for v in time.outputs if v not in rows]
    time.outputs.clear()
    time.outputs.extend([packed.outputs[0], *others])

    inputs = {v.name: v for v in step.inputs}
    source = ir.Value(name=TIME_EMBEDDING, type=rows[0].type, shape=whole)
    sizes = new_initializer(step, f"{TIME_EMBEDDING}.widths", widths)
    parts = ir.node("Split", [source, sizes], {"axis": 1}, num_outputs=len(rows))
    for row, output in zip(rows, parts.outputs, strict=True):
        value = inputs[row.name]
        ir.convenience.replace_all_uses_with(value, output)
        step.inputs.remove(value)
        output.name, output.type, output.shape = row.name, row.type, value.shape
    step.insert_before(step[0], parts)
    step.inputs.append(source)


def _width(value: ir.Value) -> int:
    """Size of the last axis, 0 if it is open."""
    size = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else 0


def _clean(model: ir.Model) -> None:
    passes: Iterable[ir.passes.PassBase] = (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.TopologicalSortPass(),
    )
    for step in passes:
        step(model)
