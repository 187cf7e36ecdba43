"""Registration of operators with torch.library: kernels, torch fallback, fake tensors, gradients, autocast, vmap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_map_only

from sd_ort.torch import dispatch_state, status
from sd_ort.torch.kernels import UnsupportedCall

_LIBRARY = torch.library.Library("sd_ort", "DEF")

Result = Any  # a tensor, or a tuple of tensors
FALLBACK_SUFFIX = " by torch"  # of the name of a fallback's range in a profile
# Types of arguments that need no dispatcher. Subclasses of Tensor do.
_DIRECT_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, torch.dtype})
FALLBACKS: dict[str, Callable[..., Result]] = {}  # operator -> its torch expression


@dataclass(frozen=True)
class Operator:
    """A torch operator. All three functions take the arguments of the schema, in order.

    fallback: the torch expression that the operator equals; it runs without a kernel, and defines the gradients.
    launch: runs a kernel of the operator library. Raises UnsupportedCall if there is none.
    fake: returns empty results of the right shape and strides.
    autocast: "lower" casts to the autocast dtype, as torch does for MatMul; "float32" as for norms; "widest" casts to
        the widest dtype among the arguments, as for sums.
    """

    name: str
    schema: str
    fallback: Callable[..., Result]
    launch: Callable[..., Result]
    fake: Callable[..., Result]
    autocast: Literal["lower", "float32", "widest"]

    def define(self) -> Callable[..., Any]:
        """Register the operator and return a function that calls it.

        The function calls `torch.ops.sd_ort.<name>` if tracing, gradients, autocast or the like need the dispatcher,
        else the kernel directly: the dispatcher enters Python twice, which costs more than a small kernel.
        """
        FALLBACKS[self.name] = self.fallback
        _LIBRARY.define(self.name + self.schema, tags=(torch.Tag.needs_exact_strides,))
        qualified = f"sd_ort::{self.name}"
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(self.name, self._run, key)
        for key in ("AutocastCPU", "AutocastCUDA"):
            _LIBRARY.impl(self.name, self._run_autocast, key)
        torch.library.register_fake(qualified, self._run_fake, lib=_LIBRARY)
        torch.library.register_autograd(qualified, self._backward, setup_context=self._save, lib=_LIBRARY)
        torch.library.register_vmap(qualified, self._reject_vmap, lib=_LIBRARY)
        overload, run = getattr(torch.ops.sd_ort, self.name).default, self._run_directly

        def call(*arguments: Any) -> Result:
            return overload(*arguments) if _needs_dispatcher(arguments) else run(*arguments)

        return call

    def _run_fake(self, *arguments: Any) -> Result:
        """Return `fake`, and register with Inductor if it is loaded: it loads its lowerings before it traces."""
        if (lowering := sys.modules.get("torch._inductor.lowering")) is not None:
            _register_with_inductor(lowering)
        return self.fake(*arguments)

    # ---- Forward

    def _run(self, *arguments: Any) -> Result:
        try:
            result = self.launch(*arguments)
        except UnsupportedCall as reason:
            status.fallbacks[self.name, str(reason)] += 1
            with torch.profiler.record_function(f"sd_ort::{self.name}{FALLBACK_SUFFIX}"):
                return _with_strides(self.fallback(*arguments), self.fake(*arguments))
        status.kernels[self.name] += 1
        return result

    def _run_directly(self, *arguments: Any) -> Result:
        """As `_run`, but the strides of a fallback may differ from `fake`, and it has no profiler range."""
        try:
            result = self.launch(*arguments)
        except UnsupportedCall as reason:
            status.fallbacks[self.name, str(reason)] += 1
            return self.fallback(*arguments)
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

    def _reject_vmap(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"sd_ort::{self.name} takes batches itself and does not run under vmap: restore() the module, or loop."
        )

    # ---- Gradients: those of the fallback, which is computed again from the arguments

    @staticmethod
    def _save(ctx: Any, inputs: tuple[Any, ...], output: Result) -> None:
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))

    def _backward(self, ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if tensor else other for tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)]
        indices = [i for i, needed in enumerate(ctx.needs_input_grad) if needed and ctx.is_tensor[i]]
        create_graph = torch.is_grad_enabled()  # for a gradient of this gradient
        with torch.enable_grad():
            if not create_graph:
                arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
                for i in indices:
                    arguments[i].requires_grad_()
            results = self.fallback(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            input_gradients = torch.autograd.grad(
                results, [arguments[i] for i in indices], gradients, allow_unused=True, create_graph=create_graph
            )
        by_index = dict(zip(indices, input_gradients, strict=True))
        return tuple(by_index.get(i) for i in range(len(arguments)))


def register_alias(name: str, call: Callable[..., Result], schema: str) -> None:
    """Register the deprecated name of an operator: `torch.ops.sd_ort.<name>` calls the operator of the new name."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, call, "CompositeImplicitAutograd")


@cache
def _register_with_inductor(lowering: Any) -> None:
    """Register all operators with Inductor as calls of themselves, with the strides of their fake results.

    Inductor does so itself when it meets one. But torch 2.11 then formats that call with its whole history into a
    message for a log that is off, twice over for every sum on the way. That takes hours for a deep model whose last
    operator comes late, as SDXL's upsampling does.
    """
    constraint = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
    for name in FALLBACKS:
        overload = getattr(torch.ops.sd_ort, name).default
        if overload not in lowering.lowerings:
            lowering.make_fallback(overload, layout_constraint=constraint)


def _needs_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Return whether tracing, gradients, a mode, autocast, a profiler or a tensor subclass needs the dispatcher."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or dispatch_state.is_intercepted():
        return True
    if dispatch_state.is_autocast() or dispatch_state.is_profiled():
        return True
    return not (_DIRECT_TYPES.issuperset(map(type, arguments)) and (arguments[0].is_cpu or arguments[0].is_cuda))


def _with_strides(result: Result, fake: Result) -> Result:
    """Return the result with the strides of `fake`: itself, or a copy in the memory of `fake`."""
    if isinstance(result, tuple):
        return tuple(_with_strides(tensor, empty) for tensor, empty in zip(result, fake, strict=True))
    return result if result.stride() == fake.stride() else fake.copy_(result)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the tensor's address as a field of Params; None for None."""
    return None if tensor is None else tensor.data_ptr()


def require(condition: bool, reason: str) -> None:
    """Raise UnsupportedCall unless the condition holds. For an invalid call, the fallback then raises torch's error."""
    if not condition:
        raise UnsupportedCall(reason)


def same_dtype(*tensors: torch.Tensor | None) -> bool:
    """Return whether all tensors that are not None have one dtype."""
    return len({tensor.dtype for tensor in tensors if tensor is not None}) == 1
