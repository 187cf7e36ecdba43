"""Queries of torch's dispatch state: tracing, modes, transforms, autocast and profilers."""

from __future__ import annotations

import torch


def is_intercepted() -> bool:
    """Return whether a tracer, a dispatch or function mode, or a functorch transform sees the calls of this thread.

    Examples: `torch.jit.trace`, FakeTensor, a FLOP counter, `torch.set_default_device`, vmap, `torch.func.grad`. Dynamo
    is not covered: ask `torch.compiler.is_compiling()` first.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def is_autocast() -> bool:
    """Return whether autocast is enabled for any device."""
    return torch._C._is_any_autocast_enabled()


def is_profiled() -> bool:
    """Return whether a profiler records operators."""
    return torch._C._autograd._profiler_enabled()
