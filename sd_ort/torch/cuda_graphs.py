"""CUDA graphs of a torch model's calls: captured at the second call of the same input shapes, then replayed.

A graph has addresses and Python's decisions baked in. Before each replay, `_ModelState` compares the model with its
state at capture time; graphs of another state are dropped. Replays read the current contents of weights that were
updated in place. Tensors derived from the prompt and from weights are recomputed only when these change
(derived_tensors.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from sd_ort.torch import dispatch_state, kernels, status
from sd_ort.torch.derived_tensors import GraphDerivedTensors

MAX_GRAPHS = 8  # per model; they share one memory pool, and the least recently used one is dropped
MAX_UNUSED_CAPTURES = 3  # in a row: graphs that were dropped before their second replay; then capturing stops
SAME_PROMPT = "replayed for the same prompt"  # event in `status().graphs`
Run = Callable[..., Any]
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


class NotCapturable(Exception):
    """A call that cannot be captured, and runs without a graph. `status()` counts it under this message."""


@dataclass
class _CapturedCall:
    """The graph of calls with the same shapes, captured at the second one. `failure`: why that capture failed."""

    key: tuple[Any, ...]
    spec: pytree.TreeSpec
    is_new: bool = True
    failure: str | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    derived: GraphDerivedTensors = field(default_factory=GraphDerivedTensors)
    outputs: Any = None
    replay: Callable[[], None] | None = None
    replays: int = 0


class CudaGraphCache:
    """The CUDA graphs of one model. A copy or a pickle of the cache is empty."""

    def __init__(self) -> None:
        self._calls: list[_CapturedCall] = []
        self._state: _ModelState | None = None
        self._pool: Any = None
        self._unused_captures = 0
        self._stream: Any = None
        self._lock = threading.Lock()

    def __deepcopy__(self, _: object) -> CudaGraphCache:
        return CudaGraphCache()

    def __reduce__(self) -> tuple[type[CudaGraphCache], tuple[()]]:
        return CudaGraphCache, ()

    def call(self, run: Run, model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """Return `run(model, *arguments, **keywords)`, by replaying a graph if possible. `status()` counts it."""
        name = type(model).__name__
        try:
            _check_context()
            leaves, spec = pytree.tree_flatten((arguments, keywords))
            key = tuple(_argument_key(leaf) for leaf in leaves)
        except NotCapturable as reason:
            status.not_captured[name, str(reason)] += 1
            self._invalidate()  # gradients may be on, and fused optimizers write weights without counting
            return run(model, *arguments, **keywords)
        with self._lock:
            try:
                call = self._captured_call(model, key, spec)
                if not call.is_new:
                    return self._replay(call, run, model, leaves)
                call.is_new = False
            except NotCapturable as reason:
                status.not_captured[name, str(reason)] += 1
        return run(model, *arguments, **keywords)

    def _invalidate(self) -> None:
        with self._lock:
            for call in self._calls:
                call.derived.invalidate()

    def _captured_call(self, model: nn.Module, key: tuple[Any, ...], spec: pytree.TreeSpec) -> _CapturedCall:
        """Return the entry for these shapes, new or cached, as the last used one.

        Drops all entries if the model has changed. Raises NotCapturable.
        """
        if self._state is None or self._state.has_changed():
            captured = [call for call in self._calls if call.replay is not None]
            if captured:
                unused = all(call.replays < 2 for call in captured)
                self._unused_captures = self._unused_captures + 1 if unused else 0
            self._calls, self._pool = [], None
            self._state = _ModelState(model)
        if self._unused_captures >= MAX_UNUSED_CAPTURES:
            raise NotCapturable("it changes between calls")
        self._state.check()
        cached = next((call for call in self._calls if call.key == key and call.spec == spec), None)
        current = cached or _CapturedCall(key, spec)
        others = [call for call in self._calls if call is not current]
        self._calls = [*others[1 - MAX_GRAPHS :], current]
        return current

    def _replay(self, call: _CapturedCall, run: Run, model: nn.Module, leaves: list[Any]) -> Any:
        """Return a copy of the outputs of a replay; capture before the first one. Raises NotCapturable."""
        name = type(model).__name__
        if call.replay is None:
            call.replay = self._capture(call, run, model, leaves)
            status.graphs[name, "captured"] += 1
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._stream = order_after(self._stream, tensors[0].device)
        for static, tensor in zip(call.inputs, tensors, strict=True):
            static.copy_(tensor)
        if call.derived.refresh(tensors):
            status.graphs[name, SAME_PROMPT] += 1
        call.replay()
        call.replays += 1
        status.graphs[name, "replayed"] += 1
        return pytree.tree_map_only(torch.Tensor, torch.clone, call.outputs)

    def _capture(self, call: _CapturedCall, run: Run, model: nn.Module, leaves: list[Any]) -> Callable[[], None]:
        """Capture a call and return its replay function.

        Raises NotCapturable with torch's reason if the capture fails or failed before.
        """
        if call.failure is not None:
            raise NotCapturable(call.failure)
        with torch.inference_mode(False), torch.no_grad():
            static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

            def run_static() -> Any:
                arguments, keywords = pytree.tree_unflatten(static, call.spec)
                return run(model, *arguments, **keywords)

            call.inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
            call.derived = GraphDerivedTensors(call.inputs)
            try:
                with call.derived.capturing():
                    replay, call.outputs, self._pool = capture(run_static, call.inputs[0].device, self._pool)
            except (RuntimeError, NotImplementedError) as error:
                call.failure = f"capturing failed: {str(error).splitlines()[0]}"
                call.inputs, call.derived = [], GraphDerivedTensors()
                raise NotCapturable(call.failure) from error
        return replay


# ---- What prevents a capture


def _check_context() -> None:
    """Raise NotCapturable if a replay would differ from the call: gradients, autocast, modes or global hooks."""
    if torch.is_grad_enabled():
        raise NotCapturable("gradients are on")
    if dispatch_state.is_autocast():
        raise NotCapturable("autocast is on")
    if dispatch_state.is_intercepted() or _has_any_global_hook():
        raise NotCapturable("a mode or hook intercepts its calls")


def _argument_key(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of an argument that a replay depends on.

    Raises NotCapturable for a tensor that is not on the GPU and for types that cannot be compared.
    """
    if type(leaf) in (torch.Tensor, nn.Parameter):
        if not on_gpu(leaf.device):
            raise NotCapturable(f"an argument is on device {leaf.device.type}")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if type(leaf) not in _CONSTANTS:
        raise NotCapturable(f"an argument has type {type(leaf).__name__}")
    return type(leaf), leaf


