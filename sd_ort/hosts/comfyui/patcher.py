"""ComfyUI's ModelPatcher for a model whose graph is captured."""

from __future__ import annotations

from typing import Any

from comfy.model_patcher import ModelPatcher


class GraphPatcher(ModelPatcher):
    """ComfyUI asks at every step how much memory is free, and by that how many conditions one run takes.

    Here the answer is that of the picture's first step: another one would change the number of rows in the middle of a
    picture, for which a graph is captured anew.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.free: dict[Any, int] = {}  # bytes, by device

    def pre_run(self) -> None:
        """Before a picture is sampled."""
        self.free.clear()
        super().pre_run()

    def get_free_memory(self, device: Any) -> int:
        """Bytes that were free on a device at the first step."""
        if device not in self.free:
            self.free[device] = super().get_free_memory(device)
        return self.free[device]
