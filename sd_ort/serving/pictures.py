"""One picture to draw, which pictures may share a batch, and what a replica says of its model."""

from __future__ import annotations

from dataclasses import dataclass

from sd_ort.core.errors import SdOrtError


@dataclass(frozen=True)
class Settings:
    """What all pictures of a batch share: `width` and `height` in pixels, None for the model's own, denoising steps,
    guidance scale."""

    width: int | None
    height: int | None
    steps: int
    guidance: float


@dataclass(frozen=True)
class Picture:
    """One picture: of its own seed, so that it is the same whatever is drawn beside it."""

    prompt: str
    negative: str
    seed: int
    settings: Settings

    def text(self) -> dict[str, str]:
        """What its PNG file says of how it was drawn."""
        settings = self.settings
        size = {name: str(side) for name, side in (("width", settings.width), ("height", settings.height)) if side}
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative,
            "steps": str(settings.steps),
            "guidance": str(settings.guidance),
            "seed": str(self.seed),
            **size,
        }


@dataclass(frozen=True)
class Model:
    """What can be asked of a model: `side` in pixels of its own pictures, of which sides are multiples, guidance scale
    it draws well with, and the steps it was trained with; `pid` of the process that loaded it."""

    side: int
    multiple: int
    guidance: float
    trained_steps: int
    pid: int = 0


class ReplicaDied(Exception):
    """The process of a replica is gone, or does not answer: what it was drawing can be drawn by another."""


class NotDrawn(SdOrtError):
    """A picture that no replica could draw, and why."""
