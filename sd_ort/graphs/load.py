"""Loading of verified ONNX files (see `core.onnx_file`) as onnx_ir models. Weights stay on disk until they are read."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from sd_ort.core import onnx_file
from sd_ort.core.files import parsing


def load(path: Path) -> ir.Model:
    """Load the model at `path`. Raises InputError if it is invalid or refers to data outside of its folder.

    Locations of external data become absolute. Hard links and the symbolic links of the Hugging Face cache are
    accepted, because `onnx_file.read` checks their targets.
    """
    proto = onnx_file.read(path)
    with parsing(path, "an ONNX model"):
        model = ir.from_proto(proto)
    assert isinstance(model, ir.Model)
    return model


def serialize_over_data(model: ir.Model, folder: Path) -> bytes:
    """Serialize a modified model whose external data stays in `folder`; locations become relative to it.

    For the graph override of `runtime.session.create_session`.
    """
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            data = value.const_value
            name = Path(data.location).name
            value.const_value = ir.ExternalTensor(
                name, data.offset, data.length, data.dtype, shape=data.shape, name=str(value.name), base_dir=folder
            )
    return ir.to_proto(model).SerializeToString()
