"""The kernels of the operator library in PyTorch.

`optimize` replaces modules of a diffusers pipeline, `restore` puts them back, `profile` and `status` report what ran.
The operators themselves are `torch.ops.sd_ort`.
"""

from sd_ort.torch import operators
from sd_ort.torch.profiling import Profile, profile
from sd_ort.torch.replace import optimize, restore
from sd_ort.torch.status import Status, reset_status, status

__all__ = ["Profile", "Status", "operators", "optimize", "profile", "reset_status", "restore", "status"]
