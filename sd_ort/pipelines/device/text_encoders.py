"""Text encoders of the device loop: they read token ids on the device, and their outputs stay there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.pipelines.sampling_job import PromptTokens
    from sd_ort.runtime.bound_run import BoundRun

EMBEDDINGS, POOLED = "encoder_hidden_states", "text_embeds"  # inputs of the U-Net


@dataclass
class EncoderOutput:
    """An output of a text encoder on the device."""

    value: Any
    dtype: np.dtype
    encoder: str


class DeviceTextEncoders:
    """The text encoders over buffers for token ids of one set of shapes. `runs` run once per image, before all others.

    `name in encoders`: whether they compute this input of the U-Net.
    """

    def __init__(self, sessions: DeviceSessions, tokens: PromptTokens) -> None:
        self.sessions = sessions
        self.arrays = self._arrays(tokens)
        self.inputs = {name: sessions.value(array) for name, array in self.arrays.items()}
        self.runs: list[BoundRun] = []
        self.outputs: dict[str, list[EncoderOutput]] = {EMBEDDINGS: [], POOLED: []}
        self.checks: list[tuple[Any, str]] = []
        self.conditioning: dict[tuple[str, np.dtype], Any] = {}
        for encoder, embeddings in tokens.outputs.items():
            run = sessions.bind(sessions.models[encoder], {"input_ids": self.inputs[encoder]})
            self.runs.append(run)
            dtypes = {output.name: np.dtype(DTYPES[output.type]) for output in run.session.get_outputs()}
            self.outputs[EMBEDDINGS].append(EncoderOutput(run.outputs[embeddings], dtypes[embeddings], encoder))
            if POOLED in dtypes:
                self.outputs[POOLED] = [EncoderOutput(run.outputs[POOLED], dtypes[POOLED], encoder)]

    def __contains__(self, name: str) -> bool:
        return bool(self.outputs.get(name))

    def rows(self, name: str, dtype: Any) -> Any:
        """Return the OrtValue of an input of the U-Net in `dtype`: a row of the encoders' outputs per U-Net row."""
        key = name, np.dtype(dtype)
        if key not in self.conditioning:
            outputs = self.outputs[name]
            parts = {f"part_{i}": output.value for i, output in enumerate(outputs)}
            graph_key = (key[1], len(outputs[0].value.shape()), tuple(output.dtype for output in outputs))
            run = self.sessions.graph(sampling_graphs.conditioning_graph, graph_key, {**parts, **self.inputs})
            self.runs.append(run)
            self.checks += [(run.outputs[f"check_{i}"], output.encoder) for i, output in enumerate(outputs)]
            self.conditioning[key] = run.outputs["conditioning"]
        return self.conditioning[key]

    def _arrays(self, tokens: PromptTokens) -> dict[str, np.ndarray]:
        """Return the inputs of the encoders and of the graphs behind them."""
        dtypes = {encoder: self.sessions.models[encoder].dtype("input_ids") for encoder in tokens.ids}
        ids = {encoder: np.ascontiguousarray(ids, dtypes[encoder]) for encoder, ids in tokens.ids.items()}
        return {**ids, "row": tokens.row, "zeroed": tokens.zeroed}

    def write(self, tokens: PromptTokens) -> None:
        """Copy the token ids that differ from the last ones to the device."""
        arrays = self._arrays(tokens)
        for name, array in arrays.items():
            if not np.array_equal(array, self.arrays[name]):
                write_value(self.inputs[name], array)
        self.arrays = arrays

    def values(self) -> list[Any]:
        """Return all OrtValues on the device."""
        return [*self.inputs.values(), *(value for run in self.runs for value in run.outputs.values())]

    def release(self) -> None:
        """Free the GPU graphs."""
        for run in self.runs:
            run.release()

    def check(self) -> None:
        """Raise SdOrtError if an encoder's output was not finite. Call it after a wait for the device."""
        for value, encoder in self.checks:
            check_finite(read_value(value), encoder)