class _ModelState:
    """Attributes of a model's modules and attention processors, and the addresses of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = list(model.modules())
        processors = (getattr(module, "processor", None) for module in modules)
        objects = [item for item in processors if not isinstance(item, nn.Module) and hasattr(item, "__dict__")]
        # By id: one SiLU, Dropout or processor may be an attribute of many modules.
        attributes = {id(item): item.__dict__ for item in (*modules, *objects)}.values()
        self._attributes = [(now, {name: _shallow_copy(value) for name, value in now.items()}) for now in attributes]
        self._weights = [now[name] for now in attributes for name in ("_parameters", "_buffers") if now.get(name)]
        self._addresses = self._weight_addresses()
        self._reason = _uncapturable_reason(model)

    def _weight_addresses(self) -> list[int]:
        return [weight.data_ptr() for weights in self._weights for weight in weights.values() if weight is not None]

    def has_changed(self) -> bool:
        """Return whether a module, an attribute, a hook or a weight's address has changed since."""
        try:
            return any(now != then for now, then in self._attributes) or self._weight_addresses() != self._addresses
        except (RuntimeError, TypeError, ValueError):  # a tensor attribute was replaced: tensors cannot be compared
            return True

    def check(self) -> None:
        """Raise NotCapturable if the model cannot be captured."""
        if self._reason is not None:
            raise NotCapturable(self._reason)


def _shallow_copy(value: Any) -> Any:
    return value.copy() if type(value) in (dict, OrderedDict, list, set) else value


def _uncapturable_reason(model: nn.Module) -> str | None:
    """Return why calls of a model cannot be captured, or None."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "it is offloaded"
    hooked = (m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())
    if any(hooked):
        return "a module has hooks"
    if any(not on_gpu(weight.device) for weight in model.parameters()):
        return "a weight is not on the GPU"
    dropouts = (isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in model.modules())
    return "dropout is active" if any(dropouts) else None


# ---- Capture by CUDA or HIP


def on_gpu(device: torch.device) -> bool:
    """Return whether calls on the device can be captured."""
    return device.type == "cuda"


def can_capture(device: torch.device) -> bool:
    """Return whether a call on the device can be captured now: not on a CPU, and not within another capture."""
    return on_gpu(device) and not torch.cuda.is_current_stream_capturing()


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
    """Capture `run()` after one warm-up call. Return the replay function, the static outputs and the memory pool."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph(keep_graph=torch.version.hip is None)
        pool = pool or torch.cuda.graph_pool_handle()
        # torch caches one cuBLAS workspace per stream. A graph needs one from its own pool: torch.compile's graphs
        # free the workspace of the call before, and replays would write to freed memory.
        _clear_cublas_workspaces()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run()
        _clear_cublas_workspaces()
        if torch.version.hip is None:
            _replace_memsets(graph)
            graph.instantiate()
    return graph.replay, outputs, pool


def _replace_memsets(graph: Any) -> None:
    """Replace the memset nodes of cuBLAS and cuDNN by kernels: a memset node takes longer than a small kernel."""
    try:
        gpu = kernels.gpu_kernels()
    except kernels.UnsupportedCall:
        return
    assert isinstance(gpu, kernels.GpuKernels)
    gpu.replace_memsets(graph.raw_cuda_graph())


def _clear_cublas_workspaces() -> None:
    """Free torch's cached cuBLAS workspaces, as torch.compile does around its own captures."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def order_after(previous: Any, device: torch.device) -> Any:
    """Return the current stream of the device, after making it wait for the stream `previous`, which may be None."""
    stream = torch.cuda.current_stream(device)
    if previous is not None and previous != stream:
        stream.wait_stream(previous)
    return stream
