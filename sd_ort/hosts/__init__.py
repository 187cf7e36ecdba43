"""Other programs' pipelines on fused graphs: diffusers, ComfyUI and the WebUIs. Each host is a thin adapter.

`models` gives torch tensors to a folder's components, `unet` calls its UNet as hosts do; both know of no host.
"""
