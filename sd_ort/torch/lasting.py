"""What is made of weights alone, or of these and one input, and found in memory that stays: made when these change.

All keys and values of a prompt are of one input, which a pipeline passes in every step of an image: each graph has its
own (`once`). What is made of a layer's weight alone is one for its calls and all graphs (`Kept`).
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
class _Result:
    """What `make` made for its owner of the input in a place, and what that and the weights were then."""

    owner: object
    make: Callable[[], Tensor]
    place: int
    weights: Sequence[Tensor]
    result: Tensor
    source: TensorWeakRef | None = None
    written: tuple[int, ...] | None = None


class Lasting:
    """The results that a graph with these static `inputs` reads."""

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        self._inputs = inputs
        self._results: list[_Result] = []
        self._kept: dict[Kept, tuple[_Made, Tensor]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The graph's warm-up and capture, in this thread: the first finds the results, the second reads them."""
        token = _recorded.set(self)
        try:
            yield
        finally:
            _recorded.reset(token)

    def read(self, owner: object, make: Callable[[], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        place = next((place for place, one in enumerate(self._inputs) if one is x), None)
        if place is None:
            return make()
        known = [one for one in self._results if one.owner is owner and one.place == place]
        if not known:
            known = [_Result(owner, make, place, weights, make())]
            self._results += known
        return known[0].result

    def read_kept(self, kept: Kept, weight: Tensor) -> Tensor:
        """The warm-up's, which the capture finds."""
        if kept not in self._kept:
            made = kept.made(weight)
            self._kept[kept] = made, made.renewed()
        return self._kept[kept][1]

    def renew(self, given: Sequence[Tensor]) -> bool:
        """Before a replay, the `given` being in its inputs: makes again what changed. Whether it keeps the results."""
        changed = False
        for one in self._results:
            source = given[one.place]
            written = _written([source, *one.weights])
            if written is None or written != one.written or one.source is None or one.source() is not source:
                one.result.copy_(one.make())
                one.source, one.written = TensorWeakRef(source), written
                changed = True
                _used_here(one.result)  # it was allocated by the warm-up, on another stream
        for made, _ in self._kept.values():
            made.renewed(again=changed)  # with a new prompt all, in case that something was written past the count
        return bool(self._results) and not changed

    def forget(self) -> None:
        """The next replay makes all again."""
        for one in self._results:
            one.source = None


_recorded: ContextVar[Lasting | None] = ContextVar("recorded", default=None)


def once(owner: object, make: Callable[[], Tensor], x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """make(), of x and weights alone, one of each owner: in a graph that has x among its inputs, its lasting result."""
    graph = _recorded.get()
    return make() if graph is None else graph.read(owner, make, x, weights)


class Kept:
    """What `make` makes of a layer's weight alone. A copy or a pickle of it holds nothing yet."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._made: _Made | None = None

    def __deepcopy__(self, _: object) -> Kept:
        return Kept(self._make)

    def __reduce__(self) -> tuple[type[Kept], tuple[Callable[[Tensor], Tensor]]]:
        return Kept, (self._make,)

    def read(self, weight: Tensor) -> Tensor | None:
        """Of the weight as it is now. None of inference mode's, whose writes are not counted. A graph that somebody
        else captures makes it at every replay.
        """
        if weight.is_inference():
            return None
        graph = _recorded.get()
        if graph is not None:
            return graph.read_kept(self, weight)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._make(weight)
        return self.made(weight).renewed()

    def made(self, weight: Tensor) -> _Made:
        with _making:
            if self._made is None or not self._made.fits(weight):
                self._made = _Made(self._make, weight)
            return self._made

    def forget(self) -> None:
        """The next call makes it again."""
        with _making:
            if self._made is not None:
                self._made.written = None

    def leave(self, weight: Tensor) -> None:
        """Gives its memory back if the weight is another now, or elsewhere: on the CPU, say."""
        with _making:
            if self._made is not None and not self._made.fits(weight):
                self._made = None


_making = threading.RLock()


class _Made:
    """What was made of a weight, and what that was then. A graph keeps the one that it was captured with."""

    def __init__(self, make: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        self._make = make
        self._weight = weight
        self._kind = _kind(weight)
        self._result: Tensor | None = None
        self.written: tuple[object, ...] | None = None

    def fits(self, weight: Tensor) -> bool:
        """Whether it is this weight's, and in the right place."""
        return weight is self._weight and _kind(weight) == self._kind

    def renewed(self, again: bool = False) -> Tensor:
        """It, for the current stream; made again in its place if the weight changed."""
        with _making:
            # the storage itself, as a new one may lie where the old one did
            written = (StorageWeakRef(self._weight.untyped_storage()), _written([self._weight]))
            if self._result is None or again or written != self.written:
                self._result = self._anew(self._result)
                self.written = written
        _used_here(self._result)
        return self._result

    def _anew(self, into: Tensor | None) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            made = self._make(self._weight)
            made = made if into is None else into.copy_(made)
        if made.is_cuda:
            torch.cuda.current_stream(made.device).synchronize()  # other streams may read it from now on
        return made


def _used_here(result: Tensor) -> None:
    """Its memory is not another's before what the current stream does now is done."""
    if result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))


def _kind(weight: Tensor) -> tuple[object, ...]:
    return weight.device, weight.dtype, weight.shape


class _Placed:
    """Counts the layers with weights that were ever put into modules: peft fuses a LoRA by writing into weights past
    their count, but puts its layer around ours to do so, and then ours in its place again. (Not the blocks: diffusers'
    forward joins lists of these.)
    """

    def __init__(self) -> None:
        self.count = 0
        self._watches = False

    def watch(self) -> None:
        if not self._watches:
            register_module_module_registration_hook(self._put)
            self._watches = True

    def _put(self, parent: nn.Module, name: str, layer: nn.Module | None) -> None:
        if layer is not None and layer._parameters:
            self.count += 1


_placed = _Placed()


def _written(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Where they lie, and how often each was written to; None in inference mode, which does not count."""
    if any(one.is_inference() for one in tensors):
        return None
    _placed.watch()
    return tensors[0].data_ptr(), _placed.count, *(one._version for one in tensors)
