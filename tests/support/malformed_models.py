"""Malformed ONNX files: each case damages the U-Net of tiny_pipeline; its model.onnx.data stays intact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Change = Callable[[onnx.ModelProto], object]


def damage(component: Path, change: Change) -> None:
    """Change the model of a component; its external data are not read."""
    path = component / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())


def node(proto: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.op_type == op)


def weight(proto: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in proto.graph.initializer if tensor.name == name)


def external(name: str, location: str, **entries: str) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def set_entry(key: str, value: str) -> Change:
    """Set an external data entry of an initializer."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = weight(proto, "kernel")
        entries = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in entries.items():
            tensor.external_data.add(key=name, value=text)

    return change


def divide_at_run_time(op: str, dividend: int, divisor: int) -> Change:
    """Add the largest result of an integer division, whose operands are no constants, to the output."""

    def change(proto: onnx.ModelProto) -> None:
        (output,) = proto.graph.output
        last = next(node for node in proto.graph.node if output.name in node.output)
        last.output[0] = "before"
        for name, value in (("dividend", dividend), ("divisor", divisor)):
            proto.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
        for op_type, inputs, result in (
            ("Shape", ["sample"], "sizes"), ("Sub", ["sizes", "sizes"], "zeros"), ("Add", ["zeros", "dividend"], "a"),
            ("Add", ["zeros", "divisor"], "b"), (op, ["a", "b"], "results"), ("ReduceMax", ["results"], "largest"),
        ):  # fmt: skip
            proto.graph.node.append(helper.make_node(op_type, inputs, [result]))
        proto.graph.node.append(helper.make_node("Cast", ["largest"], ["term"], to=TensorProto.FLOAT))
        proto.graph.node.append(helper.make_node("Add", ["before", "term"], [output.name]))

    return change


def set_dims(*dims: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        weight(proto, "kernel").dims[:] = dims

    return change


def set_opset(*versions: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        del proto.opset_import[:]
        proto.opset_import.extend(helper.make_opsetid("", version) for version in versions)

    return change


def replace(op: str, **fields: object) -> Change:
    """Replace fields of the first node of an operator; `attribute` takes a dict."""

    def change(proto: onnx.ModelProto) -> None:
        target = node(proto, op)
        for name, value in fields.items():
            if name == "attribute":
                del target.attribute[:]
                target.attribute.extend(helper.make_attribute(*item) for item in value.items())  # type: ignore
            elif isinstance(value, list):
                getattr(target, name)[:] = value
            else:
                setattr(target, name, value)

    return change


def add(op: str, inputs: list[str], outputs: list[str] | None = None, /, **attributes: Any) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node.append(helper.make_node(op, inputs, outputs or ["more"], **attributes))

    return change


def function_outside(proto: onnx.ModelProto) -> None:
    body = [helper.make_node("Constant", [], ["y"], value=external("stolen", "/etc/hostname"))]
    call_function(proto, body)


def subgraph_outside(proto: onnx.ModelProto) -> None:
    tensor = external("stolen", "../../secret")
    branch = helper.make_graph([helper.make_node("Identity", ["stolen"], ["b"])], "b", [], [value("b", [1])], [tensor])
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    add("If", ["yes"], ["more"], then_branch=branch, else_branch=branch)(proto)


def sparse_outside(proto: onnx.ModelProto) -> None:
    sparse = onnx.SparseTensorProto(dims=[4])
    sparse.values.CopyFrom(external("stolen", "../../secret"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0]), "indices"))
    proto.graph.sparse_initializer.append(sparse)


