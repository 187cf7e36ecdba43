"""Deltas of checkpoint tensors that adapters add, by kind.

Each kind is a frozen dataclass with the `shape` of its tensor and one method `dense`, which returns the delta in
float32. A dense delta is computed when it is read, so that few are in memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Delta(Protocol):
    """The delta of one tensor of `shape`."""

    @property
    def shape(self) -> Shape: ...

    def dense(self) -> np.ndarray:
        """Return the delta as one float32 array of `shape`."""
        ...


@dataclass(frozen=True)
class LowRankDelta:
    """LoRA: delta (up * scale) @ down of a tensor of `shape` (out, in, ...), float32 (Hu et al., 2021, section 4.1).

    `up`: (out, R). `down`: (R, in * ...). `scale`: (R,). `modules`: the LoRA modules whose `up` and `down` it has, in
    their order: deltas of the same modules differ in `scale` alone.
    """

    up: np.ndarray
    down: np.ndarray
    shape: Shape
    scale: np.ndarray
    modules: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        if self.up.shape[1] != self.down.shape[0]:
            raise ValueError(f"ranks {self.up.shape[1]} and {self.down.shape[0]}")

    @property
    def scaled_up(self) -> np.ndarray:
        """up * scale."""
        return self.up * self.scale

    def dense(self) -> np.ndarray:
        """Return the delta as one array of `shape`."""
        return (self.scaled_up @ self.down).reshape(self.shape)

    def transposed(self) -> LowRankDelta:
        """Return the delta of the transposed matrix."""
        return LowRankDelta(self.down.T, self.scaled_up.T, self.shape[::-1], np.ones_like(self.scale))

    def zero(self) -> LowRankDelta:
        """Return a zero delta of the same shape and rank 1."""
        up, down = np.zeros_like(self.up[:, :1]), np.zeros_like(self.down[:1])
        return LowRankDelta(up, down, self.shape, np.ones(1, np.float32))

    def __add__(self, other: LowRankDelta) -> LowRankDelta:
        if self.shape != other.shape:
            raise ValueError(f"{list(other.shape)} instead of {list(self.shape)}")
        up, down = np.hstack([self.up, other.up]), np.vstack([self.down, other.down])
        scale = np.concatenate([self.scale, other.scale])
        return LowRankDelta(up, down, self.shape, scale, (*self.modules, *other.modules))


@dataclass(frozen=True)
class FactorProduct:
    """The product a (out, R) @ b (R, in * ...), or in Tucker form a (R, out), core (R, R, h, w) and b (R, in).

    The second is a filter (out, in, h, w), as LyCORIS stores it (FedPara: Hyeon-Woo et al., 2022, proposition 3).
    """

    a: np.ndarray
    b: np.ndarray
    core: np.ndarray | None = None

    @property
    def shape(self) -> Shape:
        """The product's. Raises ValueError if the factors do not fit together."""
        a, b, core = self.a.shape, self.b.shape, None if self.core is None else self.core.shape
        if (
            len(a) != 2
            or len(b) < 2
            or (a[1:] if core is None else (a[0], b[0])) != (b[:1] if core is None else core[:2])
        ):
            raise ValueError(f"factors {list(a)} and {list(b)} with core {core}")
        return (a[0], math.prod(b[1:])) if core is None else (a[1], b[1], *core[2:])

    def array(self) -> np.ndarray:
        """Return the product. Raises ValueError if the factors do not fit together."""
        if self.core is None:
            return (self.a @ self.b.reshape(len(self.b), -1)).reshape(self.shape)
        return np.einsum("ijhw,io,jn->onhw", self.core, self.a, self.b).reshape(self.shape)


@dataclass(frozen=True)
class HadamardDelta:
    """LoHa: scale * first * second, elementwise, of two products (FedPara: Hyeon-Woo et al., 2022, proposition 1)."""

    first: FactorProduct
    second: FactorProduct
    scale: float
    shape: Shape

    def __post_init__(self) -> None:
        if self.first.shape != self.second.shape:
            raise ValueError(f"products of {list(self.first.shape)} and {list(self.second.shape)}")

    def dense(self) -> np.ndarray:
        product = self.first.array()
        product *= self.second.array()
        product *= np.float32(self.scale)
        return product.reshape(self.shape)


@dataclass(frozen=True)
class KroneckerDelta:
    """LoKr: scale * (left (a, b) kron right (c, d, ...)), of shape (a * c, b * d, ...) (LyCORIS: Yeh et al., 2023)."""

    left: np.ndarray
    right: np.ndarray
    scale: float
    shape: Shape

    def dense(self) -> np.ndarray:
        product = np.kron(self.left * np.float32(self.scale), self.right.reshape(len(self.right), -1))
        return product.reshape(self.shape)


@dataclass(frozen=True)
class DifferenceDelta:
    """A full difference: scale * difference."""

    difference: np.ndarray
    scale: float
    shape: Shape

    def dense(self) -> np.ndarray:
        return (self.difference * np.float32(self.scale)).reshape(self.shape)


@dataclass(frozen=True)
class DoraDelta:
    """DoRA: magnitude * (W + inner) / norm(W + inner) - W (Liu et al., 2024, equation 5).

    `magnitude`: (out, ...) of the norms of output channels, or (1, in, ...) of input channels, as LyCORIS once stored
    it. `weight`: returns W, of the inner delta's shape. PEFT's adapter scale is in `inner`, so also in the norm; that
    of ComfyUI and the WebUIs is `scale`, a factor of the delta.
    """

    inner: Delta
    magnitude: np.ndarray
    weight: Callable[[], np.ndarray]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.magnitude.size not in self.shape[:2] or len(self.magnitude) not in (1, self.shape[0]):
            raise ValueError(f"magnitudes {list(self.magnitude.shape)} for {list(self.shape)}")

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    def dense(self) -> np.ndarray:
        weight = self.weight().reshape(self.shape)
        total = weight + self.inner.dense()
        axis = 0 if len(self.magnitude) == self.shape[0] else 1
        others = tuple(each for each in range(total.ndim) if each != axis)
        norms = np.sqrt(np.square(total).sum(axis=others, keepdims=True))
        total *= self.magnitude.reshape(norms.shape) / np.maximum(norms, np.finfo(np.float32).tiny)
        total -= weight
        total *= np.float32(self.scale)
        return total


@dataclass(frozen=True)
class DeltaSum:
    """The sum of deltas of one tensor."""

    deltas: tuple[Delta, ...]

    @property
    def shape(self) -> Shape:
        return self.deltas[0].shape

    def dense(self) -> np.ndarray:
        """Return the sum as one array of `shape`."""
        total = self.deltas[0].dense().copy()
        for delta in self.deltas[1:]:
            total += delta.dense().reshape(self.shape)
        return total


def add_deltas(first: Delta, second: Delta) -> Delta:
    """Return the sum of two deltas of one tensor; that of low-rank ones is low-rank."""
    if isinstance(first, LowRankDelta) and isinstance(second, LowRankDelta):
        return first + second
    return DeltaSum((*(first.deltas if isinstance(first, DeltaSum) else (first,)), second))
