"""The kernels in PyTorch: `optimize` a diffusers pipeline, `restore` or `profile` it; `torch.ops.sd_ort` underneath."""

from sd_ort.torch import operators
from sd_ort.torch.profiling import Profile, profile
from sd_ort.torch.replace import optimize, restore
from sd_ort.torch.status import Status, reset_status, status

__all__ = ["Profile", "Status", "operators", "optimize", "profile", "reset_status", "restore", "status"]
