"""Reader of untrusted ONNX files: the model is validated before anything uses it.

A valid model is unambiguous and its work is bounded. Every tensor, also in functions and subgraphs, has the bytes of
its shape, and its external data is in an allowed place. Every value is defined once and before its consumers. Every
ONNX operator exists in the model's opset, with attributes of the right types. Functions are not recursive.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.core import embedded_weights
from sd_ort.core.cache import cached_bytes
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import read_regular
from sd_ort.core.paths import inside

if TYPE_CHECKING:
    import onnx

# Generous limits: the largest known graph, merged SDXL, has 12,000 nodes and 600 inputs.
FILE_LIMIT = (1 << 31) - 1  # bytes, protobuf's limit; larger weights are external
EMBEDDED_LIMIT = 1 << 24  # bytes of a file whose weights are not read with it
NODE_LIMIT = 100_000  # nodes after inlining all functions
ARITY_LIMIT = 10_000  # inputs or outputs of one node
TENSOR_LIMIT = 1 << 40  # bytes of one tensor
WEIGHTS_ARE_INPUTS = 3  # newest IR version in which every weight had to be an input too
CONSTANT_INPUTS = "sd_ort.constant_inputs"  # metadata: number of inputs with a default that became constants
UNUSED_OPSET = 21  # declared for a graph of other domains' operators alone
AXIS_LIMIT = 1 << 31  # declared size of an axis of an input or output


class _Invalid(Exception):
    """Reason why a model is invalid; `read` adds the path."""


def read(path: Path) -> onnx.ModelProto:
    """Return the validated model at `path`; locations of external data become absolute and need no more checks.

    External data must be in the folder of `path` (see `paths.inside`). Raises InputError for an invalid model.
    """
    with _file_errors(path):
        return _parse(_content(path), _DataFiles(path.parent))


def check(path: Path) -> None:
    """Check the model at `path` as `read` does, without importing onnx if an earlier process checked the same bytes.

    Only the ends of external data are cached, by content: that the files are there and long enough is checked again.
    """
    with _file_errors(path):
        if path.stat().st_size > EMBEDDED_LIMIT:
            read(path)
            return
        content, data = read_regular(path), _DataFiles(path.parent)

        def data_ends() -> bytes:
            _parse(content, data)
            return json.dumps(data.ends).encode()

        for location, end in json.loads(cached_bytes("checked", _code() + content, data_ends)).items():
            data.check(location, end)


def serialize(text: str) -> bytes:
    """Return the serialized model of a text in ONNX's format, without importing onnx if an earlier process did it."""

    def parse() -> bytes:
        import onnx

        return onnx.parser.parse_model(text).SerializeToString()

    return cached_bytes("graphs", text.encode(), parse)


@cache
def _code() -> bytes:
    """Return the source of the checks, which belongs to the key of a cached verdict."""
    return Path(__file__).read_bytes()


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Raise InputError for what reading and checking `path` raises."""
    try:
        if path.stat().st_size > FILE_LIMIT:
            raise _Invalid("is larger than 2 GiB, which no ONNX model can be: keep its weights in a file beside it")
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: export the pipeline again.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} holds a name that is no text: export it again.") from error
    except _Invalid as error:
        raise InputError(f"{path} {error}.") from error


def _parse(content: bytes, data: _DataFiles) -> onnx.ModelProto:
    """Return the validated model of a file's bytes. Raises _Invalid."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:  # with an application's older protobuf
        raise InputError(f"onnx cannot be used here, see `sd-ort doctor`: {first_line(error)}.") from error
    try:
        model = onnx.ModelProto.FromString(content)
    except DecodeError as error:
        raise _Invalid("is truncated or not an ONNX model: export it again") from error
    if not model.graph.node:
        raise _Invalid("is truncated or empty: export it again")
    _check_texts(model)
    _check_model(model)
    for tensor in _tensors(model):
        _check_tensor(tensor, data)
    return model


def _content(path: Path) -> bytes:
    """Return the bytes of a file, of a large one with its weights as external data in the file itself."""
    if path.stat().st_size > EMBEDDED_LIMIT and path.is_file():
        with contextlib.suppress(ValueError):  # the parser says what is wrong
            return embedded_weights.skeleton(path)
    return read_regular(path)


