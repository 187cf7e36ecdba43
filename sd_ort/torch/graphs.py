"""A model's calls as CUDA graphs: captured when the same shapes come a second time, replayed from then on.

A graph has addresses and Python's decisions baked in. So before each replay the model is compared with what it was when
it was captured (`_Snapshot`), and graphs of another state are dropped. Weights changed in place are read as they are.
What is made of the prompt and of weights alone is made when these change (lasting.py), not at every replay.
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

from sd_ort.torch import kernels, status, watchers
from sd_ort.torch.lasting import Lasting

KEPT = 8  # graphs of one model, the one used longest ago is dropped; they share their memory
UNUSED = 3  # graphs dropped in a row before their second replay: the model changes too often
SAME_PROMPT = "replayed for the same prompt"
Run = Callable[..., Any]
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


class Refused(Exception):
    """A call is not captured: it runs as it is, and its message is the reason that is counted."""


@dataclass
class _Entry:
    """Calls of the same shapes. Captured at the second of them, or `failed` then and why."""

    key: tuple[Any, ...]
    spec: pytree.TreeSpec
    is_new: bool = True
    failed: str | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    lasting: Lasting = field(default_factory=Lasting)
    outputs: Any = None
    replay: Callable[[], None] | None = None
    replays: int = 0


class Graphs:
    """The graphs of one model. A copy or a pickle of it holds none."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._snapshot: _Snapshot | None = None
        self._pool: Any = None
        self._unused = 0
        self._stream: Any = None
        self._lock = threading.Lock()

    def __deepcopy__(self, _: object) -> Graphs:
        return Graphs()

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()

    def call(self, run: Run, model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """`run(model, *arguments, **keywords)`, replayed where that is the same. Counted in `status()`."""
        name = type(model).__name__
        try:
            _check_surroundings()
            leaves, spec = pytree.tree_flatten((arguments, keywords))
            key = tuple(_key(leaf) for leaf in leaves)
        except Refused as refused:
            status.not_captured[name, str(refused)] += 1
            self._forget()  # a call with gradients: fused optimizers write weights and count it nowhere
            return run(model, *arguments, **keywords)
        with self._lock:
            try:
                entry = self._entry(model, key, spec)
                if not entry.is_new:
                    return self._replayed(entry, run, model, leaves)
                entry.is_new = False
            except Refused as refused:
                status.not_captured[name, str(refused)] += 1
        return run(model, *arguments, **keywords)

    def _forget(self) -> None:
        with self._lock:
            for entry in self._entries:
                entry.lasting.forget()

    def _entry(self, model: nn.Module, key: tuple[Any, ...], spec: pytree.TreeSpec) -> _Entry:
        """The entry of a call, new or found, as the one used last. Drops all when the model has changed."""
        if self._snapshot is None or self._snapshot.differs():
            captured = [entry for entry in self._entries if entry.replay is not None]
            if captured:
                self._unused = self._unused + 1 if all(entry.replays < 2 for entry in captured) else 0
            self._entries, self._pool = [], None
            self._snapshot = _Snapshot(model)
        if self._unused >= UNUSED:
            raise Refused("it changes between calls")
        self._snapshot.check()
        found = next((one for one in self._entries if one.key == key and one.spec == spec), None)
        entry = found or _Entry(key, spec)
        others = [one for one in self._entries if one is not entry]
        self._entries = [*others[1 - KEPT :], entry]
        return entry

    def _replayed(self, entry: _Entry, run: Run, model: nn.Module, leaves: list[Any]) -> Any:
        """Raises Refused where the call cannot be captured."""
        name = type(model).__name__
        if entry.replay is None:
            entry.replay = self._record(entry, run, model, leaves)
            status.graphs[name, "captured"] += 1
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._stream = after(self._stream, tensors[0].device)
        for static, given in zip(entry.inputs, tensors, strict=True):
            static.copy_(given)
        if entry.lasting.renew(tensors):
            status.graphs[name, SAME_PROMPT] += 1
        entry.replay()
        entry.replays += 1
        status.graphs[name, "replayed"] += 1
        return pytree.tree_map_only(torch.Tensor, torch.clone, entry.outputs)

    def _record(self, entry: _Entry, run: Run, model: nn.Module, leaves: list[Any]) -> Callable[[], None]:
        """Captures; returns what replays. Raises Refused with torch's reason when that fails or failed before."""
        if entry.failed is not None:
            raise Refused(entry.failed)
        with torch.inference_mode(False), torch.no_grad():
            static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

            def again() -> Any:
                arguments, keywords = pytree.tree_unflatten(static, entry.spec)
                return run(model, *arguments, **keywords)

            entry.inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
            entry.lasting = Lasting(entry.inputs)
            try:
                with entry.lasting.recorded():
                    replay, entry.outputs, self._pool = record(again, entry.inputs[0].device, self._pool)
            except (RuntimeError, NotImplementedError) as error:
                entry.failed = f"capturing failed: {str(error).splitlines()[0]}"
                entry.inputs, entry.lasting = [], Lasting()
                raise Refused(entry.failed) from error
        return replay


# ---- What a call may not meet


def _check_surroundings() -> None:
    """Raises Refused where a replay would not do what the call does."""
    if torch.is_grad_enabled():
        raise Refused("gradients are on")
    if watchers.autocast():
        raise Refused("autocast is on")
    if watchers.transformed() or _has_any_global_hook():
        raise Refused("its calls are watched")


def _key(leaf: Any) -> tuple[Any, ...]:
    """What must be the same of an argument for a replay. Raises Refused for what cannot be told."""
    if type(leaf) in (torch.Tensor, nn.Parameter):
        if not on_gpu(leaf.device):
            raise Refused(f"an argument lies on the {leaf.device.type}")
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if type(leaf) not in _CONSTANTS:
        raise Refused(f"an argument is a {type(leaf).__name__}")
    return type(leaf), leaf


class _Snapshot:
    """All that a model's modules and their processors hold, and where its weights lie."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = list(model.modules())
        processors = (getattr(module, "processor", None) for module in modules)
        plain = [one for one in processors if not isinstance(one, nn.Module) and hasattr(one, "__dict__")]
        # SiLU and Dropout may stand in many places, and a processor too
        held = {id(one): one.__dict__ for one in (*modules, *plain)}.values()
        self._held = [(now, {name: _copied(value) for name, value in now.items()}) for now in held]
        self._weights = [now[name] for now in held for name in ("_parameters", "_buffers") if now.get(name)]
        self._places = self._weights_lie()
        self._refusal = _refusal(model)

    def _weights_lie(self) -> list[int]:
        return [one.data_ptr() for weights in self._weights for one in weights.values() if one is not None]

    def differs(self) -> bool:
        """Whether the model has changed since: a module, an attribute, a hook, a weight's place in memory."""
        try:
            return any(now != then for now, then in self._held) or self._weights_lie() != self._places
        except (RuntimeError, TypeError, ValueError):  # another tensor in the place of one: they cannot be compared
            return True

    def check(self) -> None:
        """Raises Refused for a model that is not to be captured."""
        if self._refusal is not None:
            raise Refused(self._refusal)


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (dict, OrderedDict, list, set) else value


def _refusal(model: nn.Module) -> str | None:
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "it is offloaded"
    hooked = (m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())
    if any(hooked):
        return "a module has hooks"
    if any(not on_gpu(weight.device) for weight in model.parameters()):
        return "a weight is not on the GPU"
    drops = (isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in model.modules())
    return "it drops out at random" if any(drops) else None


# ---- CUDA's and HIP's side


def on_gpu(device: torch.device) -> bool:
    """Whether calls on the device can be captured."""
    return device.type == "cuda"


def can_be_captured(device: torch.device) -> bool:
    """Whether a call on the device is to be captured now: not on a CPU, not when somebody captures already."""
    return on_gpu(device) and not torch.cuda.is_current_stream_capturing()


def record(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
    """Captures `run()` after a call to warm up: what replays it, its static results, and the memory pool it uses."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph(keep_graph=torch.version.hip is None)
        pool = pool or torch.cuda.graph_pool_handle()
        # cuBLAS's scratch memory is torch's, one a stream, kept. A graph must have one of its own pool: that of the
        # call before, torch.compile's graphs give back, and replays would write where nothing is any more.
        _forget_scratch()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run()
        _forget_scratch()
        if torch.version.hip is None:
            _replace_memsets(graph)
            graph.instantiate()
    return graph.replay, outputs, pool


def _replace_memsets(graph: Any) -> None:
    """cuBLAS and cuDNN leave memsets in graphs, each of which takes longer than a small kernel."""
    try:
        library = kernels.gpu_kernels()
    except kernels.Refused:
        return
    assert isinstance(library, kernels.GpuKernels)
    library.replace_memsets(graph.raw_cuda_graph())


def _forget_scratch() -> None:
    """Gives cuBLAS's scratch memory back to where it came from, as torch.compile does around its own captures."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def after(used: Any, device: torch.device) -> Any:
    """The current stream, behind what was queued on the one used before."""
    stream = torch.cuda.current_stream(device)
    if used is not None and used != stream:
        stream.wait_stream(used)
    return stream
