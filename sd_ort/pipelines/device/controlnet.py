"""ControlNets in the loop on the device."""

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
    from sd_ort.pipelines.device.loop import Buffers, DeviceLoop
    from sd_ort.runtime.bound_run import BoundRun


class ControlNets:
    """The ControlNets of a drawing over its buffers: they read the UNet's sample and timestep, and what they add to the
    UNet's skip connections is its input. `every` is what runs before the UNet at every step."""

    def __init__(self, buffers: Buffers, drawing: SamplingJob) -> None:
        """Raises InputError for a ControlNet of another type than the UNet."""
        loop, values = buffers.loop, buffers.values
        self.images: list[tuple[Any, np.dtype]] = []
        self.dtypes: list[np.dtype] = []
        self.nets: list[BoundRun] = []
        for number, control in enumerate(drawing.controls):
            net = loop.models[control.name]
            time, shared = net.one("timestep"), buffers.timestep
            assert shared is not None
            if (net.dtype("sample"), time.dtype) != (loop.models["unet"].dtype("sample"), shared.dtype):
                raise InputError(f"{control.name} computes in another type than the UNet: optimize both in one.")
            if time.ndim != shared.ndim:
                raise InputError(f"{control.name} takes its timestep otherwise than the UNet: export both with sd-ort.")
            shown = np.dtype(net.dtype("controlnet_cond"))
            self.images.append((loop.value(control.image.astype(shown)), shown))
            self.dtypes.append(np.dtype(net.dtype("conditioning_scale")))
            scale = values[f"conditioning_scale_{number}"] = loop.value(np.zeros(1, self.dtypes[-1]))
            read = [name for name in net.inputs if buffers.is_conditioning(name, drawing.conditioning)]
            feed = {name: buffers.give(name, drawing.conditioning, net.dtype(name)) for name in read}
            feed |= {"sample": values["sample"], "timestep": values["timestep"]}
            feed |= {"controlnet_cond": self.images[-1][0], "conditioning_scale": scale}
            self.nets.append(loop.bind(net, feed))
        self.every = [*self.nets, *self._sum(loop, values)]

    def _sum(self, loop: DeviceLoop, values: dict[str, Any]) -> list[BoundRun]:
        """Hand the residuals on to the UNet; of several ControlNets the graph that adds them up."""
        if not self.nets:
            return []
        outputs = {name: [net.outputs[name] for net in self.nets] for name in self.nets[0].outputs}
        if len(self.nets) == 1:
            values |= {MIDDLE.get(name, name): value[0] for name, value in outputs.items()}
            return []
        declared = {output.name: output.type for output in self.nets[0].session.get_outputs()}
        dtypes = tuple((identifier(name), np.dtype(DTYPES[declared[name]])) for name in outputs)
        read = {f"{identifier(name)}_{i}": one for name, every in outputs.items() for i, one in enumerate(every)}
        added = loop.graph(sampling_graphs.sum_residuals_graph, (len(self.nets), dtypes), read)
        values |= {MIDDLE.get(name, name): added.outputs[identifier(name)] for name in outputs}
        return [added]

    def give(self, drawing: SamplingJob) -> None:
        """Copy the pictures of this drawing to the device."""
        for (value, dtype), control in zip(self.images, drawing.controls, strict=True):
            write_value(value, np.asarray(control.image, dtype))
