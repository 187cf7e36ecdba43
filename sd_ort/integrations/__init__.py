"""Integrations of fused graphs into diffusers, ComfyUI and the WebUIs.

`models` runs the components of a pipeline folder on torch tensors, `unet` runs its UNet as applications call it. Both
are independent of the applications.
"""
