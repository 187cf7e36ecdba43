"""One replica: a pipeline in a process of its own, which draws batches as PNG files.

Nothing here knows Ray: it is what each of Ray's actors, the process of a test, and a list of prompts without Ray do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, SdOrtError, explained
from sd_ort.core.folder import MERGED, components
from sd_ort.runtime import visible
from sd_ort.serving.pictures import Model, Picture


def unprepared(pipeline: Any) -> None:
    """Draw with a pipeline as it was loaded."""


@dataclass(frozen=True)
class Opening:
    """What a replica loads: a pipeline folder with options of `from_pretrained`, and `prepare`, which may add LoRAs.

    `drawing`: more arguments of each call. `guidance`: the scale that it draws well with.
    `text`: what each PNG file says besides how it was drawn. `devices`: environment variables that show the process
    the one GPU it is to use; they mean something only before ONNX Runtime is imported.
    """

    folder: Path
    loading: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = unprepared
    drawing: Mapping[str, Any] = field(default_factory=dict)
    guidance: float = 7.5
    text: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)


def several(opening: Opening, gpus: int | None, replicas: int | None, threads: int | None) -> list[Opening]:
    """One opening a replica: on a GPU each with `gpus`, else all on the same device, `replicas` of them or one.

    `threads`: CPU threads of each, None for its share of the cores. Raises InputError for a folder that cannot be
    drawn with, or GPUs that are not there; nothing is loaded.
    """
    if MERGED in components(opening.folder):
        raise InputError(f"{opening.folder} is merged, for one image at a time: give the folder it was made from.")
    if gpus and replicas:
        raise InputError("--gpus N is a replica on each of N GPUs, --replicas N so many on one device: give one.")
    devices = visible.one_each(str(opening.loading["provider"]), gpus) if gpus else [{}] * (replicas or 1)
    loading = {**opening.loading, "threads": threads or visible.threads_each(len(devices))}
    return [replace(opening, loading=loading, devices=each) for each in devices]


class Replica:
    """A loaded pipeline. Use it in a process where ONNX Runtime has not been imported yet."""

    def __init__(self, opening: Opening) -> None:
        """Load the model. Raises SdOrtError for one that cannot be used."""
        os.environ.update(opening.devices)
        from sd_ort import StableDiffusionPipeline
        from sd_ort.family.configs import scheduler_config

        self.opening = opening
        self.writers = ThreadPoolExecutor(4)
        self.pipeline: Any = StableDiffusionPipeline.from_pretrained(opening.folder, **opening.loading)
        opening.prepare(self.pipeline)
        self.model = Model(
            side=self.pipeline.default_size,
            multiple=self.pipeline.size_multiple,
            guidance=opening.guidance,
            trained_steps=scheduler_config(opening.folder).get("num_train_timesteps", 1000),
            pid=os.getpid(),
        )

    def draw(self, pictures: Sequence[Picture]) -> list[bytes]:
        """PNG files of pictures with equal settings, drawn in one batch. Raises SdOrtError for what cannot be drawn."""
        from sd_ort.pipeline.png import png_bytes

        settings = pictures[0].settings
        drawn = self.pipeline(
            [picture.prompt for picture in pictures],
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            negative_prompt=[picture.negative for picture in pictures],
            generator=[picture.seed for picture in pictures],
            progress=False,
            **self.opening.drawing,
        ).images
        texts = [{**picture.text(), **self.opening.text} for picture in pictures]
        return list(self.writers.map(png_bytes, drawn, texts))  # compressing takes longer than a step, and no lock


@dataclass(frozen=True)
class Failed:
    """An error of a replica as it travels between processes: one line, and the command's exit code."""

    line: str
    code: int

    def error(self) -> SdOrtError:
        """The error to raise on the other side."""
        error = SdOrtError(self.line)
        error.exit_code = self.code
        return error


class Actor:
    """A `Replica` that another process calls: errors are values, which every process can read."""

    replica: Replica

    def load(self, opening: Opening) -> Model | Failed:
        """Load the model; to be called once, before all else."""
        try:
            self.replica = Replica(opening)
        except Exception as error:
            return Failed(*explained(error))
        return self.replica.model

    def draw(self, pictures: Sequence[Picture]) -> list[bytes] | Failed:
        """See `Replica.draw`."""
        try:
            return self.replica.draw(pictures)
        except Exception as error:
            return Failed(*explained(error))
