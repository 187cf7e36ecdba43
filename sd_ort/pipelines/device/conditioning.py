"""Conditioning inputs of the U-Net and its ControlNets on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.device.text_encoders import DeviceTextEncoders
from sd_ort.runtime.ort_values import write_value

if TYPE_CHECKING:
    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.pipelines.sampling_job import SamplingJob


class DeviceConditioning:
    """The conditioning inputs of one set of shapes: outputs of text encoders on the device, and copies of arrays.

    `name in conditioning`: whether there is a value for this input.
    """

    def __init__(self, sessions: DeviceSessions, job: SamplingJob) -> None:
        self.sessions, self.arrays = sessions, job.conditioning
        self.texts = None if job.texts is None else DeviceTextEncoders(sessions, job.texts)
        self.copies: dict[tuple[str, np.dtype], Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or (self.texts is not None and name in self.texts)

    def value(self, name: str, dtype: Any) -> Any:
        """Return the OrtValue of an input in `dtype`. Raises InputError for an input without a value."""
        if self.texts is not None and name in self.texts:
            return self.texts.rows(name, dtype)
        if name not in self.arrays:
            raise InputError(f"the UNet reads {name}, which this pipeline does not give: export it with sd-ort.")
        key = name, np.dtype(dtype)
        if key not in self.copies:
            self.copies[key] = self.sessions.value(self.arrays[name].astype(dtype))
        return self.copies[key]

    def write(self, job: SamplingJob) -> None:
        """Copy the arrays and token ids of a job to the device."""
        self.arrays = job.conditioning
        for (name, dtype), value in self.copies.items():
            write_value(value, np.asarray(job.conditioning[name], dtype))
        if self.texts is not None and job.texts is not None:
            self.texts.write(job.texts)

    def values(self) -> list[Any]:
        """Return all OrtValues on the device."""
        return [*([] if self.texts is None else self.texts.values()), *self.copies.values()]
