"""The VAE of a folder: images to latents and back, with optional tiling and slicing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.conditioning import latent_scale
from sd_ort.checkpoints.configs import Config
from sd_ort.checkpoints.signatures import latent_channels, pixels_per_latent
from sd_ort.core.files import without_nulls
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.pipelines import tiling
from sd_ort.pipelines.images import as_array
from sd_ort.pipelines.noise import draw_noise
from sd_ort.pipelines.vae_memory import LEAST_TILE, MEGABYTE, Layout, VaeMemory
from sd_ort.runtime.components import Components

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sd_ort")


class Vae:
    """The VAE's components. Pixels are (B, 3, H, W) float32, -1..1; latents (B, C, h, w) float32.

    `decode` and `encode` are those of diffusers, for the VAE's own latents. `to_pixels` and `to_latents` are for the
    pipelines' latents, which are scaled to unit variance.
    """

    def __init__(
        self, models: Components, config: Mapping[str, Any], *, tiling: bool = False, slicing: bool = False
    ) -> None:
        """`models`: vae_decoder and, to encode, vae_encoder. `tiling`, `slicing`: as in `from_pretrained`."""
        self.models, self.config = models, Config(config)
        self.use_tiling, self.use_slicing = tiling, slicing
        self.scale_factor = pixels_per_latent(config)
        self.latent_channels = latent_channels({"latent_channels": 4, **without_nulls(config)})
        size = config.get("sample_size") or 512  # pixels a side: the images the VAE was trained on
        self.tile = max(size) if isinstance(size, list) else int(size)
        self.largest_calls: dict[
            str, tuple[int, int]
        ] = {}  # by component: identity of its model, bytes of its largest call
        self.announced: set[str] = set()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the decoder's input."""
        import torch

        return getattr(torch, np.dtype(self.models["vae_decoder"].dtype("latent_sample")).name)

    def to_pixels(self, latents: np.ndarray) -> np.ndarray:
        """Return the pixels of a pipeline's latents."""
        mean, factor = latent_scale(self.config)
        return self._decoded(latents * factor + mean)

    def to_latents(self, pixels: np.ndarray, generator: Any, *, sample: bool = True) -> np.ndarray:
        """Return a pipeline's latents, sampled from the VAE's distribution, or its mean without `sample`.

        `generator`: as in `draw_noise`.
        """
        latents = self._encoded(pixels)
        if latents.shape[1] == 2 * self.latent_channels:  # a distribution, where a tiny autoencoder has latents
            latents, log_variance = np.split(latents, 2, axis=1)
        else:
            sample = False
        if sample:
            mean = latents
            std = np.exp(np.float32(0.5) * log_variance.clip(-30, 20))
            if isinstance(generator, list):
                generator = generator[: len(mean)]
            latents = mean + std * draw_noise(mean.shape, generator)
        offset, factor = latent_scale(self.config)
        return (latents - offset) / factor

    def skip_noise(self, count: int, shape: Sequence[int], generator: Any) -> None:
        """Sample the noise that `to_latents` samples for `count` images with latents (B, C, h, w) of `shape`."""
        if self.config.get("_class_name") != "AutoencoderTiny":
            draw_noise((count, *shape[1:]), generator[:count] if isinstance(generator, list) else generator)

    def decode(self, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        """Return the pixels of the VAE's own latents as `.sample` or, without `return_dict`, in a tuple."""
        import torch

        sample = torch.from_numpy(self._decoded(as_array(z)))
        return SimpleNamespace(sample=sample) if return_dict else (sample,)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """Return the VAE's own latents of pixels as `.latent_dist`, or as `.latents` of a tiny autoencoder."""
        import torch

        latents = torch.from_numpy(self._encoded(as_array(x)))
        if latents.shape[1] == self.latent_channels:
            return SimpleNamespace(latents=latents) if return_dict else (latents,)
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        distribution = DiagonalGaussianDistribution(latents)
        return SimpleNamespace(latent_dist=distribution) if return_dict else (distribution,)

    def enable_tiling(self, use_tiling: bool = True) -> None:
        """Run images larger than those of the training in overlapping tiles."""
        self.use_tiling = use_tiling

    def disable_tiling(self) -> None:
        self.use_tiling = False

    def enable_slicing(self) -> None:
        """Run one image of a batch after the other."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        self.use_slicing = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a decode of latents (B, C, h, w) at once fits in the device memory that is free now."""
        return self._layout("vae_decoder", *self._image_sizes(shape)) == Layout()

    def _decoded(self, latents: np.ndarray) -> np.ndarray:
        def run(latents: np.ndarray) -> np.ndarray:
            return self.models["vae_decoder"](latent_sample=latents)["sample"]

        layout = self._layout("vae_decoder", *self._image_sizes(latents.shape))
        tile = layout.tile or self.tile
        return self._run(run, latents, tile // self.scale_factor, tile, layout)

    def _encoded(self, pixels: np.ndarray) -> np.ndarray:
        def run(pixels: np.ndarray) -> np.ndarray:
            return next(iter(self.models["vae_encoder"](sample=pixels).values()))

        batch, _, height, width = pixels.shape
        layout = self._layout("vae_encoder", batch, height, width)
        tile = layout.tile or self.tile
        return self._run(run, pixels, tile, tile // self.scale_factor, layout)

    def _image_sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        batch, _, height, width = shape
        return batch, height * self.scale_factor, width * self.scale_factor

    def _layout(self, component: str, batch: int, height: int, width: int) -> Layout:
        """Return the layout of a call for images of `height` x `width` pixels: that of the options if memory suffices.

        Else it is one that takes less device memory. The log has one line for each size.
        """
        options, size = Layout(self.use_slicing, self.tile if self.use_tiling else None), (batch, height, width)
        model = self.models[component]  # open, so that its weights are not free memory
        channels = self.config.get("block_out_channels")
        if self.models.stream is None or not isinstance(channels, list):
            return options
        memory = VaeMemory(channels, self._itemsize, component == "vae_decoder")
        owner, largest = self.largest_calls.get(component, (0, 0))
        arena_bytes = largest if owner == id(model) else 0
        if memory.bytes(size, options) <= arena_bytes:
            return options
        available = self.models.activation_bytes(component, arena_bytes)
        layout = memory.layout(size, options, available, self.tile, LEAST_TILE * self.scale_factor)
        self.largest_calls[component] = id(model), max(arena_bytes, memory.bytes(size, layout))
        line = f"{component}: {batch} x {width}x{height} pixels"
        if layout != options and line not in self.announced:
            self.announced.add(line)
            needed, free = memory.bytes(size, options) // MEGABYTE, int(available) // MEGABYTE
            log.warning("%s at once take about %d MB, and %d MB are free: it runs %s.", line, needed, free, layout)
        return layout

    @cached_property
    def _itemsize(self) -> int:
        """Bytes of an activation's element. Graphs in bfloat16 have inputs in float32."""
        if self.models["vae_decoder"].dtype("latent_sample") != np.float32:
            return 2
        return 4 if read_manifest(self.models.folder).get("options", {}).get("dtype", "float32") == "float32" else 2

    def _run(self, run: tiling.Run, x: np.ndarray, tile: int, tile_out: int, layout: Layout) -> np.ndarray:
        """Apply `run` to x (B, C, H, W), in the tiles and slices of a layout."""

        def run_tiled(x: np.ndarray) -> np.ndarray:
            return tiling.run_in_tiles(run, x, tile, tile_out) if layout.tile else run(x)

        return (tiling.run_one_by_one(run_tiled, x) if layout.slices else run_tiled(x)).astype(np.float32, copy=False)
