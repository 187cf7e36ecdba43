"""Former name of `sd_ort.integrations.comfyui`."""

from sd_ort.integrations.comfyui import comfy_entrypoint as comfy_entrypoint
