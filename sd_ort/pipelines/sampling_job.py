"""What one call draws, as arrays: all that the loop on the device reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sd_ort.core.errors import SdOrtError

if TYPE_CHECKING:
    from sd_ort.checkpoints.linear_schedule import LinearSchedule
    from sd_ort.pipelines.controlnet_inputs import ControlNetInput

Arrays = Mapping[str, np.ndarray]


@dataclass
class InpaintBlend:
    """What an inpainting mask keeps: `picture` and `noise` (B, C, h, w), and of both the factors before each step and
    after the last, (T + 1,); `mask` (B, 1, h, w) is 1 where to draw and 0 elsewhere, nothing between. `masked_image`
    (B, C, h, w): the latents of the picture without what is under the mask, for callbacks. All float32."""

    picture: np.ndarray
    noise: np.ndarray
    mask: np.ndarray
    picture_factors: np.ndarray
    noise_factors: np.ndarray
    masked_image: np.ndarray | None = None

    def after_step(self, latents: np.ndarray, index: int) -> np.ndarray:
        """`latents` after step `index`, the picture put back outside the mask."""
        back = self.picture_factors[index + 1] * self.picture + self.noise_factors[index + 1] * self.noise
        return (1 - self.mask) * back + self.mask * latents


@dataclass
class PromptTokens:
    """The texts of a call, for text encoders on the device.

    `ids`: what each encoder reads, (texts, S) int64; `outputs`: which of its outputs the UNet reads. `row` (rows,)
    int64: the text of each row of the UNet; `zeroed` (rows,) bool: it is given zeros. `given`: what else the rows
    read, by the name of the UNet's input, (rows, ...) float32.
    """

    ids: dict[str, np.ndarray]
    outputs: dict[str, str]
    row: np.ndarray
    zeroed: np.ndarray
    given: dict[str, np.ndarray]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What its buffers depend on."""
        return tuple((name, self.outputs[name], ids.shape) for name, ids in self.ids.items())


@dataclass
class SamplingJob:
    """What one call draws.

    `latents` (B, C, h, w), float32, as the first step takes them. `conditioning`: the UNet's inputs by name beside
    sample and timestep, of 2B rows with `guidance` (negative first), of B with None. `texts`: in place of those that
    text encoders make. `draws` (S, B, C, h, w): the
    random numbers of `schedule`. `channels` (B, C', h, w): behind the latents' channels, unscaled. `decode`: (factor,
    mean) of the VAE's latents, for pictures; None for latents. `rescale`: see `pipeline.sampling.guided`.
    `controls`: ControlNets that see all rows. `side`: "negative" or "positive" when guidance is split between two
    devices and these are the B rows of one of them; None for all rows on one device.
    """

    latents: np.ndarray
    conditioning: Arrays
    schedule: LinearSchedule
    guidance: float | None = None
    rescale: float = 0.0
    draws: np.ndarray | None = None
    channels: np.ndarray | None = None
    kept: InpaintBlend | None = None
    decode: tuple[np.ndarray, np.ndarray] | None = None
    controls: Sequence[ControlNetInput] = ()
    progress: bool = False
    side: str | None = None
    texts: PromptTokens | None = None

    @property
    def rows(self) -> int:
        """Of the UNet."""
        return len(self.latents) * (1 if self.guidance is None or self.side else 2)

    def half(self, side: str) -> SamplingJob:
        """What one side of a split guidance draws."""
        rows = slice(len(self.latents)) if side == "negative" else slice(len(self.latents), None)
        conditioning = {name: value[rows] for name, value in self.conditioning.items()}
        controls = [replace(control, image=control.image[rows]) for control in self.controls]
        return replace(self, conditioning=conditioning, controls=controls, side=side)


class StepStage(Protocol):
    """What runs in a step, such as a component over its buffers."""

    def run(self, wait: bool = True) -> None:
        """Run, or queue without `wait`."""


def check_finite(numbers: np.ndarray, component: str) -> None:
    """Raise SdOrtError when some of a component's results are NaN or infinite: they would be a black picture."""
    if not np.isfinite(numbers).all():
        raise SdOrtError(
            f"the {component} gave numbers that are not finite (NaN or infinite), and no picture: optimize it again "
            "without --float16 or with --calibrate, or take a lower guidance scale."
        )
