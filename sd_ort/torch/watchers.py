"""What of torch may stand between a call and its kernels: tracing, modes, transforms, autocast, a profiler."""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether calls are traced (not by dynamo: ask `torch.compiler.is_compiling` first), or met by a mode or a
    transform: `torch.jit`, FakeTensor, a FLOP counter, `torch.set_default_device`, vmap, `torch.func.grad`.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch._C._is_any_autocast_enabled()


def profiled() -> bool:
    """Whether a profiler records operators."""
    return torch._C._autograd._profiler_enabled()
