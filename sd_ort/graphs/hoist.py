"""Hoisting: splits a UNet or a diffusion transformer into three graphs, one of which runs in every denoising step.

    prompt   reads all inputs except latents and timestep   once per prompt: keys and values of the cross-attentions;
                                                            of a transformer text projections and rotary tables
    time     reads timestep (and outputs of `prompt`)       once per schedule: time embeddings, the modulation
    step     reads the latents and the outputs of both      in every step

The dataflow determines the graph of a node: the first one that has all its inputs. The nodes are those of the complete
graph and compute the same. The timestep of the time graph is [rows] instead of [1], so one call computes all steps of a
schedule. Its outputs are concatenated to one tensor, `time_embedding` [rows, width], which the step graph splits.
Tensors between the graphs are float32 if they are bfloat16 in the complete graph, since Python has no bfloat16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.canonicalize.inverse_pairs import VIEWS
from fusion_passes.cleanup import subgraphs
from fusion_passes.graph_edits import new_initializer
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import HOISTED, MODEL
from sd_ort.graphs.inline import inline
from sd_ort.graphs.load import load
from sd_ort.graphs.unet import TIMESTEP, make_timestep_1d

PARTS = HOISTED["unet"]
PROMPT_INPUTS = frozenset(
    "encoder_hidden_states text_embeds time_ids timestep_cond class_labels image_embeds ip_adapter_scale "
    "pooled_projections guidance img_ids txt_ids encoder_hidden_states_mask".split()
)
LATENTS = ("sample", "hidden_states")  # of a UNet, of a transformer
TIME_EMBEDDING = "time_embedding"

# A node's level is the graph it belongs to. ANYWHERE: constants and the batch size, which every graph can compute.
ANYWHERE, PROMPT, TIME, STEP = range(4)
BATCH_SIZES = ("latents.shape", "latents.batch")  # outputs of the two Shapes of the latents: all sizes, the batch size


def is_hoisted(folder: Path, denoiser: str = "unet") -> bool:
    """Return whether the UNet or the transformer of a pipeline folder was split by `optimize --hoist`."""
    return all((folder / part / MODEL).is_file() for part in HOISTED[denoiser].values())


def parts_of(folder: Path, name: str) -> list[str]:
    """Return the components of a pipeline folder that one component was split into; itself if it was not."""
    return list(HOISTED[name].values()) if name in HOISTED and is_hoisted(folder, name) else [name]


def is_part(folder: Path, name: str) -> bool:
    """Return whether a component is the prompt or time graph of a hoisted UNet or transformer."""
    return any(name != denoiser and name in parts_of(folder, denoiser) for denoiser in HOISTED)


def split(model: ir.Model) -> dict[str, ir.Model]:
    """Split a UNet or a transformer into the graphs "prompt", "time" and "step".

    Raises:
        InputError: if the model has not their inputs, or no nodes that depend on the prompt or time only.
    """
    names = {str(value.name) for value in model.graph.inputs}
    if not {TIMESTEP, "encoder_hidden_states"} <= names or names.isdisjoint(LATENTS):
        message = "is neither a UNet nor a transformer: only these can be hoisted"
        raise InputError(f"a graph with inputs {', '.join(sorted(names))} {message}.")
    if not make_timestep_1d(model):
        raise InputError("this graph's timestep has no axis and cannot get one: leave out --hoist.")
    common.NameFixPass()(model)
    _separate_batch_sizes(model.graph)
    _allow_rows(model.graph)
    levels = _levels(model.clone().graph)  # a clone, because nodes that a pass removed still count as consumers
    parts = {
        "prompt": _part(model.clone(), levels, PROMPT),
        "time": _part(model.clone(), levels, TIME),
        "step": _part(model.clone(), levels, STEP),
    }
    if not parts["prompt"].graph.outputs or not parts["time"].graph.outputs:
        raise InputError("nothing in this graph depends on the prompt or the time alone: leave out --hoist.")
    _pack_time_embeddings(parts["time"].graph, parts["step"].graph)
    for part in parts.values():
        _cast_boundary(part.graph)
        for graph_pass in (common.RemoveUnusedNodesPass(), common.TopologicalSortPass()):
            graph_pass(part)
    return parts


def join(folder: Path, denoiser: str = "unet") -> ir.Model:
    """Join the three graphs of a hoisted UNet or transformer to one, to verify it. Weights stay on disk."""
    parts = {name: load(folder / component / MODEL) for name, component in HOISTED[denoiser].items()}
    step = parts["step"]
    (output_name,) = (str(value.name) for value in step.graph.outputs)
    part_inputs = {str(v.name): v for part in parts.values() for v in part.graph.inputs}
    part_outputs = {str(v.name) for part in parts.values() for v in part.graph.outputs}
    order = [name for name in (*LATENTS, TIMESTEP, *sorted(PROMPT_INPUTS), *part_inputs) if name in part_inputs]
    inputs = {name: input_like(part_inputs[name]) for name in dict.fromkeys(order) if name not in part_outputs}
    inputs[TIMESTEP].shape = ir.Shape([1])
    graph = ir.Graph(
        list(inputs.values()), [], nodes=[], opset_imports=dict(step.graph.opset_imports), name=step.graph.name
    )
    model = ir.Model(graph, ir_version=step.ir_version)
    batch = ir.node("Shape", [_latents(graph)], {"start": 0, "end": 1})
    rows = ir.node("Expand", [inputs[TIMESTEP], batch.outputs[0]])
    batch.outputs[0].name, rows.outputs[0].name = "join.batch", "join.timestep"
    graph.extend([batch, rows])
    values = {**inputs, TIMESTEP: rows.outputs[0]}
    for name, part in parts.items():
        values |= inline(model, part, {str(v.name): values[str(v.name)] for v in part.graph.inputs}, f"{name}.")
    graph.outputs.append(values[output_name])
    values[output_name].name = output_name
    return model


# --- Levels of nodes ------------------------------------------------------------------------------------------------


def _levels(graph: ir.Graph) -> dict[str, int]:
    """Return the levels of all nodes, and of those in subgraphs, by the name of the first output."""
    by_input = {str(v.name): PROMPT if v.name in PROMPT_INPUTS else STEP for v in graph.inputs}
    by_input[TIMESTEP] = TIME
    values: dict[ir.Value, int] = {value: by_input[str(value.name)] for value in graph.inputs}
    levels: dict[str, int] = {}
    for node in graph:
        level = max((values.get(v, ANYWHERE) for v in all_inputs(node)), default=ANYWHERE)
        if _key(node) in BATCH_SIZES:
            level = ANYWHERE
        if level == TIME and any(map(_has_tokens, node.outputs)):
            level = STEP  # values of every token and step would fill the memory
        levels |= {_key(n): level for n in (node, *(n for body in subgraphs(node) for n in body.all_nodes()))}
        values |= dict.fromkeys(node.outputs, level)
    # Views move to the graph of their consumers: they are free, and the time embeddings stay 2-D for packing.
    for node in reversed(list(graph)):
        consumers = [consumer for output in node.outputs for consumer, _ in output.uses()]
        if levels[_key(node)] == TIME and node.op_type in VIEWS and consumers:
            levels[_key(node)] = min(levels[_key(consumer)] for consumer in consumers)
    return levels


def _has_tokens(value: ir.Value) -> bool:
    """Return whether a value has an axis of unknown size besides the first."""
    return value.shape is not None and any(not isinstance(size, int) for size in list(value.shape)[1:])


def _size_symbol(value: ir.Value) -> str | None:
    """Return the name of the size that a Shape of one axis computes, or None."""
    node = value.producer()
    source = None if node is None or node.op_type != "Shape" else node.inputs[0]
    if node is None or source is None or source.shape is None:
        return None
    start = node.attributes.get_int("start", 0) or 0
    end = node.attributes.get_int("end", None)
    size = source.shape[start] if end == start + 1 else None
    return size.value if isinstance(size, ir.SymbolicDim) else None


def _key(node: ir.Node) -> str:
    return str(node.outputs[0].name)


def all_inputs(node: ir.Node) -> list[ir.Value]:
    """Return all values that a node depends on, including the outer values that its subgraphs use."""
    values = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        own = {output for body_node in graph for output in body_node.outputs} | set(graph.inputs)
        used = [value for body_node in graph for value in all_inputs(body_node)]
        values += [value for value in used if value not in own and value.producer() is not None]
        values += [value for value in graph.outputs if value not in own]
    return values


def _latents(graph: ir.Graph) -> ir.Value:
    """Return the graph input that changes with every step."""
    return next(value for value in graph.inputs if value.name in LATENTS)


def _allow_rows(graph: ir.Graph) -> None:
    """Let values of the timestep alone have a row for each image: a first size of 1 becomes that of the latents.

    In the shapes of Reshapes it becomes 0, a copy.
    """
    latents = _latents(graph).shape
    dependent = {value for value in graph.inputs if value.name == TIMESTEP}
    of_one_row = {value for value in dependent if value.shape is not None and value.shape[0] == 1}
    for node in graph:
        computed = [value for value in all_inputs(node) if not _is_constant(value)]
        if computed and dependent.issuperset(computed):
            dependent.update(node.outputs)
        if node.op_type == "Reshape" and not node.domain and node.inputs[0] in of_one_row:
            target, allow_zero = node.inputs[1], node.attributes.get_int("allowzero", 0) == 1
            sizes = None if target is None else ir.convenience.get_const_tensor(target)
            numbers = [] if sizes is None else [int(number) for number in sizes.numpy().ravel()]
            if numbers[:1] == [1] and not allow_zero:
                name = f"{node.outputs[0].name}.rows"
                node.replace_input_with(1, new_initializer(graph, name, [0, *numbers[1:]]))
        for value in dependent.intersection(node.outputs):
            if value.dtype is not None and value.dtype.is_floating_point() and value.shape and value.shape[0] == 1:
                of_one_row.add(value)
                if latents is not None:
                    value.shape = ir.Shape([latents[0], *list(value.shape)[1:]])


def _is_constant(value: ir.Value) -> bool:
    return ir.convenience.get_const_tensor(value) is not None


def _separate_batch_sizes(graph: ir.Graph) -> None:
    """Replace batch sizes from Shapes of any value by two Shapes of the latents, named `BATCH_SIZES`.

    All three graphs can compute these. The batch size is a Shape with start 0 and end 1, or a Shape without end of
    which a consumer gathers or slices element 0.
    """
    sample = _latents(graph)
    batched = _batched_inputs(graph)
    batch = None if sample.shape is None else sample.shape[0]
    all_sizes, batch_size = ir.node("Shape", [sample]), ir.node("Shape", [sample], {"start": 0, "end": 1})
    for node in [n for n in graph if n.op_type == "Shape"]:
        value, shape = node.inputs[0], None if node.inputs[0] is None else node.inputs[0].shape
        has_batch_symbol = batch not in (None, ir.SymbolicDim(None)) and shape and shape[0] == batch
        start, end = (node.attributes.get_int(name, None) for name in ("start", "end"))
        if not (has_batch_symbol or value in batched) or start:
            continue
        for consumer, index in list(node.outputs[0].uses()):
            if end == 1:
                consumer.replace_input_with(index, batch_size.outputs[0])
            elif end is None and _selects_first(consumer):
                consumer.replace_input_with(index, all_sizes.outputs[0])
    for new, name in zip((all_sizes, batch_size), BATCH_SIZES, strict=True):
        if new.outputs[0].uses():
            new.outputs[0].name = name
            graph.insert_before(graph[0], new)


def _selects_first(node: ir.Node) -> bool:
    """Return whether a node is a Gather or Slice of element 0."""
    constants = [ir.convenience.get_const_tensor(v) for v in node.inputs[1:] if v is not None]
    if any(tensor is None or tensor.size != 1 for tensor in constants):
        return False
    indices = [int(tensor.numpy().reshape(())) for tensor in constants if tensor is not None]
    return (node.op_type == "Gather" and indices == [0]) or (node.op_type == "Slice" and indices[:2] == [0, 1])


def _batched_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the graph inputs whose first axis has the batch size of the latents."""
    sample = _latents(graph)
    batch = None if sample.shape is None else sample.shape[0]
    return [v for v in graph.inputs if v.shape is not None and len(v.shape) and v.shape[0] == batch]


