"""ONNX files by themselves, of models that nobody told us about: optimize, explain and verify from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from scripts.fixtures import other_architectures
from sd_ort.checkpoints.synthetic_inputs import SIZES, random_inputs
from sd_ort.core.errors import InputError

Cli = Callable[..., tuple[int, str, str]]


# Token ids; sigmas, whose logarithm is taken; times and a text's mask.
@pytest.mark.parametrize("name", ["bert-dynamo-20", "unet-ncsn-dynamo-20", "unet-text-mask-torchscript-17"])
def test_a_foreign_file(sd_ort: Cli, tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(other_architectures.load(name), source)
    code, text, err = sd_ort("optimize", source, out, "--target", "portable")
    assert code == 0, err
    assert "MultiHeadAttention" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]
    code, text, err = sd_ort("verify", source, out, "--json")
    assert code == 0, err
    rows = json.loads(text)["rows"]
    assert len(rows) == 2
    assert all(row["relative_error"] < 1e-5 for row in rows)


def toy(path: Path, gain: float = 1.0, *, external: bool = False) -> Path:
    """y = (x W) (x V) / 1000, with x of any width in rows, and W times `gain`."""
    shape = ["rows", 4]
    nodes = [helper.make_node("MatMul", ["x", w], [f"x{w}"]) for w in "WV"]
    nodes += [helper.make_node("Mul", ["xW", "xV"], ["product"]), helper.make_node("Mul", ["product", "small"], ["y"])]
    weights = [numpy_helper.from_array(np.float32(1e-3), "small")]
    weights += [
        numpy_helper.from_array(np.full((4, 4), number, np.float32), name) for name, number in (("W", gain), ("V", 1.5))
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "toy", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location="weights", size_threshold=0)
    return path


def test_float16_is_calibrated_on_the_recorded_runs(sd_ort: Cli, tmp_path: Path) -> None:
    source = toy(tmp_path / "in.onnx")
    np.savez(tmp_path / "small.npz", x=np.full((2, 4), 0.1, np.float32))
    np.savez(tmp_path / "large.npz", **{f"x/{i}": np.full((i + 1, 4), 100.0, np.float32) for i in range(2)})
    code, text, _ = sd_ort("optimize", source, tmp_path / "a.onnx", "--float16", "--target", "portable", "--inputs",
                           tmp_path / "small.npz")  # fmt: skip
    assert code == 0
    assert "in: 0 of 4 values exceed 16376 on 1 recorded inputs" in text
    code, text, _ = sd_ort("optimize", source, tmp_path / "b.onnx", "--float16", "--target", "portable", "--inputs",
                           tmp_path / "large.npz")  # fmt: skip
    assert code == 0
    assert "in: 1 of 4 values exceed 16376 on 2 recorded inputs; they stay in float32" in text
    assert sd_ort("verify", source, tmp_path / "b.onnx", "--inputs", tmp_path / "large.npz")[0] == 0
    assert sd_ort("verify", source, tmp_path / "a.onnx", "--inputs", tmp_path / "large.npz")[0] == 4


def test_weights_stay_where_they_were(sd_ort: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "any"
    folder.mkdir()
    toy(folder / "any.onnx", external=True)
    assert sd_ort("optimize", folder, tmp_path / "out.onnx")[0] == 0  # a folder that holds one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any", "out.onnx", "out.onnx.data"]
    assert sd_ort("verify", folder, tmp_path / "out.onnx")[0] == 0
    code, text, _ = sd_ort("explain", folder)
    assert code == 0
    assert text.startswith("any\n")


@pytest.mark.parametrize(("command", "words"), [
    (["optimize", "nowhere.onnx", "out.onnx"], "nowhere.onnx is missing"),
    (["verify", "in.onnx", "nowhere.onnx"], "nowhere.onnx is missing"),
    (["optimize", "in.onnx", "in.onnx"], "one folder"),
    (["optimize", "in.onnx", "taken.onnx"], "exists"),
    (["optimize", "in.onnx", "out"], "ends in .onnx"),
    (["optimize", "in.onnx", "folder.onnx"], "ends in .onnx"),
    (["optimize", "in.onnx", "out.onnx", "--hoist"], "one ONNX file"),
    (["optimize", "in.onnx", "out.onnx", "--component", "unet"], "one ONNX file"),
    (["optimize", "in.onnx", "out.onnx", "--config", "x"], "go with a checkpoint"),
    (["optimize", "in.onnx", "out.onnx", "--target", "cuda", "--float16", "--inputs", "other.npz"], "no runs of in"),
    (["verify", "in.onnx", "taken.onnx", "--inputs", "other.npz"], "no runs of in"),
    (["verify", "in.onnx", "folder.onnx"], "give two"),
    (["optimize", "broken.onnx", "out.onnx"], "not an ONNX model"),
    (["optimize", "several", "out.onnx"], "name one .onnx file"),
])  # fmt: skip
def test_what_cannot_be_done(sd_ort: Cli, tmp_path: Path, command: list[str], words: str) -> None:
    toy(tmp_path / "in.onnx")
    toy(tmp_path / "taken.onnx")
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "several").mkdir()
    for name in "ab":
        toy(tmp_path / "several" / f"{name}.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"\xff" * 30)
    np.savez(tmp_path / "other.npz", z=np.ones(3))
    before = sorted(path.name for path in tmp_path.iterdir())
    placed = [str(tmp_path / arg) if not arg.startswith("-") and i and arg not in ("unet", "cuda", "x") else arg
              for i, arg in enumerate(command)]  # fmt: skip
    code, _, err = sd_ort(*placed)
    assert code in (2, 5)
    assert words in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_made_up_inputs_respect_what_the_graph_does_with_them() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[n] sigma, int64[n, s] ids, float[n] t, bool[n] flags, float[n, c] features, int64[n, s] text_mask)
        => (float[n] a, float[n, s, 3] b, float[n] d, bool[n] e, float[n, c] f, int64[n, s] h)
    <float[5, 3] table> {
        a = Log (sigma)    b = Gather (table, ids)   u = Mul (t, t)   d = Sin (u)
        e = Not (flags)    f = Sin (features)        h = Neg (text_mask)
    }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((5, 3), np.float32), "table"))
    model = ir.from_proto(proto)
    for size in SIZES:
        made = random_inputs("any", list(model.graph.inputs), {}, size)
        assert (made["sigma"] > 0).all()
        assert set(np.unique(made["ids"])) <= set(range(5))
        assert ((made["t"] >= 1) & (made["t"] < 1000) & (made["t"] % 1 == 0)).all()
        assert made["flags"].dtype == np.bool_
        assert made["features"].min() < 0
        assert set(np.unique(made["text_mask"])) <= {0, 1}
        assert made["text_mask"].any(axis=1).all()
    lost = ir.Value(name="codes", shape=ir.Shape(["n"]), type=ir.TensorType(ir.DataType.INT64))
    with pytest.raises(InputError, match=r"codes \(INT64\): use --inputs"):
        random_inputs("any", [lost], {}, SIZES[0])
