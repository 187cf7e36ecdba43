"""Text encoders in the loop on the device: tokens go there, and what they become stays there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.graphs import sampling_graphs
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.loop import DeviceLoop
    from sd_ort.pipelines.sampling_job import PromptTokens
    from sd_ort.runtime.bound_run import BoundRun

EMBEDDINGS, POOLED = "encoder_hidden_states", "text_embeds"  # inputs of the UNet


@dataclass
class Made:
    """What an encoder gives: the value, its dtype, and the encoder's name."""

    value: Any
    dtype: np.dtype
    encoder: str


class DeviceTextEncoders:
    """The text encoders of a kind of drawing over its buffers. `parts` run once a drawing, before all others."""

    def __init__(self, loop: DeviceLoop, tokens: PromptTokens) -> None:
        self.loop = loop
        self.arrays = self._arrays(tokens)
        self.values = {name: loop.value(array) for name, array in self.arrays.items()}
        self.parts: list[BoundRun] = []
        self.sources: dict[str, list[Made]] = {EMBEDDINGS: [], POOLED: []}
        self.checks: list[tuple[Any, str]] = []
        self.made: dict[tuple[str, np.dtype], Any] = {}
        for encoder, embeddings in tokens.outputs.items():
            bound = loop.bind(loop.models[encoder], {"input_ids": self.values[encoder]})
            self.parts.append(bound)
            types = {output.name: np.dtype(DTYPES[output.type]) for output in bound.session.get_outputs()}
            self.sources[EMBEDDINGS].append(Made(bound.outputs[embeddings], types[embeddings], encoder))
            if POOLED in types:
                self.sources[POOLED] = [Made(bound.outputs[POOLED], types[POOLED], encoder)]

    def __contains__(self, name: str) -> bool:
        return bool(self.sources.get(name))

    def rows(self, name: str, dtype: Any) -> Any:
        """The rows of an input of the UNet, on the device, in `dtype`."""
        key = name, np.dtype(dtype)
        if key not in self.made:
            sources = self.sources[name]
            read = {f"part_{i}": source.value for i, source in enumerate(sources)}
            graph = (key[1], len(sources[0].value.shape()), tuple(source.dtype for source in sources))
            bound = self.loop.graph(sampling_graphs.conditioning_graph, graph, {**read, **self.values})
            self.parts.append(bound)
            self.checks += [(bound.outputs[f"check_{i}"], source.encoder) for i, source in enumerate(sources)]
            self.made[key] = bound.outputs["conditioning"]
        return self.made[key]

    def _arrays(self, tokens: PromptTokens) -> dict[str, np.ndarray]:
        """What the encoders and the graphs behind them read from the host."""
        types = {encoder: self.loop.models[encoder].dtype("input_ids") for encoder in tokens.ids}
        ids = {encoder: np.ascontiguousarray(ids, types[encoder]) for encoder, ids in tokens.ids.items()}
        return {**ids, "row": tokens.row, "zeroed": tokens.zeroed}

    def give(self, tokens: PromptTokens) -> None:
        """Copy to the device what these texts have of their own."""
        arrays = self._arrays(tokens)
        for name, array in arrays.items():
            if not np.array_equal(array, self.arrays[name]):
                write_value(self.values[name], array)
        self.arrays = arrays

    def held(self) -> list[Any]:
        """All values on the device."""
        return [*self.values.values(), *(value for part in self.parts for value in part.outputs.values())]

    def release(self) -> None:
        """Give the captured graphs back."""
        for part in self.parts:
            part.release()

    def check(self) -> None:
        """Raise SdOrtError when what an encoder gave was not finite, once all was waited for."""
        for value, encoder in self.checks:
            check_finite(read_value(value), encoder)
