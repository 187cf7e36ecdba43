"""Result of a pipeline call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class PipelineOutput:
    """`images`: PIL images, or one array/tensor (B, H, W, 3) in 0..1 for "np", (B, C, h, w) latents for "latent".

    `nsfw_content_detected`: a flag an image, None without a safety checker.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Unpacks as diffusers' tuple does: images, flags."""
        return iter((self.images, self.nsfw_content_detected))

    def __getitem__(self, key: int | str) -> Any:
        """`output[0]` and `output["images"]`, as of diffusers' output."""
        return getattr(self, key) if isinstance(key, str) else tuple(self)[key]
