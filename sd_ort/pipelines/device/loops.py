"""The choice of the device loop: on one device, on two for the halves of guidance, or on several for bands of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sd_ort.pipelines.device.guidance_split import SplitGuidanceLoop
from sd_ort.pipelines.device.loop import DeviceLoop

if TYPE_CHECKING:
    from sd_ort.runtime.components import Components


def open_loop(models: Components) -> DeviceLoop:
    """Return the loop of components on one device, or on several."""
    if models.placement.splits_image:
        from sd_ort.pipelines.device.patches import SplitImageLoop  # onnx_ir, which the others do without

        return SplitImageLoop(models)
    return SplitGuidanceLoop(models, models.placement.peers[0]) if models.placement.peers else DeviceLoop(models)
