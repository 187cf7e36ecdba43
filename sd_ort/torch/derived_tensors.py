"""Tensors derived from weights, or from weights and one graph input.

Each has a fixed address, so that captured CUDA graphs can read it, and is recomputed when its source changes.

- `cached_in_graph`: from weights and one input, one tensor for each graph. Example: the keys and values of a prompt,
  which a pipeline passes in every step of an image.
- `DerivedTensor`: from the weight of one layer, one tensor for all calls and graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import TensorWeakRef

Tensor = torch.Tensor


@dataclass
class _GraphValue:
    """A tensor that `compute` derived from the graph input `input_index` and `weights`.

    source, versions: the argument and the state of argument and weights at the last computation; None before it.
    """

    owner: object
    compute: Callable[[], Tensor]
    input_index: int
    weights: Sequence[Tensor]
    tensor: Tensor
    source: TensorWeakRef | None = None
    versions: tuple[int, ...] | None = None


class GraphDerivedTensors:
    """Derived tensors that one captured graph with these static `inputs` reads."""

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        self._inputs = inputs
        self._values: list[_GraphValue] = []
        self._derived: dict[DerivedTensor, tuple[_CachedValue, Tensor]] = {}

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Enter around the warm-up and the capture in this thread: the warm-up computes, the capture reads."""
        token = _capturing.set(self)
        try:
            yield
        finally:
            _capturing.reset(token)

    def read(self, owner: object, compute: Callable[[], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return the tensor of `owner` for the graph input x; compute() if x is no graph input."""
        index = next((index for index, static in enumerate(self._inputs) if static is x), None)
        if index is None:
            return compute()
        value = next((value for value in self._values if value.owner is owner and value.input_index == index), None)
        if value is None:
            value = _GraphValue(owner, compute, index, weights, compute())
            self._values.append(value)
        return value.tensor

    def read_derived(self, derived: DerivedTensor, weight: Tensor) -> Tensor:
        """Return the tensor that the warm-up read, so that the capture reads the same one."""
        if derived not in self._derived:
            cached = derived.cached(weight)
            self._derived[derived] = cached, cached.read()
        return self._derived[derived][1]

    def refresh(self, arguments: Sequence[Tensor]) -> bool:
        """Recompute stale tensors before a replay. The graph's inputs already hold `arguments`.

        Returns whether the graph has values of `cached_in_graph` and all of them were reused.
        """
        changed = False
        for value in self._values:
            source = arguments[value.input_index]
            versions = _versions([source, *value.weights])
            if versions is None or versions != value.versions or value.source is None or value.source() is not source:
                value.tensor.copy_(value.compute())
                value.source, value.versions = TensorWeakRef(source), versions
                changed = True
                _record_current_stream(value.tensor)  # the warm-up allocated it on another stream
        for cached, _ in self._derived.values():
            cached.read(recompute=changed)  # a new prompt recomputes all: some writes bypass the version counter
        return bool(self._values) and not changed

    def invalidate(self) -> None:
        """Let the next replay recompute all values of `cached_in_graph`."""
        for value in self._values:
            value.source = None


_capturing: ContextVar[GraphDerivedTensors | None] = ContextVar("capturing", default=None)


def cached_in_graph(owner: object, compute: Callable[[], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return compute(), which depends on x and weights alone.

    During a capture of a graph that has x among its inputs, this is the graph's derived tensor, one for each owner.
    """
    graph = _capturing.get()
    return compute() if graph is None else graph.read(owner, compute, x, weights)


class DerivedTensor:
    """A tensor derived from the weight of one layer. A copy or a pickle of this object holds no tensor."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute = compute
        self._cached: _CachedValue | None = None

    def __deepcopy__(self, _: object) -> DerivedTensor:
        return DerivedTensor(self._compute)

    def __reduce__(self) -> tuple[type[DerivedTensor], tuple[Callable[[Tensor], Tensor]]]:
        return DerivedTensor, (self._compute,)

    def read(self, weight: Tensor) -> Tensor | None:
        """Return the tensor derived from the current contents of the weight.

        Returns None for an inference tensor, whose writes are not counted. In a graph that other code captures, every
        replay computes the tensor.
        """
        if weight.is_inference():
            return None
        graph = _capturing.get()
        if graph is not None:
            return graph.read_derived(self, weight)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._compute(weight)
        return self.cached(weight).read()

    def cached(self, weight: Tensor) -> _CachedValue:
        """Return the cached value of this weight; a new one if the cached value is of another weight."""
        with _lock:
            if self._cached is None or not self._cached.belongs_to(weight):
                self._cached = _CachedValue(self._compute, weight)
            return self._cached

    def invalidate(self) -> None:
        """Let the next call recompute the tensor."""
        with _lock:
            if self._cached is not None:
                self._cached.versions = None

    def release_if_moved(self, weight: Tensor) -> None:
        """Free the tensor if the weight is another one now, or on another device (for example offloaded)."""
        with _lock:
            if self._cached is not None and not self._cached.belongs_to(weight):
                self._cached = None


_lock = threading.RLock()


class _CachedValue:
    """A derived tensor and its source weight. A graph keeps the one that was current at capture.

    versions: the weight's storage and version counter at the last computation; None if the tensor is stale.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        self._compute = compute
        self._weight = weight
        self._key = _tensor_key(weight)
        self._tensor: Tensor | None = None
        self.versions: tuple[object, ...] | None = None

    def belongs_to(self, weight: Tensor) -> bool:
        """Return whether this is the value of that weight, with the weight's current device, dtype and shape."""
        return weight is self._weight and _tensor_key(weight) == self._key

    def read(self, recompute: bool = False) -> Tensor:
        """Return the tensor for the current stream; recompute it in place if the weight changed."""
        with _lock:
            # The storage itself, not its address: a new storage may get the address of a freed one.
            versions = (StorageWeakRef(self._weight.untyped_storage()), _versions([self._weight]))
            if self._tensor is None or recompute or versions != self.versions:
                self._tensor = self._recompute(self._tensor)
                self.versions = versions
        _record_current_stream(self._tensor)
        return self._tensor

    def _recompute(self, out: Tensor | None) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            tensor = self._compute(self._weight)
            tensor = tensor if out is None else out.copy_(tensor)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # other streams may read it from now on
        return tensor


def _record_current_stream(tensor: Tensor) -> None:
    """Keep the tensor's memory from being reused before the work queued on the current stream is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _tensor_key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape


class _RegistrationCounter:
    """Counts registrations of layers with weights in modules, to detect fused LoRA layers.

    peft fuses a LoRA by writing into weights past their version counter. But peft first registers its layer in the
    place of the original, and later the original again. Blocks have no weights of their own and are not counted:
    diffusers' forward builds module lists of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_installed = False

    def install(self) -> None:
        if not self._is_installed:
            register_module_module_registration_hook(self._on_registration)
            self._is_installed = True

    def _on_registration(self, parent: nn.Module, name: str, layer: nn.Module | None) -> None:
        if layer is not None and layer._parameters:
            self.count += 1


_registrations = _RegistrationCounter()


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the first tensor's address, the registration count and all version counters.

    Returns None if one is an inference tensor, which has no version counter.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return None
    _registrations.install()
    return tensors[0].data_ptr(), _registrations.count, *(tensor._version for tensor in tensors)
