"""Conditioning inputs of the U-Net and its ControlNets on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.pipelines.device.text_encoders import DeviceTextEncoders
from sd_ort.runtime.ort_values import write_value

if TYPE_CHECKING:
    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.pipelines.sampling_job import SamplingJob
    from sd_ort.runtime.session import OrtModel


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

    def inputs_of(self, model: OrtModel) -> dict[str, Any]:
        """Return the OrtValues of those inputs of `model` that there is a value for, in its dtypes."""
        return {name: self._value(name, model.dtype(name)) for name in model.inputs if name in self}

    def _value(self, name: str, dtype: Any) -> Any:
        if self.texts is not None and name in self.texts:
            return self.texts.rows(name, dtype)
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
