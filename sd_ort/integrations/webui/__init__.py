"""WebUI integration: AUTOMATIC1111's and its AMD fork through `sd_unet`, Forge and reForge through a wrapper."""