def value(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def call_function(proto: onnx.ModelProto, body: list[onnx.NodeProto], name: str = "f") -> None:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    proto.functions.append(helper.make_function("own", name, ["x"], ["y"], body, imports))
    if name == "f":
        proto.opset_import.append(helper.make_opsetid("own", 1))
        proto.graph.node.append(helper.make_node("f", ["moved"], ["called"], domain="own"))


def doubling(proto: onnx.ModelProto) -> None:
    for index in range(26):
        called = f"f{index}" if index < 25 else ""
        body = [
            helper.make_node(called or "Identity", [a], [b], domain="own" if called else "")
            for a, b in (("x", "a"), ("a", "y"))
        ]
        call_function(proto, body, "f" if index == 0 else f"f{index - 1}")


def mutually_recursive(proto: onnx.ModelProto) -> None:
    call_function(proto, [helper.make_node("g", ["x"], ["y"], domain="own")])
    call_function(proto, [helper.make_node("f", ["x"], ["y"], domain="own")], "g")


def function_twice(proto: onnx.ModelProto) -> None:
    body = [helper.make_node("Identity", ["x"], ["y"])]
    call_function(proto, body)
    call_function(proto, body, "g")
    proto.functions[-1].name = "f"


def cycle(proto: onnx.ModelProto) -> None:
    node(proto, "Conv").input[0] = "moved"


def many_nodes(proto: onnx.ModelProto) -> None:
    one = helper.make_node("Identity", ["moved"], ["x"])
    for index in range(100_001):
        one.output[0] = f"x{index}"
        proto.graph.node.append(one)


def elem_type(number: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.elem_type = number

    return change


def input_size(number: int) -> Change:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = number

    return change


def make_sequence(proto: onnx.ModelProto) -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    proto.graph.input[0].type.CopyFrom(kind)


def inline_weight(**fields: Any) -> Change:
    """Put another small weight in the place of `small`."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = weight(proto, "small")
        tensor.CopyFrom(TensorProto(name="small", **fields))

    return change


def wrong_field(proto: onnx.ModelProto) -> None:
    """An attribute that says it is a number and holds a text."""
    attribute = node(proto, "Cast").attribute[0]
    attribute.type, attribute.s = onnx.AttributeProto.STRING, b"float"


# Name -> change. Whatever reads the UNet must refuse these.
REFUSED: dict[str, Change] = {
    "cycle": cycle,
    "output twice": replace("Add", output=["features"]),
    "weight twice": lambda p: p.graph.initializer.append(weight(p, "small")),
    "input twice": lambda p: p.graph.input.append(p.graph.input[0]),
    "missing input": replace("Add", input=["features", "nobody"]),
    "reads itself": replace("Add", input=["sum", "told"]),
    "no outputs": lambda p: p.graph.ClearField("output"),
    "no nodes": lambda p: p.graph.ClearField("node"),
    "no graph": lambda p: p.ClearField("graph"),
    "output nobody makes": lambda p: setattr(p.graph.output[0], "name", "nobody"),
    "opset 99": set_opset(99),
    "opset 0": set_opset(0),
    "opset -1": set_opset(-1),
    "opset none": set_opset(),
    "unknown operator": replace("Sigmoid", op_type="NoSuch"),
    "no operator": replace("Sigmoid", op_type=""),
    "domain not imported": replace("Sigmoid", domain="nowhere"),
    "later operator": lambda p: (set_opset(17)(p), replace("Sigmoid", op_type="Gelu")(p)),
    "too few inputs": replace("Add", input=["features"]),
    "too many inputs": replace("Add", input=["features"] * 3),
    "a million inputs": add("Sum", ["moved"] * 1_000_000),
    "100,001 nodes": many_nodes,
    "attribute of another type": replace("Conv", attribute={"pads": [1.0, 1.0, 1.0, 1.0]}),
    "unknown attribute": replace("Sigmoid", attribute={"slope": 3}),
    "attribute of no function": lambda p: setattr(node(p, "Cast").attribute[0], "ref_attr_name", "x"),
    "missing attribute": replace("Cast", attribute={}),
    "attribute with two types": wrong_field,
    "negative size": set_dims(4, -4, 3, 3),
    "size overflow": set_dims(1 << 40, 1 << 40),
    "size overflow to 0": set_dims(1 << 32, 1 << 32),
    "absurd size": set_dims(1 << 45),
    "size above the data": set_dims(4, 4, 300, 300),
    "negative offset": set_entry("offset", "-4"),
    "offset of text": set_entry("offset", "abc"),
    "offset empty": set_entry("offset", ""),
    "offset in other digits": set_entry("offset", "٣"),
    "huge offset": set_entry("offset", "9" * 18),
    "absurd offset": set_entry("offset", "9" * 4000),
    "negative length": set_entry("length", "-1"),
    "short length": set_entry("length", "4"),
    "long length": set_entry("length", str(1 << 40)),
    "length of text": set_entry("length", "all"),
    "no location": set_entry("location", ""),
    "a folder": set_entry("location", "."),
    "outside": set_entry("location", "../../secret"),
    "outside, absolute": set_entry("location", "/etc/hostname"),
    "outside through a folder": set_entry("location", "x/../../../secret"),
    "a device": set_entry("location", "/dev/zero"),
    "zero byte": set_entry("location", "model\0.data"),
    "long location": set_entry("location", "x" * 5000),
    "missing data": set_entry("location", "nowhere.data"),
    "constant outside": add("Constant", [], ["stolen"], value=external("stolen", "../../secret")),
    "function outside": function_outside,
    "subgraph outside": subgraph_outside,
    "sparse outside": sparse_outside,
    "training outside": lambda p: p.training_info.add().algorithm.initializer.append(
        external("stolen", "../../secret")
    ),
    "26 functions that double": doubling,
    "recursive function": lambda p: call_function(p, [helper.make_node("f", ["x"], ["y"], domain="own")]),
    "mutually recursive functions": mutually_recursive,
    "function without its result": lambda p: call_function(p, [helper.make_node("Identity", ["x"], ["z"])]),
    "function twice": function_twice,
    "string weight": inline_weight(data_type=TensorProto.STRING, dims=[1], string_data=[b"x"]),
    "undefined weight": inline_weight(data_type=0, dims=[1]),
    "unknown type": inline_weight(data_type=999, dims=[1], raw_data=b"1234"),
    "short raw data": inline_weight(data_type=1, dims=[3], raw_data=b"1234"),
    "long raw data": inline_weight(data_type=1, dims=[1], raw_data=b"12345678"),
    "short float data": inline_weight(data_type=1, dims=[3], float_data=[1.0]),
    "no data": inline_weight(data_type=1, dims=[3]),
    "input of no type": elem_type(0),
    "input of texts": elem_type(TensorProto.STRING),
    "input of unknown type": elem_type(999),
    "input of a negative size": input_size(-3),
    "input of an absurd size": input_size((1 << 63) - 1),
    "input a sequence": make_sequence,
    "output without a type": lambda p: p.graph.output[0].ClearField("type"),
}

# What only ONNX Runtime can judge: `optimize` must write nothing that it refuses, and whoever runs it must say so.
WRONG: dict[str, Change] = {
    "unknown domain": lambda p: (
        p.opset_import.append(helper.make_opsetid("nowhere", 1)), replace("Sigmoid", domain="nowhere")(p)
    ),
    "unknown contrib operator": lambda p: (
        p.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
        replace("Sigmoid", domain="com.microsoft", op_type="NoSuch")(p),
    ),
    "types that differ": lambda p: elem_type(TensorProto.INT64)(p),
    "permutation out of range": lambda p: replace("Sigmoid", op_type="Transpose", attribute={"perm": [9, 9]})(p),
    "permutation twice": lambda p: replace("Sigmoid", op_type="Transpose", attribute={"perm": [0, 0, 1, 2]})(p),
    "axis out of range": lambda p: replace("Sigmoid", op_type="Softmax", attribute={"axis": 100})(p),
    "group 0": lambda p: replace("Conv", attribute={"group": 0, "pads": [1] * 4})(p),
    "negative pads": lambda p: replace("Conv", attribute={"pads": [-9] * 4})(p),
    "short pads": lambda p: replace("Conv", attribute={"pads": [1]})(p),
    "kernel of another shape": lambda p: replace("Conv", attribute={"kernel_shape": [7]})(p),
    "cast to nothing": lambda p: replace("Cast", attribute={"to": 0})(p),
    "cast to 999": lambda p: replace("Cast", attribute={"to": 999})(p),
    "sizes that do not fit": set_dims(16, 9),
}  # fmt: skip
# Those that it takes until they run: its sessions open.
ONLY_RUN = ("group 0", "sizes that do not fit")