def _check_texts(message: Any) -> None:
    """Check that protobuf read text in all fields of a message: it returns a string that is not UTF-8 as bytes."""
    if message.DESCRIPTOR.name == "TensorProto":  # without its values, which would be copied
        values = [message.name, message.doc_string, message.external_data, message.metadata_props]
    else:
        fields = message.ListFields()
        values = [value for field, value in fields if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE)]
    for value in values:
        for each in [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value:
            if hasattr(each, "ListFields"):
                _check_texts(each)
            elif not isinstance(each, str):
                raise _Invalid("holds a name that is no text: export it again")


# --- Tensors --------------------------------------------------------------------------------------------------------


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model: weights, constants and attributes, including those in subgraphs and functions."""
    training = [graph for info in model.training_info for graph in (info.initialization, info.algorithm)]
    for graph in (model.graph, *training):
        yield from _tensors_of_graph(graph)
    for function in model.functions:
        for attributes in (function.attribute_proto, *(node.attribute for node in function.node)):
            yield from _tensors_of_attributes(attributes)


def _tensors_of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of_attributes(node.attribute)


def _tensors_of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []:
            yield from (sparse.values, sparse.indices)
        for sparse in attribute.sparse_tensors:
            yield from (sparse.values, sparse.indices)
    for graph in subgraphs(attributes):
        yield from _tensors_of_graph(graph)


def _check_tensor(tensor: onnx.TensorProto, data_files: _DataFiles) -> None:
    """Raise _Invalid unless the data have the size of the tensor's shape; make an external location absolute."""
    import onnx

    subject = f"has a tensor {tensor.name!r}"
    bits = _bits(tensor.data_type)
    if bits is None:
        raise _Invalid(f"{subject} of a type that is no number ({_type_name(tensor.data_type)}): export it again")
    if any(size < 0 for size in tensor.dims):
        raise _Invalid(f"{subject} of a negative size: export it again")
    count, size = math.prod(tensor.dims), _size(tensor)
    if size > TENSOR_LIMIT:
        raise _Invalid(f"{subject} of {size:.1e} bytes, more than any model has: do not trust it")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, size, data_files)
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise _Invalid(
                f"{subject} with {len(tensor.raw_data)} bytes where its shape asks for {size}: export it again"
            )
    else:
        stored = sum(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
        components = 2 if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128) else 1
        expected = size if bits < 8 else count * components
        if stored != expected:
            raise _Invalid(f"{subject} with {stored} numbers where its shape asks for {expected}: export it again")


_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def _check_external(tensor: onnx.TensorProto, size: int, data_files: _DataFiles) -> None:
    entries = {entry.key: entry for entry in tensor.external_data}
    offset, length = (_number(entries[key].value) if key in entries else None for key in ("offset", "length"))
    if length is not None and length != size:
        raise _Invalid(f"says {length} bytes of {tensor.name!r}, whose shape asks for {size}: export it again")
    path = data_files.check(entries["location"].value if "location" in entries else "", (offset or 0) + size)
    entries["location"].value = str(path)


