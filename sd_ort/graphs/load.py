"""ONNX files as graphs: checked whole (see `core.onnx_file`), their weights left on disk until they are asked for."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from sd_ort.core import onnx_file


def load(path: Path) -> ir.Model:
    """The model at `path`. Raises InputError for one that is broken or reads what lies outside its folder.

    Locations of external data are absolute: files with several hard links, and the Hugging Face cache's links, are
    read like any other, since where they lead is checked before.
    """
    model = ir.from_proto(onnx_file.read(path))
    assert isinstance(model, ir.Model)
    return model
