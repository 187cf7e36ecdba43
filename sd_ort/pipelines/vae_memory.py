"""Estimate of a VAE call's device memory, and the layout that fits: whole batch, single images, or tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MEGABYTE = 1 << 20
# Beside the two largest activations a decode took 11 to 13 MiB at 256x256 to 1024x1024 (results/provider_memory.md).
OTHER_ACTIVATIONS = 16 * MEGABYTE
LEAST_TILE = 16  # latents a side; smaller tiles change the image too much


@dataclass(frozen=True)
class Layout:
    """Split of a VAE call: `slices`, one image of a batch after the other; `tile`, pixels of a tile's side or None."""

    slices: bool = False
    tile: int | None = None

    def __str__(self) -> str:
        images = "one image at a time" if self.slices else ""
        tiles = f"in tiles of {self.tile} pixels" if self.tile else ""
        return ", ".join(filter(None, (images, tiles)))


@dataclass(frozen=True)
class VaeMemory:
    """Estimate of a VAE half's activations.

    channels: output channels of the blocks, from the image's side to the latents'. itemsize: bytes of an activation's
    element. decodes: whether the half is the decoder.
    """

    channels: Sequence[int]
    itemsize: int
    decodes: bool = True

    def bytes(self, size: tuple[int, int, int], layout: Layout) -> int:
        """Return the bytes that a call takes beside the weights. `size`: images, their height and width in pixels.

        At most two of the largest activations are live at once: input and output of one convolution. A decoder's
        largest has the channels of the block before, whose last convolution follows its upsampling.
        """
        batch, *sides = size
        height, width = (min(side, layout.tile or side) for side in sides)
        last = len(self.channels) - 1
        channels = [self.channels[min(level + self.decodes, last)] for level in range(last + 1)]
        largest = max(count * (height * width >> 2 * level) for level, count in enumerate(channels))
        return 2 * (1 if layout.slices else batch) * largest * self.itemsize + OTHER_ACTIVATIONS

    def layout(self, size: tuple[int, int, int], options: Layout, available: float, tile: int, least: int) -> Layout:
        """Return `options` if a call takes at most `available` bytes, else the layout with the fewest parts that does.

        If none does, it is the one with the smallest parts.

        `tile`: pixels a side of the VAE's own tile, which is halved down to `least`.
        """
        batch, *sides = size
        layouts = [options]
        slices = options.slices or batch > 1
        if slices:
            layouts.append(replace(options, slices=True))
        while tile >= least:
            if tile < max(sides) and tile < (options.tile or max(sides)):
                layouts.append(Layout(slices, tile))
            tile //= 2
        return next((each for each in layouts if self.bytes(size, each) <= available), layouts[-1])
