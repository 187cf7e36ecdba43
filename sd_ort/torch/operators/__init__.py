"""The operator library as torch operators `torch.ops.sd_ort.<name>`, one per file, with a Python function for each.

Each is registered for CPU and CUDA (HIP is CUDA in torch) with fake tensors, gradients and autocast, and rejects vmap
(registration.py). If no kernel supports a call, the torch fallback runs and `status()` counts the reason.
"""

from sd_ort.torch.operators.adaptive_norm import adaptive_norm, skip_adaptive_norm
from sd_ort.torch.operators.attention import attention
from sd_ort.torch.operators.bias_add import bias_add
from sd_ort.torch.operators.bias_split_gelu import bias_split_gelu
from sd_ort.torch.operators.group_norm import group_norm, skip_group_norm
from sd_ort.torch.operators.linear_add import linear_add
from sd_ort.torch.operators.linear_split_gelu import linear_split_gelu
from sd_ort.torch.operators.nhwc_winograd import nhwc_winograd
from sd_ort.torch.operators.rotary_embedding import rotary_embedding
from sd_ort.torch.operators.skip_layer_norm import skip_layer_norm
from sd_ort.torch.operators.softmax import softmax
from sd_ort.torch.operators.stacked_linear import stacked_linear
from sd_ort.torch.operators.swiglu import swiglu
from sd_ort.torch.operators.upsample_conv_weight import upsample_conv_weight
from sd_ort.torch.operators.upsample_nearest import upsample_nearest
from sd_ort.torch.operators.winograd_filters import winograd_filters

__all__ = [
    "adaptive_norm", "attention", "bias_add", "bias_split_gelu", "group_norm", "linear_add", "linear_split_gelu",
    "nhwc_winograd", "rotary_embedding", "skip_adaptive_norm", "skip_group_norm", "skip_layer_norm", "softmax",
    "stacked_linear", "swiglu", "upsample_conv_weight", "upsample_nearest", "winograd_filters",
]  # fmt: skip
doubled_weight = upsample_conv_weight  # deprecated alias
