"""Checks of ONNX files that an earlier process made are not made again; what may have changed since is."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from sd_ort.core import onnx_file
from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import InputError


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with external data, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 64] x) => (float[N, 64] y) { y = MatMul (x, w) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="model.onnx.data", size_threshold=100)
    return path


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*arguments: object) -> None:
        pytest.fail("the model was parsed again")

    monkeypatch.setattr(onnx_file, "_parse", parse)


def test_a_model_is_parsed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx_file.check(model)
    with monkeypatch.context() as patch:
        forbid_parsing(patch)
        onnx_file.check(model)
    (cached,) = (cache_folder() / "checked").iterdir()
    cached.write_bytes(cached.read_bytes()[:-1])  # a damaged file of the cache
    onnx_file.check(model)
    with monkeypatch.context() as patch:  # which was made again
        forbid_parsing(patch)
        onnx_file.check(model)


def test_external_data_are_checked_every_time(model: Path, tmp_path: Path) -> None:
    data = model.with_name("model.onnx.data")
    content = data.read_bytes()
    onnx_file.check(model)
    data.write_bytes(content[:-1])
    with pytest.raises(InputError, match="needs more of"):
        onnx_file.check(model)
    data.unlink()
    with pytest.raises(InputError, match="is missing"):
        onnx_file.check(model)
    (tmp_path / "elsewhere").write_bytes(content)
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        onnx_file.check(model)


def test_an_invalid_model_is_never_cached(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-3])
    for _ in range(2):
        with pytest.raises(InputError, match="truncated"):
            onnx_file.check(model)
    assert not (cache_folder() / "checked").exists()


def test_a_graph_is_serialized_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> any (float[N] x) => (float[N] y) { y = Neg (x) }'
    first = onnx_file.serialize(text)
    assert onnx.ModelProto.FromString(first) == onnx.parser.parse_model(text)
    monkeypatch.setattr(onnx.parser, "parse_model", None)
    assert onnx_file.serialize(text) == first


HOLDERS = ("model", "graph", "node", "input", "function", "weight")


@pytest.mark.parametrize(
    ("holder", "field"), [*product(HOLDERS, ("doc_string", "metadata_props")), ("attribute", "doc_string")]
)
def test_notes_that_are_no_text(tmp_path: Path, holder: str, field: str) -> None:
    """onnx_ir reads them as bytes, which it cannot write."""
    text = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        g (float[N] x) => (float[N] y) <float[1] w = {1}> { z = Elu <alpha = 2.0> (x) s = Add (z, w) y = own.f (s) }
        <domain: "own", opset_import: ["" : 20]> f (x) => (y) { y = Neg (x) }"""
    model = onnx.parser.parse_model(text)
    graph = model.graph
    message = {
        "model": model, "graph": graph, "node": graph.node[0], "input": graph.input[0],
        "function": model.functions[0], "attribute": graph.node[0].attribute[0], "weight": graph.initializer[0],
    }[holder]  # fmt: skip
    if field == "doc_string":
        message.doc_string = "damaged"
    else:
        message.metadata_props.add(key="key", value="damaged")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    onnx_file.read(path)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"damage\xa6"))
    with pytest.raises(InputError, match="holds a name that is no text"):
        onnx_file.read(path)


@pytest.mark.parametrize("version", [-1, 10**6, 1 << 40])
def test_a_function_of_an_unknown_opset(tmp_path: Path, version: int) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]> g (float[N] x) => (float[N] y) { y = own.f (x) }
        <domain: "own", opset_import: ["" : 20]> f (x) => (y) { y = Neg (x) }"""
    model = onnx.parser.parse_model(text)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    onnx_file.read(path)
    model.functions[0].opset_import[0].version = version
    onnx.save(model, path)
    with pytest.raises(InputError, match=f"is of ONNX opset {version}; known are 1 to"):
        onnx_file.read(path)
