"""Linear layers of one input in several modules of a model, run as one MatMul.

Used for the projections of the time embedding, and for the keys and values of the prompt. The first module of a call
computes the outputs of all, and each module takes its slice. The weights must be packed (weight_packing.py). Replays
of a CUDA graph recompute only what changed (derived_tensors.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sd_ort.torch.derived_tensors import cached_in_graph
from sd_ort.torch.modules import layer_ops, weight_packing
from sd_ort.torch.operators.stacked_linear import packed_weight

Tensor = torch.Tensor


class ConcatenatedLinears:
    """The Linear layers of x (..., K) in `groups`, in the order in which a call runs them.

    A group is one or more layers of one module. `activation` is applied to x first. `contiguous`: the slice of each
    group has its own memory, instead of being columns of one tensor.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Linear]],
        activation: Callable[[Tensor], Tensor] | None = None,
        contiguous: bool = False,
    ) -> None:
        self._groups = [tuple(layers) for layers in groups]
        self._activation = activation
        self._contiguous = contiguous
        # x, its version, and the slices of this call that no group has read yet: a later call cannot read them.
        self._outputs: tuple[Tensor, int, dict[int, Tensor]] | None = None
        for parameters in self._parameters():
            weight_packing.pack_parameters(parameters)

    def output_slice(self, group: int, x: Tensor, *layers: nn.Module) -> Tensor | None:
        """Return the output (..., N) of one layer group for x, or None if the caller must run the layers itself.

        layers: the module's current layers, which may differ from those of the group (peft's LoRA around them).
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or layers != self._groups[group]:
            return None
        if group == 0:
            self._outputs = self._compute(x)
        if self._outputs is None or self._outputs[0] is not x or self._outputs[1] != _version(x):
            return None
        slices = self._outputs[2]
        output = slices.pop(group, None)
        if not slices:
            self._outputs = None
        return output

    def _compute(self, x: Tensor) -> tuple[Tensor, int, dict[int, Tensor]] | None:
        """Return x, its version and the slice of every group; None if a layer is modified or weights are not packed."""
        if not all(layer_ops.is_unmodified(layer, nn.Linear) for layer in self._layers()):
            return None
        parameters = self._parameters()
        weight, bias = packed_weight(parameters[0]), packed_weight(parameters[1]) if self._has_bias() else None
        if weight is None or (bias is None and self._has_bias()):
            return None
        weights = [parameter for same_name in parameters for parameter in same_name]
        activation = self._activation
        y = cached_in_graph(
            self, lambda: F.linear(x if activation is None else activation(x), weight, bias), x, weights
        )
        slices = y.split([sum(len(layer.weight) for layer in layers) for layers in self._groups], dim=-1)
        if self._contiguous:
            rows = [
                row for part in slices for row in part.reshape(-1, part.shape[-1]).unbind()
            ]  # one kernel copies all
            blocks = torch.cat(rows).split([part.numel() for part in slices])
            slices = tuple(block.view(part.shape) for block, part in zip(blocks, slices, strict=True))
        return x, _version(x), dict(enumerate(slices))

    def _layers(self) -> list[nn.Linear]:
        return [layer for layers in self._groups for layer in layers]

    def _has_bias(self) -> bool:
        return self._groups[0][0].bias is not None

    def _parameters(self) -> list[list[nn.Parameter]]:
        """Return the weights of all layers, and their biases if they have any."""
        names = ("weight", "bias") if self._has_bias() else ("weight",)
        return [[getattr(layer, name) for layer in self._layers()] for name in names]

    def separate_parameters(self) -> None:
        """Give each parameter its own memory again."""
        for parameters in self._parameters():
            weight_packing.unpack_parameters(parameters)


def _version(x: Tensor) -> int:
    """Return the version counter of x, which in-place writes increase; 0 for an inference tensor, which has none."""
    return 0 if x.is_inference() else x._version


def can_concatenate(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers can be concatenated: unmodified Linear layers of one input size, dtype and device."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear) and layer_ops.is_unmodified(layer, nn.Linear)]
    keys = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in linear}
    return len(linear) == len(layers) and len(keys) == 1
