"""The WebUIs on fused graphs: AUTOMATIC1111's and its AMD fork by their `sd_unet`, Forge and reForge by a wrapper."""
