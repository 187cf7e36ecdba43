"""Standard normal noise, drawn in diffusers' order: one generator for all images, or one for each.

A seed draws what torch.Generator().manual_seed(seed) draws, to the byte, whether torch was imported or not: that
takes longer than a picture on a GPU. torch's numbers on x86 are those of a Mersenne twister, 24 bits each, through
Box and Muller's transform with logarithm and sine of the Cephes library in float32, products and sums fused.
"""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

LOG = (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
       -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
SINE = (8.3321608736e-3, -1.6666654611e-1)
COSINE = (-1.388731625493765e-3, 4.166664568298827e-2)
BLOCK = 16  # numbers that are made together: radii from the first half, angles from the second
CACHED = 1 << 14  # numbers whose intermediate results lie in a processor's cache: twice as fast for SDXL


class Normals:
    """torch's CPU generator of standard normal float32 numbers, as on x86 with AVX2."""

    def __init__(self, seed: int) -> None:
        """`seed`: torch reads its lower 32 bits."""
        self.twister = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(self, shape: Sequence[int]) -> np.ndarray:
        """As torch.randn, for `BLOCK` numbers or more: fewer it makes otherwise."""
        size = int(np.prod(shape))
        assert size >= BLOCK
        numbers = self._uniform(size)
        whole = size // BLOCK * BLOCK
        for begin in range(0, whole, CACHED):
            end = min(begin + CACHED, whole)
            numbers[begin:end] = _normal(numbers[begin:end])
        if whole < size:
            numbers[-BLOCK:] = _normal(self._uniform(BLOCK))
        return numbers.reshape(tuple(shape))

    def _uniform(self, count: int) -> np.ndarray:
        """0 <= u < 1, float32."""
        return self.twister.randint(0, 1 << 24, count, np.uint32).astype(np.float32) * np.float32(2**-24)


def sources(given: Any) -> Any:
    """What `draw_noise` takes for a request's `generator`: seeds become generators, torch's own where it is imported
    already: these are faster, and a scheduler of diffusers draws with them."""
    if isinstance(given, Sequence):
        return [sources(each) for each in given]
    if not isinstance(given, int):
        return given
    if "torch" in sys.modules or not _as_on_x86():
        import torch

        return torch.Generator().manual_seed(given)
    return Normals(given)


def draw_noise(shape: Sequence[int], generator: Any) -> np.ndarray:
    """Noise (B, ...), float32. `generator`: one of `sources`, a list of B, or None for torch's global one."""
    if isinstance(generator, Sequence):
        return np.concatenate([draw_noise((1, *shape[1:]), each) for each in generator])
    if generator is None and "torch" not in sys.modules and _as_on_x86():
        generator = _global()  # torch's own is seeded by chance too until someone imports torch and seeds it
    if isinstance(generator, Normals):
        return generator.draw(shape)
    import torch

    made: np.ndarray = torch.randn(tuple(shape), generator=generator).numpy()
    return made


@cache
def _global() -> Normals:
    return Normals(secrets.randbits(32))


def _as_on_x86() -> bool:
    """Whether torch draws here what `Normals` draws."""
    return platform.machine() in ("x86_64", "AMD64")


def _normal(uniform: np.ndarray) -> np.ndarray:
    """Blocks of uniform numbers -> standard normal ones (Box and Muller, 1958)."""
    first, second = uniform.reshape(-1, 2, BLOCK // 2).swapaxes(0, 1)
    radius = np.sqrt(np.float32(-2) * _log(np.float32(1) - first))
    sine, cosine = _sine_cosine(np.float32(2 * np.pi) * second)
    return np.stack([radius * cosine, radius * sine], 1).reshape(-1)


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of 0 < x <= 1, as Cephes' logf."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < np.float32(0.707106781186547524)
    exponent = (exponent - small).astype(np.float32)
    x = mantissa - np.float32(1) + np.where(small, mantissa, np.float32(0))
    square = x * x
    y = _polynomial(x, 7.0376836292e-2, LOG) * x
    y = multiply_add(y, square, exponent * np.float32(-2.12194440e-4)) - np.float32(0.5) * square
    return multiply_add(exponent, np.float32(0.693359375), x + y)


def _sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sine and cosine of 0 <= x, as Cephes' sinf and cosf: octants, then a polynomial each."""
    octant = ((x * np.float32(1.27323954473516)).astype(np.int32) + 1) & ~1
    turns = octant.astype(np.float32)
    for part in (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8):  # of pi / 4
        x = multiply_add(turns, np.float32(part), x)
    square = x * x
    cosine = _polynomial(square, 2.443315711809948e-5, COSINE) * square
    cosine = multiply_add(cosine, square, np.float32(-0.5) * square) + np.float32(1)
    sine = multiply_add(_polynomial(square, -1.9515295891e-4, SINE) * square, x, x)
    swapped = (octant & 2) != 0
    sine, cosine = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    return np.where(octant & 4, -sine, sine), np.where((octant - 2) & 4, cosine, -cosine)


def _polynomial(x: np.ndarray, first: float, rest: Sequence[float]) -> np.ndarray:
    y = np.full_like(x, first)
    for number in rest:
        y = multiply_add(y, x, np.float32(number))
    return y


def multiply_add(a: np.ndarray, b: Any, c: Any) -> np.ndarray:
    """a * b + c rounded once to float32. The product is exact in float64, and so the sum's two roundings differ from
    one only where the first ends half way between two float32 numbers: there it goes to the neighbor with an odd last
    bit instead, which the second cannot mistake (Boldo and Melquiond, 2008)."""
    product, term = a.astype(np.float64) * np.float64(b), np.asarray(c, np.float64)
    total = product + term
    bits = total.view(np.int64)
    if (bits & 0x1FFFFFFF == 0x10000000).any():
        there = total - product
        rest = (product - (total - there)) + (term - there)
        inexact = (rest != 0) & (bits & 1 == 0)
        total = np.where(inexact, bits + np.where((rest > 0) == (total > 0), 1, -1), bits).view(np.float64)
    return total.astype(np.float32)
