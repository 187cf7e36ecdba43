"""ComfyUI on fused graphs: nodes whose MODEL, CLIP and VAE stock nodes take. Imported by ComfyUI itself."""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """What ComfyUI (V3 schema) calls for the extension's nodes."""
    from sd_ort.hosts.comfyui.nodes import SdOrtExtension

    return SdOrtExtension()
