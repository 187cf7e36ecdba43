"""Products of one tensor in many places of a model, made as one: time embeddings, and keys and values of the prompt.

The first layer of a call computes for all, and each takes its part. Needs weights that lie side by side (packing.py).
A graph's replays compute anew only what changed (lasting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sd_ort.torch.lasting import once
from sd_ort.torch.modules import packing, parts
from sd_ort.torch.operators.stacked_linear import side_by_side

Tensor = torch.Tensor


class Together:
    """The products of x (..., K) by `places`, in the order in which a call meets them: a place has one layer or more.

    `before` is applied to x first. `dense`: every place's part in memory of its own, not among the others' columns.
    """

    def __init__(
        self,
        places: Sequence[Sequence[nn.Linear]],
        before: Callable[[Tensor], Tensor] | None = None,
        dense: bool = False,
    ) -> None:
        self._places = [tuple(layers) for layers in places]
        self._before = before
        self._dense = dense
        # x, its version, and the parts that were not taken yet: those of one call, so that no later call can meet them
        self._held: tuple[Tensor, int, dict[int, Tensor]] | None = None
        for parameters in self._parameters():
            packing.lay_side_by_side(parameters)

    def part(self, place: int, x: Tensor, *layers: nn.Module) -> Tensor | None:
        """The products of x for a place (..., N), its layers' side by side; None where it is to compute them itself.

        layers: those that stand there now, which may be others than before (peft's LoRA around them).
        """
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or layers != self._places[place]:
            return None
        if place == 0:
            self._held = self._products(x)
        held = self._held
        if held is None or held[0] is not x or held[1] != _version(x):
            return None
        part = held[2].pop(place, None)
        if not held[2]:
            self._held = None
        return part

    def _products(self, x: Tensor) -> tuple[Tensor, int, dict[int, Tensor]] | None:
        if not all(parts.is_plain(layer, nn.Linear) for layer in self._layers()):
            return None
        parameters = self._parameters()
        weight, bias = side_by_side(parameters[0]), side_by_side(parameters[1]) if self._has_bias() else None
        if weight is None or (bias is None and self._has_bias()):
            return None
        weights = [one for ones in parameters for one in ones]
        y = once(self, lambda: F.linear(x if self._before is None else self._before(x), weight, bias), x, weights)
        made = y.split([sum(len(layer.weight) for layer in place) for place in self._places], dim=-1)
        if self._dense:
            sizes = [part.numel() for part in made]
            rows = [row for part in made for row in part.reshape(-1, part.shape[-1]).unbind()]  # copied by one kernel
            dense = torch.cat(rows).split(sizes)
            made = tuple(flat.view(part.shape) for flat, part in zip(dense, made, strict=True))
        return x, _version(x), dict(enumerate(made))

    def _layers(self) -> list[nn.Linear]:
        return [layer for place in self._places for layer in place]

    def _has_bias(self) -> bool:
        return self._places[0][0].bias is not None

    def _parameters(self) -> list[list[nn.Parameter]]:
        """The weights, and the biases if there are any."""
        names = ("weight", "bias") if self._has_bias() else ("weight",)
        return [[getattr(layer, name) for layer in self._layers()] for name in names]

    def take_apart(self) -> None:
        """Gives every weight memory of its own again."""
        for parameters in self._parameters():
            packing.give_own_memory(parameters)


def _version(x: Tensor) -> int:
    """Counts what was written into x; inference mode does not."""
    return 0 if x.is_inference() else x._version


def alike(layers: Sequence[nn.Module]) -> bool:
    """Whether layers can be made together: torch's own products of one input, of one type, on one device."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear) and parts.is_plain(layer, nn.Linear)]
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in linear}
    return len(linear) == len(layers) and len(kinds) == 1