# --- Splitting ------------------------------------------------------------------------------------------------------


def _part(model: ir.Model, levels: dict[str, int], level: int) -> ir.Model:
    """Reduce a copy of the graph to one level: values of lower levels become inputs, values for higher ones outputs."""
    graph = model.graph
    sample = _latents(graph)
    batch = sample.shape[0] if sample.shape is not None else None
    nodes = [node for node in graph if levels[_key(node)] == level]
    used = [v for node in nodes for v in all_inputs(node)] + (list(graph.outputs) if level == STEP else [])
    incoming = [v for v in dict.fromkeys(used) if _is_from_lower_level(v, levels, level)]
    outgoing = [v for node in nodes for v in node.outputs if any(levels[_key(u)] > level for u, _ in v.uses())]
    # Sizes of the prompt are those of its tensors, whose Shape stays on the host.
    later = {v: {levels[_key(u)] for u, _ in v.uses() if levels[_key(u)] > level} for v in outgoing}
    outgoing = [v for v in outgoing if not all(_size_source(graph, v, levels, other) for other in later[v])]
    sources = {v: _size_source(graph, v, levels, level) for v in incoming}
    incoming = [v for v in incoming if sources[v] is None]
    for value, source in sources.items():
        if source is not None:
            _replace_size(graph, value, *source)
    if level == STEP:
        outgoing = list(graph.outputs)
    if level == TIME:
        timestep = next(v for v in graph.inputs if v.name == TIMESTEP)
        timestep.shape = ir.Shape([batch])
    for node in list(graph):  # the batch size comes from an input of this graph
        if _key(node) in BATCH_SIZES:
            own_inputs = {PROMPT: PROMPT_INPUTS, TIME: {TIMESTEP}, STEP: set(LATENTS)}[level]
            node.replace_input_with(0, next(v for v in _batched_inputs(graph) if v.name in own_inputs))
    cut_subgraph(model, incoming, outgoing)
    return model


