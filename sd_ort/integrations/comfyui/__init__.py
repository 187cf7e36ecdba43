"""ComfyUI integration: nodes whose MODEL, CLIP and VAE work with stock nodes. ComfyUI imports this package."""

from __future__ import annotations

from typing import Any


async def comfy_entrypoint() -> Any:
    """Entry point of ComfyUI's V3 schema: return the extension."""
    from sd_ort.integrations.comfyui.nodes import SdOrtExtension

    return SdOrtExtension()
