"""The inputs of one call's sampling loop on the device, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sd_ort.core.errors import SdOrtError

if TYPE_CHECKING:
    from sd_ort.checkpoints.linear_schedule import LinearSchedule
    from sd_ort.pipelines.controlnet_inputs import ControlNetInput
    from sd_ort.pipelines.partial_steps import BandSteps, ShallowSteps

Arrays = Mapping[str, np.ndarray]


@dataclass
class InpaintBlend:
    """Blend of the latents with the noised image outside an inpainting mask. All arrays are float32.

    `image` and `noise` (B, C, h, w), with the factors of both before each step and after the last, (T + 1,). `mask`
    (B, 1, h, w) is 1 where an image is generated and 0 elsewhere, nothing between. `masked_image`
    (B, C, h, w): latents of the image without what is under the mask, for callbacks.
    """

    image: np.ndarray
    noise: np.ndarray
    mask: np.ndarray
    image_factors: np.ndarray
    noise_factors: np.ndarray
    masked_image: np.ndarray | None = None

    def after_step(self, latents: np.ndarray, index: int) -> np.ndarray:
        """Return the latents after step `index` with the noised image outside the mask."""
        noised = self.image_factors[index + 1] * self.image + self.noise_factors[index + 1] * self.noise
        return (1 - self.mask) * noised + self.mask * latents


@dataclass
class PromptTokens:
    """The token ids of a call, for text encoders on the device.

    `ids`: token ids by encoder, (texts, S) int64; `outputs`: the output of each encoder that the UNet reads. `row`
    (rows,) int64: the text of each batch row of the UNet; `zeroed` (rows,) bool: the row reads zeros instead.
    `conditioning`: the other conditioning inputs by name, (rows, ...) float32.
    """

    ids: dict[str, np.ndarray]
    outputs: dict[str, str]
    row: np.ndarray
    zeroed: np.ndarray
    conditioning: dict[str, np.ndarray]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the key of the buffers."""
        return tuple((name, self.outputs[name], ids.shape) for name, ids in self.ids.items())


@dataclass
class SamplingJob:
    """The inputs of one call's sampling loop.

    `latents` (B, C, h, w), float32: input of the first step. `conditioning`: the UNet's inputs by name beside sample
    and timestep, 2B rows with `guidance` (negative first), B rows without. `texts`: token ids, from which text encoders
    on the device compute the rest of the conditioning. `noise_samples` (S, B, C, h, w): those of `schedule`. `channels`
    (B, C', h, w): unscaled channels behind those of the latents. `decode`: (factor, mean) of the VAE's latents for an
    image; None for latents. `fits`: whether the decode has memory, asked when the UNet has its own; if not,
    the result is latents. `rescale`: guidance rescale, see `host_loop.guided`. `controls`: ControlNets that read all
    rows. `side`: "negative" or "positive" if guidance is split between two devices and these are the B rows of one of
    them; None for all rows on one device. `unet`: key of the UNet in `Components`. `shallow_steps`: those of its steps
    that read the deep features of the last full one. `band`: the steps that compute one band of the image's rows, None
    for all rows.
    """

    latents: np.ndarray
    conditioning: Arrays
    schedule: LinearSchedule
    guidance: float | None = None
    rescale: float = 0.0
    noise_samples: np.ndarray | None = None
    channels: np.ndarray | None = None
    blend: InpaintBlend | None = None
    decode: tuple[np.ndarray, np.ndarray] | None = None
    fits: Callable[[], bool] = lambda: True
    controls: Sequence[ControlNetInput] = ()
    progress: bool = False
    side: str | None = None
    texts: PromptTokens | None = None
    unet: str = "unet"
    shallow_steps: ShallowSteps | None = None
    band: BandSteps | None = None

    @property
    def rows(self) -> int:
        """Return the number of the UNet's batch rows."""
        return len(self.latents) * (1 if self.guidance is None or self.side else 2)

    def half(self, side: str) -> SamplingJob:
        """Return the job of one side of split guidance."""
        rows = slice(len(self.latents)) if side == "negative" else slice(len(self.latents), None)
        conditioning = {name: value[rows] for name, value in self.conditioning.items()}
        controls = [replace(control, image=control.image[rows]) for control in self.controls]
        return replace(self, conditioning=conditioning, controls=controls, side=side)


class StepStage(Protocol):
    """A stage of a step, such as a component over its buffers."""

    def run(self, wait: bool = True) -> None:
        """Run; without `wait`, only enqueue."""


class NotFiniteError(SdOrtError):
    """An output of a component has NaN or infinite values."""


def check_finite(values: np.ndarray, component: str) -> None:
    """Raise NotFiniteError if an output of a component has NaN or infinite values, which would be a black image."""
    if not np.isfinite(values).all():
        raise NotFiniteError(
            f"the {component} gave numbers that are not finite (NaN or infinite), and no image: optimize it again "
            "without --float16 or with --calibrate, or take lower scales of guidance and LoRAs."
        )
