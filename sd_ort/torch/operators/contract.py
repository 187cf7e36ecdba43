"""How an operator becomes one of torch's: kernels, shapes, gradients, autocast, vmap, and the way back to torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from sd_ort.torch import status, watchers
from sd_ort.torch.kernels import Refused

_LIBRARY = torch.library.Library("sd_ort", "DEF")

Result = Any  # a tensor, or a tuple of tensors
BY_TORCH = " by torch"  # ends the name of a fallback's range in a profile
# What an argument of a call is that needs no dispatcher: no subclass, which may be anything.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, torch.dtype})
# The plain torch expression of every operator, by name.
PLAIN: dict[str, Callable[..., Result]] = {}


@dataclass(frozen=True)
class Operator:
    """One operator. All four functions take the schema's arguments, in order.

    `plain` is the torch expression that it stands for: the fallback, and what gradients are taken of. `launch` runs our
    kernel and raises Refused where there is none; `fake` gives empty results of the right shape and strides.
    `autocast`: "lower" casts to the autocast type, as torch does for products, "float32" as for norms, "widest" to the
    widest type among the arguments, as for sums.
    """

    name: str
    schema: str
    plain: Callable[..., Result]
    launch: Callable[..., Result]
    fake: Callable[..., Result]
    autocast: Literal["lower", "float32", "widest"]

    def define(self) -> Callable[..., Any]:
        """Registers it; returns a function that calls `torch.ops.sd_ort.<name>`, or without gradients and the like the
        kernel at once: torch's dispatcher takes two turns through Python, which cost more than a small kernel.
        """
        PLAIN[self.name] = self.plain
        _LIBRARY.define(self.name + self.schema, tags=(torch.Tag.needs_exact_strides,))
        qualified = f"sd_ort::{self.name}"
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(self.name, self._run, key)
        for key in ("AutocastCPU", "AutocastCUDA"):
            _LIBRARY.impl(self.name, self._run_autocast, key)
        torch.library.register_fake(qualified, self._trace, lib=_LIBRARY)
        torch.library.register_autograd(qualified, self._backward, setup_context=self._save, lib=_LIBRARY)
        torch.library.register_vmap(qualified, self._refuse_vmap, lib=_LIBRARY)
        overload, run = getattr(torch.ops.sd_ort, self.name).default, self._run_at_once

        def call(*arguments: Any) -> Result:
            return overload(*arguments) if _needs_dispatcher(arguments) else run(*arguments)

        return call

    def _trace(self, *arguments: Any) -> Result:
        """As `fake`. Whoever compiles for Inductor traces with its lowerings loaded, at the latest the last time."""
        if (lowering := sys.modules.get("torch._inductor.lowering")) is not None:
            _tell_inductor(lowering)
        return self.fake(*arguments)

    # ---- forward

    def _run(self, *arguments: Any) -> Result:
        try:
            result = self.launch(*arguments)
        except Refused as refused:
            status.fallbacks[self.name, str(refused)] += 1
            with torch.profiler.record_function(f"sd_ort::{self.name}{BY_TORCH}"):
                return _laid_out(self.plain(*arguments), self.fake(*arguments))
        status.kernels[self.name] += 1
        return result

    def _run_at_once(self, *arguments: Any) -> Result:
        """As `_run`, where nobody was promised strides and no profiler wants a range."""
        try:
            result = self.launch(*arguments)
        except Refused as refused:
            status.fallbacks[self.name, str(refused)] += 1
            return self.plain(*arguments)
        status.kernels[self.name] += 1
        return result

    def _run_autocast(self, *arguments: Any) -> Result:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        device = tensors[0].device.type
        if self.autocast == "widest":
            dtype = max((t.dtype for t in tensors if t.is_floating_point()), key=lambda dtype: dtype.itemsize)
        else:
            dtype = torch.get_autocast_dtype(device) if self.autocast == "lower" else torch.float32
        cast = [
            a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dtype != torch.float64 else a
            for a in arguments
        ]
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.sd_ort, self.name)(*cast)

    def _refuse_vmap(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"sd_ort::{self.name} takes batches itself and does not run under vmap: restore() the module, or loop."
        )

    # ---- gradients: those of the plain expression, computed again from the arguments

    @staticmethod
    def _save(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
        ctx.is_tensor = [isinstance(each, torch.Tensor) for each in inputs]
        ctx.others = [None if isinstance(each, torch.Tensor) else each for each in inputs]
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, torch.Tensor)))

    def _backward(self, ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if tensor else other for tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)]
        wanted = [i for i, needs in enumerate(ctx.needs_input_grad) if needs and ctx.is_tensor[i]]
        again = torch.is_grad_enabled()  # a gradient of this gradient is asked for
        with torch.enable_grad():
            if not again:
                arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
                for i in wanted:
                    arguments[i].requires_grad_()
            results = self.plain(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            found = torch.autograd.grad(
                results, [arguments[i] for i in wanted], gradients, allow_unused=True, create_graph=again
            )
        by_place = dict(zip(wanted, found, strict=True))
        return tuple(by_place.get(i) for i in range(len(arguments)))


@cache
def _tell_inductor(lowering: Any) -> None:
    """Registers the operators with Inductor as calls of themselves, with the strides that tracing was told.

    Inductor does so on its own when it meets one. But torch 2.11 then writes that call with all that led to it
    into a message, for a log that is off, twice over for every sum on the way: hours for a deep model whose last
    operator comes late, as SDXL's upsampling does.
    """
    constraint = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
    for name in PLAIN:
        overload = getattr(torch.ops.sd_ort, name).default
        if overload not in lowering.lowerings:
            lowering.make_fallback(overload, layout_constraint=constraint)


def _needs_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Whether something stands between the call and its kernel: tracing, gradients, a mode, autocast, a profiler."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or watchers.transformed():
        return True
    if watchers.autocast() or watchers.profiled() or not _PLAIN_TYPES.issuperset(map(type, arguments)):
        return True
    return not (arguments[0].is_cpu or arguments[0].is_cuda)


def _laid_out(result: Result, like: Result) -> Result:
    """A result in memory of its own with the strides that tracing was told."""
    if isinstance(result, tuple):
        return tuple(_laid_out(one, model) for one, model in zip(result, like, strict=True))
    return result if result.stride() == like.stride() else like.copy_(result)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Its address, as a Params' field; None when it is absent."""
    return None if tensor is None else tensor.data_ptr()


def require(condition: bool, reason: str) -> None:
    """Raises Refused: the plain expression runs, and says what is wrong with a call that is."""
    if not condition:
        raise Refused(reason)


def one_dtype(*tensors: torch.Tensor | None) -> bool:
    present = [tensor for tensor in tensors if tensor is not None]
    return all(tensor.dtype == present[0].dtype for tensor in present)
