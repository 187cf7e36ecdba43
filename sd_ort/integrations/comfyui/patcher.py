"""ComfyUI's ModelPatcher for a model with a captured GPU graph."""

from __future__ import annotations

from typing import Any

from comfy.model_patcher import ModelPatcher


class GraphPatcher(ModelPatcher):
    """ModelPatcher that reports the free memory of the image's first step in all steps.

    ComfyUI queries free memory in every step to choose the batch size of a run. A change within an image would capture
    another GPU graph.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.free_bytes: dict[Any, int] = {}  # by device

    def pre_run(self) -> None:
        """Reset the free memory before an image is sampled."""
        self.free_bytes.clear()
        super().pre_run()

    def get_free_memory(self, device: Any) -> int:
        """Return the bytes that were free on a device in the first step."""
        if device not in self.free_bytes:
            self.free_bytes[device] = super().get_free_memory(device)
        return self.free_bytes[device]