def _size_source(graph: ir.Graph, value: ir.Value, levels: dict[str, int], level: int) -> tuple[ir.Value, int] | None:
    """Return a tensor that the graph of `level` reads, and its axis, of the size `value`; None if there is none."""
    symbol = _size_symbol(value)
    if symbol is None:
        return None
    for used in (v for node in graph if levels.get(_key(node)) == level for v in all_inputs(node)):
        if _size_symbol(used) is None and (used.is_graph_input() or _is_from_lower_level(used, levels, level)):
            for axis, size in enumerate(used.shape or ()):
                if isinstance(size, ir.SymbolicDim) and size.value == symbol:
                    return used, axis
    return None


def _replace_size(graph: ir.Graph, value: ir.Value, source: ir.Value, axis: int) -> None:
    """Replace a size by a Shape of axis `axis` of `source`."""
    shape = ir.node("Shape", [source], {"start": axis, "end": axis + 1})
    shape.outputs[0].name, shape.outputs[0].type = f"{value.name}.size", value.type
    shape.outputs[0].shape = ir.Shape([1])
    ir.convenience.replace_all_uses_with(value, shape.outputs[0])
    graph.insert_before(graph[0], shape)


def cut_subgraph(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
    """Reduce a model to the nodes between `inputs`, which become graph inputs, and `outputs`.

    Graph inputs that these nodes use stay.
    """
    graph = model.graph
    names = [value.name for value in outputs]
    for value in inputs:
        new = input_like(value)
        ir.convenience.replace_all_uses_with(value, new)
        value.name = f"{value.name}.elsewhere"
        graph.inputs.append(new)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    for value, name in zip(outputs, names, strict=True):
        value.name = name
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    for value in [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]:
        graph.inputs.remove(value)


def _is_from_lower_level(value: ir.Value, levels: dict[str, int], level: int) -> bool:
    producer = value.producer()
    return producer is not None and ANYWHERE < levels[_key(producer)] < level


def input_like(value: ir.Value) -> ir.Value:
    """Return a value of the same name, type and shape without a producer, for a graph input."""
    shape = None if value.shape is None else ir.Shape(list(value.shape))
    return ir.Value(name=value.name, type=value.type, shape=shape)


def _pack_time_embeddings(time: ir.Graph, step: ir.Graph) -> None:
    """Concatenate the outputs [batch, 1.., width] of the time graph to one, and split it in the step graph.

    Outputs of another shape, a symbolic width or another dtype than the most frequent one stay separate.
    """
    rows = [v for v in time.outputs if v.shape is not None and len(v.shape) > 1 and _width(v)]
    rows = [v for v in rows if v.shape is not None and all(size == 1 for size in list(v.shape)[1:-1])]
    usual = Counter(v.dtype for v in rows).most_common(1)
    rows = [v for v in rows if v.dtype == usual[0][0]]
    if len(rows) < 2:
        return
    widths = [_width(v) for v in rows]
    shape = ir.Shape([rows[0].shape[0], sum(widths)])  # type: ignore[index]
    packed = ir.node("Concat", [_view(time, v, [0, width]) for v, width in zip(rows, widths, strict=True)], {"axis": 1})
    packed.outputs[0].name, packed.outputs[0].type, packed.outputs[0].shape = TIME_EMBEDDING, rows[0].type, shape
    time.append(packed)
    others = [v for v in time.outputs if v not in rows]
    time.outputs.clear()
    time.outputs.extend([packed.outputs[0], *others])

    inputs = {v.name: v for v in step.inputs}
    source = ir.Value(name=TIME_EMBEDDING, type=rows[0].type, shape=shape)
    sizes = new_initializer(step, f"{TIME_EMBEDDING}.widths", widths)
    parts = ir.node("Split", [source, sizes], {"axis": 1}, num_outputs=len(rows))
    step.insert_before(step[0], parts)
    for row, output in zip(rows, parts.outputs, strict=True):
        value = inputs[row.name]
        assert value.shape is not None
        output.name, output.type = row.name, row.type
        output.shape = ir.Shape([value.shape[0], value.shape[-1]])
        step.inputs.remove(value)
        middle = len(value.shape) - 2
        view = _view(step, output, [0, *[1] * middle, _width(value)]) if middle else output
        ir.convenience.replace_all_uses_with(value, view)
    step.inputs.append(source)


def _view(graph: ir.Graph, value: ir.Value, sizes: list[int]) -> ir.Value:
    """Return a Reshape of a value, inserted after its producer; the value itself if it has that rank."""
    producer = value.producer()
    assert producer is not None
    assert value.shape is not None
    if len(value.shape) == len(sizes):
        return value
    node = ir.node("Reshape", [value, new_initializer(graph, f"{value.name}.view_sizes", sizes)])
    output = node.outputs[0]
    output.name, output.type = f"{value.name}.view", value.type
    output.shape = ir.Shape([value.shape[0], *sizes[1:]])
    graph.insert_after(producer, node)
    return output


def _cast_boundary(graph: ir.Graph) -> None:
    """Make the bfloat16 inputs and outputs of a graph float32, with a Cast of each."""
    for value in [v for v in graph.inputs if v.dtype == ir.DataType.BFLOAT16]:
        cast = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16})
        output = cast.outputs[0]
        output.name, output.type, output.shape = f"{value.name}.bfloat16", value.type, value.shape
        ir.convenience.replace_all_uses_with(value, output)
        cast.replace_input_with(0, value)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(graph[0], cast)
    for index, value in enumerate(graph.outputs):
        if value.dtype != ir.DataType.BFLOAT16:
            continue
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        name, value.name = value.name, f"{value.name}.bfloat16"
        output = cast.outputs[0]
        output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), value.shape
        graph.append(cast)
        graph.outputs[index] = output


def _width(value: ir.Value) -> int:
    """Return the size of the last axis, or 0 if it is symbolic."""
    size = value.shape[-1] if value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else 0
