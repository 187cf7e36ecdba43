"""Standard normal noise, sampled in diffusers' order: one generator for all images, or one for each.

A seed gives the bytes of torch.Generator().manual_seed(seed), also without importing torch, which takes longer than an
image on a GPU. torch's samples on x86 are those of a Mersenne twister, 24 bits each, through Box and Muller's
transform with logarithm and sine of the Cephes library in float32, products and sums fused.
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
BLOCK = 16  # samples of one transform: radii from the first half, angles from the second
CACHED = 1 << 14  # samples whose intermediate results fit in a processor's cache: twice as fast for SDXL


class Normals:
    """torch's CPU generator of standard normal float32 samples, as on x86 with AVX2."""

    def __init__(self, seed: int) -> None:
        """`seed`: torch reads its lower 32 bits."""
        self.twister = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(self, shape: Sequence[int]) -> np.ndarray:
        """Return torch.randn(shape) of at least `BLOCK` samples; torch has another algorithm for fewer."""
        size = int(np.prod(shape))
        assert size >= BLOCK
        samples = self._uniform(size)
        full = size // BLOCK * BLOCK
        for begin in range(0, full, CACHED):
            end = min(begin + CACHED, full)
            samples[begin:end] = _normal(samples[begin:end])
        if full < size:
            samples[-BLOCK:] = _normal(self._uniform(BLOCK))
        return samples.reshape(tuple(shape))

    def _uniform(self, count: int) -> np.ndarray:
        """Return uniform samples 0 <= u < 1, float32."""
        return self.twister.randint(0, 1 << 24, count, np.uint32).astype(np.float32) * np.float32(2**-24)


def sources(generator: Any) -> Any:
    """Return the generators for `draw_noise` of a request's `generator`, in which seeds are replaced.

    If torch is imported, its generators are used: they are faster, and diffusers' schedulers sample with them.
    """
    if isinstance(generator, Sequence):
        return [sources(entry) for entry in generator]
    if not isinstance(generator, int):
        return generator
    if "torch" in sys.modules or not _is_x86():
        import torch

        return torch.Generator().manual_seed(generator)
    return Normals(generator)


def draw_noise(shape: Sequence[int], generator: Any) -> np.ndarray:
    """Return noise (B, ...), float32. `generator`: one of `sources`, a list of B, or None for torch's global one."""
    if isinstance(generator, Sequence):
        return np.concatenate([draw_noise((1, *shape[1:]), entry) for entry in generator])
    if generator is None and "torch" not in sys.modules and _is_x86():
        generator = _global()  # torch's own has a random seed, too, until a program imports torch and seeds it
    if isinstance(generator, Normals):
        return generator.draw(shape)
    import torch

    noise: np.ndarray = torch.randn(tuple(shape), generator=generator).numpy()
    return noise


@cache
def _global() -> Normals:
    return Normals(secrets.randbits(32))


def _is_x86() -> bool:
    """Return whether torch's samples on this machine are those of `Normals`."""
    return platform.machine() in ("x86_64", "AMD64")


def _normal(uniform: np.ndarray) -> np.ndarray:
    """Return standard normal samples for blocks of uniform ones (Box and Muller, 1958)."""
    first, second = uniform.reshape(-1, 2, BLOCK // 2).swapaxes(0, 1)
    radius = np.sqrt(np.float32(-2) * _log(np.float32(1) - first))
    sine, cosine = _sine_cosine(np.float32(2 * np.pi) * second)
    return np.stack([radius * cosine, radius * sine], 1).reshape(-1)


def _log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of 0 < x <= 1, as Cephes' logf."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < np.float32(0.707106781186547524)
    exponent = (exponent - small).astype(np.float32)
    x = mantissa - np.float32(1) + np.where(small, mantissa, np.float32(0))
    square = x * x
    y = _polynomial(x, 7.0376836292e-2, LOG) * x
    y = multiply_add(y, square, exponent * np.float32(-2.12194440e-4)) - np.float32(0.5) * square
    return multiply_add(exponent, np.float32(0.693359375), x + y)


def _sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sine and cosine of 0 <= x, as Cephes' sinf and cosf: octants, then a polynomial each."""
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
    """Return a * b + c, rounded once to float32.

    The product is exact in float64, so the sum's two roundings differ from one only if the first ends half way between
    two float32 numbers. There the first one rounds to the neighbor with an odd last bit (Boldo and Melquiond, 2008).
    """
    product, term = a.astype(np.float64) * np.float64(b), np.asarray(c, np.float64)
    total = product + term
    bits = total.view(np.int64)
    if (bits & 0x1FFFFFFF == 0x10000000).any():
        added = total - product
        rest = (product - (total - added)) + (term - added)
        inexact = (rest != 0) & (bits & 1 == 0)
        total = np.where(inexact, bits + np.where((rest > 0) == (total > 0), 1, -1), bits).view(np.float64)
    return total.astype(np.float32)
