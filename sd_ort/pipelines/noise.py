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
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any

import numpy as np

LOG = (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
       -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
SINE = (8.3321608736e-3, -1.6666654611e-1)
COSINE = (-1.388731625493765e-3, 4.166664568298827e-2)
BLOCK = 16  # samples of one transform: radii from the first half, angles from the second
CACHED = 1 << 14  # samples whose intermediate results fit in a processor's cache: twice as fast for SDXL
SIGN = np.int32(-(2**31))  # sign bit of a float32


class TorchNormalGenerator:
    """torch's CPU generator of standard normal float32 samples, as on x86 with AVX2."""

    def __init__(self, seed: int) -> None:
        """`seed`: torch reads its lower 32 bits."""
        self.seed = seed
        self.twister = np.random.RandomState(seed & 0xFFFFFFFF)
        self.spare = np.empty(0)  # second sample of a pair, for the next `draw` of fewer than `BLOCK` samples
        self.started: Future[tuple[np.ndarray, TorchNormalGenerator]] | None = None

    def start(self, shape: Sequence[int], executor: Executor) -> None:
        """Sample in `executor` the noise for the first `draw` of this shape."""

        def draw() -> tuple[np.ndarray, TorchNormalGenerator]:
            generator = TorchNormalGenerator(self.seed)
            return generator.draw(shape), generator

        self.started = executor.submit(draw)

    def draw(self, shape: Sequence[int]) -> np.ndarray:
        """Return torch.randn(shape)."""
        size = int(np.prod(shape))
        started, self.started = self.started, None
        if started is not None:
            samples, generator = started.result()
            if samples.size == size:
                self.twister, self.spare = generator.twister, generator.spare
                return samples.reshape(tuple(shape))
        if size < BLOCK:
            return self._few(size).reshape(tuple(shape))
        samples = self._uniform(size)
        full = size // BLOCK * BLOCK
        wide = np.empty(CACHED // 2)
        for begin in range(0, full, CACHED):
            to_normal(samples[begin : min(begin + CACHED, full)], wide)
        if full < size:
            samples[-BLOCK:] = self._uniform(BLOCK)
            to_normal(samples[-BLOCK:], wide)
        return samples.reshape(tuple(shape))

    def _few(self, count: int) -> np.ndarray:
        """Return fewer than `BLOCK` standard normal samples, which torch computes in float64 and in pairs."""
        pairs = (count - len(self.spare) + 1) // 2
        high, low = self.twister.randint(0, 1 << 32, (2 * pairs, 2), np.uint32).astype(np.uint64).T
        uniform = ((high << np.uint64(32) | low) & np.uint64((1 << 53) - 1)) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log1p(-uniform[1::2])), 2 * np.pi * uniform[::2]
        pairwise = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
        samples = np.concatenate([self.spare, pairwise])
        self.spare = samples[count:]
        return samples[:count].astype(np.float32)

    def _uniform(self, count: int) -> np.ndarray:
        """Return uniform samples 0 <= u < 1, float32."""
        samples = self.twister.randint(0, 1 << 24, count, np.uint32).astype(np.float32)
        samples *= np.float32(2**-24)
        return samples


def noise_generators(generator: Any, started: list[TorchNormalGenerator] | None = None) -> Any:
    """Return the generators for `draw_noise` of a request's `generator`, in which seeds are replaced.

    If torch is imported, its generators are used: they are faster, and diffusers' schedulers sample with them.
    `started`: generators of `start_noise`, of which those of the seeds are taken out.
    """
    if isinstance(generator, Sequence):
        return [noise_generators(entry, started) for entry in generator]
    if not isinstance(generator, int):
        return generator
    if "torch" in sys.modules or not _is_x86():
        import torch

        return torch.Generator().manual_seed(generator)
    index = next((i for i, each in enumerate(started or ()) if each.seed == generator), None)
    return TorchNormalGenerator(generator) if started is None or index is None else started.pop(index)


def start_noise(seeds: Any, shape: Sequence[int], executor: Executor) -> list[TorchNormalGenerator]:
    """Return one generator for each seed, which samples its first noise of `shape` in `executor`.

    Return [] if `seeds` is no list of seeds, if torch is loaded, or on other CPUs than x86.
    """
    if not isinstance(seeds, list) or "torch" in sys.modules or not _is_x86():
        return []
    generators = [TorchNormalGenerator(seed) for seed in seeds if isinstance(seed, int)]
    for generator in generators:
        generator.start(shape, executor)
    return generators


def draw_noise(shape: Sequence[int], generator: Any) -> np.ndarray:
    """Return noise (B, ...), float32. `generator`: one of `sources`, a list of B, or None for torch's global one."""
    if isinstance(generator, Sequence):
        return np.concatenate([draw_noise((1, *shape[1:]), entry) for entry in generator])
    if generator is None and "torch" not in sys.modules and _is_x86():
        generator = _global()  # torch's own has a random seed, too, until a program imports torch and seeds it
    if isinstance(generator, TorchNormalGenerator):
        return generator.draw(shape)
    import torch

    return torch.randn(tuple(shape), generator=generator).numpy()


@cache
def _global() -> TorchNormalGenerator:
    return TorchNormalGenerator(secrets.randbits(32))


def _is_x86() -> bool:
    """Return whether torch's samples on this machine are those of `TorchNormalGenerator`."""
    return platform.machine() in ("x86_64", "AMD64")


def to_normal(uniform: np.ndarray, wide: np.ndarray) -> None:
    """Replace blocks of uniform samples by standard normal ones (Box and Muller, 1958). `wide`: see `multiply_add`."""
    blocks = uniform.reshape(-1, 2, BLOCK // 2)
    wide = wide[: uniform.size // 2]
    radius = log(np.subtract(np.float32(1), blocks[:, 0]).reshape(-1), wide)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    for half, values in enumerate(cosine_sine(np.multiply(blocks[:, 1], np.float32(2 * np.pi)).reshape(-1), wide)):
        values *= radius
        blocks[:, half] = values.reshape(-1, BLOCK // 2)


def log(x: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of 0 < x <= 1 by the algorithm of Cephes' logf. wide: see `multiply_add`."""
    mantissa, integers = np.frexp(x)
    small = (mantissa < np.float32(0.707106781186547524)).astype(np.float32)
    exponent = integers.astype(np.float32)
    exponent -= small
    small += np.float32(1)
    mantissa *= small  # twice the small ones
    mantissa -= np.float32(1)
    y = _polynomial(mantissa.astype(np.float64), 7.0376836292e-2, LOG, wide)
    y *= mantissa
    square = mantissa * mantissa
    multiply_add(y, square.astype(np.float64), (exponent * np.float32(-2.12194440e-4)).astype(np.float64), wide)
    square *= np.float32(0.5)
    y -= square
    y += mantissa
    multiply_add(exponent, np.float64(np.float32(0.693359375)), y.astype(np.float64), wide)
    return exponent


def cosine_sine(x: np.ndarray, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of 0 <= x <= 2 pi by the algorithms of Cephes' cosf and sinf: octants and polynomials.

    `wide`: see `multiply_add`.
    """
    octant = (x * np.float32(1.27323954473516)).astype(np.int32)
    octant += 1
    octant &= ~1
    turns = octant.astype(np.float32)
    for part in (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8):  # of pi / 4
        rest = turns.copy()
        multiply_add(rest, np.float64(np.float32(part)), x.astype(np.float64), wide)
        x = rest
    square = x * x
    squares = square.astype(np.float64)
    cosine = _polynomial(squares, 2.443315711809948e-5, COSINE, wide)
    cosine *= square
    multiply_add(cosine, squares, squares * -0.5, wide)
    cosine += np.float32(1)
    sine = _polynomial(squares, -1.9515295891e-4, SINE, wide)
    sine *= square
    angle = x.astype(np.float64)
    multiply_add(sine, angle, angle, wide)
    # Octants 2 and 6 swap sine and cosine; the sine is negative in 4 and 6, the cosine in 2 and 4.
    octant <<= 29  # bit 2 becomes the sign bit, bit 1 the next one
    swapped = (octant << 1) >> 31  # all bits or none
    cosine_bits, sine_bits = cosine.view(np.int32), sine.view(np.int32)
    difference = (cosine_bits ^ sine_bits) & swapped
    cosine_bits ^= difference
    sine_bits ^= difference
    sine_bits ^= octant & SIGN
    cosine_bits ^= (octant ^ swapped) & SIGN
    return cosine, sine


def _polynomial(x: np.ndarray, first: float, rest: Sequence[float], wide: np.ndarray) -> np.ndarray:
    y = np.full(x.shape, first, np.float32)
    for number in rest:
        multiply_add(y, x, np.float64(np.float32(number)), wide)
    return y


def multiply_add(a: np.ndarray, b: Any, c: Any, wide: np.ndarray) -> None:
    """Replace float32 `a` by a * b + c, computed in float64; `b`, `c`: float32. wide: float64 scratch memory.

    The product is exact in float64, so the sum is rounded twice where torch rounds it once. That differs only if the
    first rounding ends half way between two float32 numbers; a test shows that no uniform sample gives another result.
    """
    wide[...] = a
    wide *= b
    wide += c
    a[...] = wide