class _DataFiles:
    """The external data files of a model in `folder`. `ends`: bytes that each must have, by its location."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: dict[str, int] = {}
        self._paths: dict[str, tuple[Path, int]] = {}  # thousands of tensors lie in one file

    def check(self, location: str, end: int) -> Path:
        """Return the resolved path of a data file. Raises _Invalid for one that is missing or shorter than `end`."""
        if location not in self._paths:
            self._paths[location] = self._find(location)
        path, size = self._paths[location]
        if end > size:
            raise _Invalid(f"needs more of {path} than there is, it is truncated: copy or export it again")
        self.ends[location] = max(end, self.ends.get(location, 0))
        return path

    def _find(self, location: str) -> tuple[Path, int]:
        """Return the resolved path and the size in bytes."""
        data = inside(self.folder / location, self.folder) if location else None
        if data is None or not data.is_file():
            raise _Invalid(f"keeps weights where no file is, {location} is missing: copy both or export again")
        if not os.access(data, os.R_OK):
            raise _Invalid(f"keeps weights in {data}, which may not be read: change its permissions")
        return data, data.stat().st_size


def embed(tensor: onnx.TensorProto) -> None:
    """Store a tensor's external data in the tensor itself; the model must come from `read`."""
    import onnx

    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with open(entries["location"], "rb") as file:
        file.seek(int(entries.get("offset", 0)))
        tensor.raw_data = file.read(_size(tensor))
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def _size(tensor: onnx.TensorProto) -> int:
    """Return the size of a tensor's values in bytes."""
    return -(-math.prod(tensor.dims) * (_bits(tensor.data_type) or 0) // 8)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _Invalid(f"says where its weights lie with {text[:20]!r}, which is no number: export it again")
    return int(text)


@cache
def _bits(data_type: int) -> int | None:
    """Return the bits of an element, or None for a dtype that is not numeric."""
    name = _type_name(data_type)  # most names contain the number, such as FLOAT8E4M3FN and INT4
    digits = re.match(r"[A-Z]+(\d+)", name)
    return int(digits[1]) if digits else {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}.get(name)


def _type_name(data_type: int) -> str:
    import onnx

    return next((name for name, number in onnx.TensorProto.DataType.items() if number == data_type), str(data_type))


# --- Graphs ---------------------------------------------------------------------------------------------------------

Key = tuple[str, str, str]  # domain, name and overload of a function
Scopes = tuple[set[str], ...]  # names of values, by graph, outermost graph first


def _check_model(model: onnx.ModelProto) -> None:
    opsets = _opsets(model.opset_import)
    if "" not in opsets and not any(node.domain in ("", "ai.onnx") for node in model.graph.node):
        opsets[""] = model.opset_import.add(domain="", version=UNUSED_OPSET).version
    if "" not in opsets:
        raise _Invalid("names no ONNX opset: export it again")
    _check_opset(opsets[""])
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise _Invalid(f"defines the function {function.name!r} twice: export it again")
        functions[key] = function
    if not model.graph.output:
        raise _Invalid("has no outputs: export it again")
    _make_weights_constant(model)
    for value in (*model.graph.input, *model.graph.output):
        _check_value(value)
    _check_graph(model.graph, (), _Context(opsets, functions))
    for function in functions.values():
        _check_function(function, functions)
    _check_work(model, functions)


def _make_weights_constant(model: onnx.ModelProto) -> None:
    """Remove inputs that are initializers too: a weight that a caller may replace can be neither folded nor fused."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if (count := len(model.graph.input) - len(inputs)) and model.ir_version > WEIGHTS_ARE_INPUTS:
        model.metadata_props.add(key=CONSTANT_INPUTS, value=str(count))
    if count:
        del model.graph.input[:]
        model.graph.input.extend(inputs)


def _check_opset(version: int) -> None:
    import onnx

    if not 1 <= version <= onnx.defs.onnx_opset_version():
        raise _Invalid(f"is of ONNX opset {version}; known are 1 to {onnx.defs.onnx_opset_version()}")


class _Context:
    """Opsets and functions that nodes may call; inside a function also the attributes that they may refer to."""

    def __init__(
        self, opsets: dict[str, int], functions: dict[Key, onnx.FunctionProto], attributes: Iterable[str] = ()
    ) -> None:
        self.opsets, self.functions, self.attributes = opsets, functions, frozenset(attributes)


def _opsets(imports: Any) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in imports}


def _check_value(value: onnx.ValueInfoProto) -> None:
    if not value.type.HasField("tensor_type") or _bits(value.type.tensor_type.elem_type) is None:
        raise _Invalid(
            f"has an input or output {value.name!r} that is no tensor of numbers, which sd-ort does not optimize"
        )
    for size in value.type.tensor_type.shape.dim:
        if size.dim_value == -1:  # Paddle writes -1 for an unknown size, and ONNX Runtime reads it so
            size.ClearField("dim_value")
    if any(size.dim_value < 0 for size in value.type.tensor_type.shape.dim):
        raise _Invalid(f"has an input or output {value.name!r} of a negative size: export it again")
    if any(size.dim_value > AXIS_LIMIT for size in value.type.tensor_type.shape.dim):
        raise _Invalid(f"has an input or output {value.name!r} of an absurd size: export it again")


def _check_graph(graph: onnx.GraphProto, outer: Scopes, context: _Context) -> None:
    """Check that every value is defined once, before its consumers. `outer`: values of the enclosing graphs."""
    inputs = [value.name for value in graph.input]
    weights = [tensor.name for tensor in graph.initializer] + [t.values.name for t in graph.sparse_initializer]
    for names in (inputs, weights):
        if len(set(names)) < len(names):
            raise _Invalid("has two inputs, or two weights, of one name: export it again")
    scopes = _check_nodes(graph.node, {*inputs, *weights}, outer, context)
    _check_divisions(graph)
    if undefined := [value.name for value in graph.output if not _is_defined(value.name, scopes)]:
        raise _Invalid(f"has an output {undefined[0]!r} that nothing makes: export it again")


def _check_divisions(graph: onnx.GraphProto) -> None:
    """Reject integer divisions by 0, and of the least integer by -1, which end the process: of constants alone."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
        if node.op_type in ("Div", "Mod") and len(node.input) == 2 and node.input[1] in constants:
            divisor = _integers(constants[node.input[1]])
            dividend = _integers(constants[node.input[0]]) if node.input[0] in constants else set()
            if 0 in divisor or (-1 in divisor and dividend & {-(1 << 31), -(1 << 63)}):
                raise _Invalid(f"has a {node.op_type} of integers without a result: do not trust it")


def _integers(tensor: onnx.TensorProto) -> set[int]:
    """Return the values of an integer tensor that is no external data; empty for others."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_type not in (TensorProto.INT32, TensorProto.INT64) or tensor.data_location == TensorProto.EXTERNAL:
        return set()
    try:
        return set(numpy_helper.to_array(tensor).reshape(-1)[:ARITY_LIMIT].tolist())
    except ValueError:  # `_check_tensor` says why
        return set()


def _check_nodes(nodes: Iterable[onnx.NodeProto], defined: set[str], outer: Scopes, context: _Context) -> Scopes:
    """Check nodes, add their outputs to `defined`, and return all scopes. Raises _Invalid for an invalid node."""
    scopes = (*outer, defined)
    for node in nodes:
        if max(len(node.input), len(node.output)) > ARITY_LIMIT:
            raise _Invalid(f"has a {node.op_type} with more than {ARITY_LIMIT} inputs or outputs: do not trust it")
        for name in filter(None, node.input):
            if not _is_defined(name, scopes):
                raise _Invalid(f"has a {node.op_type} that reads {name!r}, which nothing before it makes: export again")
        _check_operator(node, context)
        for graph in subgraphs(node.attribute):
            _check_graph(graph, scopes, context)
        for name in filter(None, node.output):
            if _is_defined(name, scopes):
                raise _Invalid(f"makes the value {name!r} twice: export it again")
            defined.add(name)
    return scopes


def _is_defined(name: str, scopes: Scopes) -> bool:
    return any(name in scope for scope in scopes)


def subgraphs(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.GraphProto]:
    for attribute in attributes:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _check_function(function: onnx.FunctionProto, functions: dict[Key, onnx.FunctionProto]) -> None:
    attributes = [*function.attribute, *(attribute.name for attribute in function.attribute_proto)]
    opsets = _opsets(function.opset_import)
    _check_opset(opsets.get("", 1))
    context = _Context(opsets, functions, attributes)
    scopes = _check_nodes(function.node, set(function.input), (), context)
    if undefined := [name for name in function.output if not _is_defined(name, scopes)]:
        raise _Invalid(f"has a function {function.name!r} whose output {undefined[0]!r} nothing makes: export it again")


def _check_operator(node: onnx.NodeProto, context: _Context) -> None:
    """Check that ONNX has the operator, with these attributes and this number of inputs."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if any(a.ref_attr_name and a.ref_attr_name not in context.attributes for a in node.attribute):
        raise _Invalid(f"has a {node.op_type} with an attribute of a function that it is not in: export it again")
    if (node.domain, node.op_type, node.overload) in context.functions:
        return
    if domain not in context.opsets:
        raise _Invalid(f"calls {node.op_type!r} of the domain {domain!r}, which it does not import: export it again")
    if domain:
        return  # custom operators: ONNX Runtime rejects unknown ones
    schema = _schema(node.op_type, context.opsets[""])
    if schema is None:
        raise _Invalid(f"calls {node.op_type!r}, which ONNX opset {context.opsets['']} does not have: export it again")
    types, required, minimum, maximum = schema
    if not minimum <= len(node.input) <= maximum:
        raise _Invalid(f"has a {node.op_type} with {len(node.input)} inputs: export it again")
    for attribute in node.attribute:
        if types.get(attribute.name) != attribute.type:
            raise _Invalid(f"has a {node.op_type} whose attribute {attribute.name!r} is wrong: export it again")
    if missing := required - {attribute.name for attribute in node.attribute}:
        raise _Invalid(f"has a {node.op_type} without its attribute {min(missing)!r}: export it again")


@cache
def _schema(op: str, opset: int) -> tuple[dict[str, int], set[str], int, int] | None:
    """Return (attribute types, required attributes, minimum and maximum inputs) of an operator, or None."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None
    attribute_types: dict[str, Any] = {name: attribute.type for name, attribute in schema.attributes.items()}
    types = {name: int(attribute_type) for name, attribute_type in attribute_types.items()}
    required = {name for name, attribute in schema.attributes.items() if attribute.required}
    return types, required, schema.min_input, schema.max_input


def _check_work(model: onnx.ModelProto, functions: dict[Key, onnx.FunctionProto]) -> None:
    """Check that functions are not recursive, and that inlining them gives at most NODE_LIMIT nodes."""
    calls = {key: list(_calls(function.node)) for key, function in functions.items()}
    sizes: dict[Key, int] = {}
    try:
        for key in TopologicalSorter({key: set(calls[key]) & functions.keys() for key in calls}).static_order():
            sizes[key] = sum(1 + sizes.get(call, 0) for call in calls[key])
    except CycleError as error:
        raise _Invalid(f"has a function {error.args[1][0][1]!r} that calls itself: do not trust it") from error
    total = sum(1 + sizes.get(call, 0) for call in _calls(model.graph.node))
    if max([total, *sizes.values()]) > NODE_LIMIT:
        raise _Invalid(f"holds more than {NODE_LIMIT:,} nodes: no component of Stable Diffusion does")


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[Key]:
    """Yield the operator or function of each node, including those in subgraphs."""
    return ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes and those in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node.attribute):
            yield from all_nodes(graph.node)
