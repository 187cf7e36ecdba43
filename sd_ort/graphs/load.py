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


def over_data(model: ir.Model, folder: Path) -> bytes:
    """A changed model as bytes, its weights where they lie in `folder`, which it names relative to that folder (see
    `runtime.session.create_session`, `changed`)."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            kept = value.const_value
            name = Path(kept.location).name
            value.const_value = ir.ExternalTensor(
                name, kept.offset, kept.length, kept.dtype, shape=kept.shape, name=str(value.name), base_dir=folder
            )
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized
