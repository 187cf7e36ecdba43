"""The kernels in PyTorch: `optimize` a diffusers pipeline, `restore` it; `torch.ops.sd_ort` underneath."""

from sd_ort.torch import operators
from sd_ort.torch.replace import optimize, restore
from sd_ort.torch.status import Status, reset_status, status

__all__ = ["Status", "operators", "optimize", "reset_status", "restore", "status"]
