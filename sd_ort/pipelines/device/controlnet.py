"""ControlNets of the device loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.graphs import sampling_graphs
from sd_ort.graphs.sampling_graphs import identifier
from sd_ort.pipelines.controlnet_inputs import MIDDLE
from sd_ort.pipelines.sampling_job import SamplingJob
from sd_ort.runtime.ort_values import write_value
from sd_ort.runtime.session import DTYPES

if TYPE_CHECKING:
    from sd_ort.pipelines.device.conditioning import DeviceConditioning
    from sd_ort.pipelines.device.sessions import DeviceSessions
    from sd_ort.runtime.bound_run import BoundRun


class DeviceControlNets:
    """ControlNets over buffers: they read the U-Net's sample and timestep, and write inputs of the U-Net.

    `runs` run before the U-Net in every step.
    """

    def __init__(
        self,
        sessions: DeviceSessions,
        job: SamplingJob,
        conditioning: DeviceConditioning,
        values: dict[str, Any],
        timestep: np.ndarray | None,
    ) -> None:
        """Bind the ControlNets of `job`, and add the U-Net inputs that they write to `values`.

        Args:
            timestep: array of the shape and dtype of the U-Net's timestep.

        Raises:
            InputError: for a ControlNet of another dtype or timestep than the U-Net's.
        """
        self.images: list[tuple[Any, np.dtype]] = []
        self.scale_dtypes: list[np.dtype] = []
        self.nets: list[BoundRun] = []
        for number, control in enumerate(job.controls):
            net = sessions.models[control.name]
            own_timestep = net.one("timestep")
            assert timestep is not None
            unet_dtypes = sessions.models[job.unet].dtype("sample"), timestep.dtype
            if (net.dtype("sample"), own_timestep.dtype) != unet_dtypes:
                raise InputError(f"{control.name} computes in another type than the UNet: optimize both in one.")
            if own_timestep.ndim != timestep.ndim:
                raise InputError(f"{control.name} takes its timestep otherwise than the UNet: export both with sd-ort.")
            image_dtype = np.dtype(net.dtype("controlnet_cond"))
            self.images.append((sessions.value(control.image.astype(image_dtype)), image_dtype))
            self.scale_dtypes.append(np.dtype(net.dtype("conditioning_scale")))
            scale = values[f"conditioning_scale_{number}"] = sessions.value(np.zeros(1, self.scale_dtypes[-1]))
            feed = conditioning.inputs_of(net) | {"sample": values["sample"], "timestep": values["timestep"]}
            feed |= {"controlnet_cond": self.images[-1][0], "conditioning_scale": scale}
            self.nets.append(sessions.bind(net, feed))
        self.runs = [*self.nets, *self._sum(sessions, values)]

    def _sum(self, sessions: DeviceSessions, values: dict[str, Any]) -> list[BoundRun]:
        """Add the residuals to `values`; those of several ControlNets by a graph that sums them, which is returned."""
        if not self.nets:
            return []
        outputs = {name: [net.outputs[name] for net in self.nets] for name in self.nets[0].outputs}
        if len(self.nets) == 1:
            values |= {MIDDLE.get(name, name): value[0] for name, value in outputs.items()}
            return []
        declared = {output.name: output.type for output in self.nets[0].session.get_outputs()}
        dtypes = tuple((identifier(name), np.dtype(DTYPES[declared[name]])) for name in outputs)
        terms = {f"{identifier(name)}_{i}": term for name, every in outputs.items() for i, term in enumerate(every)}
        total = sessions.graph(sampling_graphs.sum_residuals_graph, (len(self.nets), dtypes), terms)
        values |= {MIDDLE.get(name, name): total.outputs[identifier(name)] for name in outputs}
        return [total]

    def write(self, job: SamplingJob) -> None:
        """Copy the control images of a job to the device."""
        for (value, dtype), control in zip(self.images, job.controls, strict=True):
            write_value(value, np.asarray(control.image, dtype))
