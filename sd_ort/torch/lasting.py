"""Results of one input and of weights alone, which graphs find in memory that stays: made when these change.

All keys and values of a prompt are such: a pipeline passes the same tensor in every step of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
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

    def renew(self, given: Sequence[Tensor]) -> bool:
        """Before a replay, the `given` being in its inputs: makes again what changed. Whether it keeps all it has."""
        changed = False
        for one in self._results:
            source = given[one.place]
            written = _written([source, *one.weights])
            if written is None or written != one.written or one.source is None or one.source() is not source:
                one.result.copy_(one.make())
                one.source, one.written = TensorWeakRef(source), written
                changed = True
                if one.result.is_cuda:  # it was allocated by the warm-up, on another stream
                    one.result.record_stream(torch.cuda.current_stream(one.result.device))
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


class _Placed:
    """Counts the modules that were ever put into others: peft fuses a LoRA by writing into weights past their count,
    but puts its layer around ours to do so, and then ours in its place again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watches = False

    def watch(self) -> None:
        if not self._watches:
            register_module_module_registration_hook(self._put)
            self._watches = True

    def _put(self, *_: object) -> None:
        self.count += 1


_placed = _Placed()


def _written(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Where they lie, and how often each was written to; None in inference mode, which does not count."""
    if any(one.is_inference() for one in tensors):
        return None
    _placed.watch()
    return tensors[0].data_ptr(), _placed.count, *(one._version for one in tensors)
