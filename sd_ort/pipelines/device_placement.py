"""Placement of a pipeline's components on several devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sd_ort.core.errors import InputError
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import SessionOptions


@dataclass(frozen=True)
class DevicePlacement:
    """The arguments of these names of `StableDiffusionPipeline.from_pretrained`, None for one device."""

    split_guidance: Sequence[int] | None = None
    split_image: Sequence[int] | None = None
    unet_on: Sequence[int] | None = None
    decode_on: int | None = None

    def check(self, separate: bool, low_memory: bool, device_loop: bool | None) -> None:
        """Raise InputError for devices that conflict with each other or with other options.

        separate: whether the folder has a UNet component and is not merged.
        """
        if self.decode_on is not None and not separate:
            raise InputError("a merged model is one session: decode elsewhere with the folder it was made from.")
        if self.unet_on is not None:
            _check_numbers(
                self.unet_on, "a UNet is spread over two or more different devices, such as 0 and 1", separate
            )
            if self.split_guidance is not None:
                raise InputError("guidance is split between whole UNets: choose split_guidance or unet_on.")
        if self.split_image is not None:
            _check_numbers(
                self.split_image, "an image is split between two or more different devices, such as 0 and 1", separate
            )
            if self.split_guidance is not None or self.unet_on is not None:
                raise InputError("split_image splits guidance, too, and needs whole UNets: leave the others out.")
        name, devices = self._split
        if devices is None:
            return
        if self.split_guidance is not None:
            _check_numbers(devices, "guidance is split between two different devices, such as 0 and 1", separate)
            if len(devices) > 2:
                raise InputError(f"guidance is split between two devices, not {len(devices)}.")
        if low_memory:
            raise InputError(f"{name} keeps a UNet on each device: leave low_memory off.")
        if device_loop is False:
            raise InputError(f"{name} runs in the loop on the devices: leave device_loop on.")

    @property
    def _split(self) -> tuple[str, Sequence[int] | None]:
        """Return the option that splits one image between devices, and these."""
        if self.split_image is not None:
            return "split_image", self.split_image
        return "split_guidance", self.split_guidance

    def options(self, provider: str, options: SessionOptions) -> SessionOptions:
        """Return the session options of the first device.

        On a CPU each device has an equal part of the threads if their number is not set.
        """
        _, split = self._split
        first = split or self.unet_on
        if first is None:
            return options
        threads = options.threads
        if provider == "cpu" and split is not None:
            threads = threads or max(1, (os.cpu_count() or 2) // len(split))
        settings = {**options.provider_options, "device_id": str(first[0])}
        return replace(options, threads=threads, provider_options=settings)

    def place(self, models: Components) -> None:
        """Place the components on these devices.

        Raises ProviderError for a missing device, or for a provider that supports only one device.
        """
        _, split = self._split
        if split is not None:
            models.open_peers(split[1:])
            models.placement.splits_image = self.split_image is not None
        if self.unet_on is not None:
            from sd_ort.graphs.partition import partition_graph  # onnx_ir, which a pipeline on one device does without

            models.partition_over("unet", self.unet_on[1:], partition_graph)
        if self.decode_on is not None:
            models.run_on_device("vae_decoder", self.decode_on)


def _check_numbers(numbers: Sequence[int], rule: str, separate: bool) -> None:
    if len(numbers) < 2 or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise InputError(f"{rule}, not {', '.join(map(str, numbers))}.")
    if not separate:
        raise InputError("a merged model is one session: take the folder it was made from for several devices.")
