"""Write GGUF test files with the package `gguf`, in the layout of ComfyUI-GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

K_BLOCK = 256


def write_gguf(
    path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str], architecture: str | None = "flux"
) -> dict[str, np.ndarray]:
    """Write float32 tensors in `dtypes` (float32 for others); return what a reader must return, in float32.

    A dtype in blocks of 256 is written with random blocks, which no function of the package quantizes, and, where rows
    are no multiple of these, in rows of 256 with the tensor's shape as metadata.
    """
    writer = GGUFWriter(path, architecture or "")
    random, expected = np.random.default_rng(len(tensors)), {}
    for name, values in tensors.items():
        kind = GGMLQuantizationType[dtypes.get(name, "F32")]
        elements, size = GGML_QUANT_SIZES[kind]
        rows = values
        if elements == K_BLOCK:
            if values.shape[-1] % K_BLOCK:
                rows = values.reshape(-1, K_BLOCK)
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
            data = k_blocks(kind.name, random, rows.size // K_BLOCK)
            expected[name] = np.stack([BLOCKS[kind.name](block) for block in data]).reshape(values.shape)
            data = data.reshape(*rows.shape[:-1], rows.shape[-1] // K_BLOCK * size)
        elif kind is GGMLQuantizationType.BF16:
            bits = values.astype(np.float32).view(np.uint32) >> 16
            data, expected[name] = bits.astype(np.uint16).view(np.uint8), (bits << 16).view(np.float32)
        else:
            data = quantize(values, kind)
            expected[name] = plain(data, kind.name, values.shape)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def plain(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of simple dtypes, computed block by block from the format's definition."""
    if kind in ("F32", "F16"):
        return data.astype(np.float32)
    blocks = data.reshape(-1, {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22}[kind])
    return np.stack([BLOCKS[kind](block) for block in blocks]).reshape(shape)


def _half(block: np.ndarray, at: int = 0) -> np.float32:
    return np.float32(block[at : at + 2].copy().view(np.float16)[0])


def _q8_0(block: np.ndarray) -> np.ndarray:
    return _half(block) * block[2:].view(np.int8).astype(np.float32)


def _q4_0(block: np.ndarray) -> np.ndarray:
    nibbles = np.concatenate([block[2:] & 15, block[2:] >> 4]).astype(np.float32)
    return _half(block) * (nibbles - 8)


def _q5_0(block: np.ndarray) -> np.ndarray:
    high = np.array([block[2 + i // 8] >> (i % 8) & 1 for i in range(32)], np.float32)
    nibbles = np.concatenate([block[6:] & 15, block[6:] >> 4]).astype(np.float32)
    return _half(block) * (nibbles + 16 * high - 16)


def _scale_and_minimum(packed: np.ndarray, j: int) -> tuple[int, int]:
    """Return the 6-bit scale and minimum j of 8 in 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4


def _q45_k(block: np.ndarray, five: bool) -> np.ndarray:
    result = np.empty(K_BLOCK, np.float32)
    packed, high, quants = block[4:16], block[16:48], block[48:] if five else block[16:]
    for j in range(8):
        scale, minimum = (np.float32(n) for n in _scale_and_minimum(packed, j))
        part = quants[j // 2 * 32 : j // 2 * 32 + 32]
        value = (part >> 4 if j % 2 else part & 15).astype(np.float32)
        if five:
            value += 16 * (high >> j & 1)
        result[32 * j : 32 * j + 32] = _half(block) * scale * value - _half(block, 2) * minimum
    return result


def _q6_k(block: np.ndarray) -> np.ndarray:
    result = np.empty(K_BLOCK, np.float32)
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    for i in range(K_BLOCK):
        half, rest = divmod(i, 128)
        quarter, lane = divmod(rest, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
        value = int(nibble) | (int(high[32 * half + lane]) >> 2 * quarter & 3) << 4
        result[i] = _half(block, 208) * np.float32(scales[i // 16]) * (value - 32)
    return result


BLOCKS = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q4_K": lambda block: _q45_k(block, False),
    "Q5_K": lambda block: _q45_k(block, True), "Q6_K": _q6_k,
}  # fmt: skip


def k_blocks(kind: str, random: np.random.Generator, count: int) -> np.ndarray:
    """Return random blocks of a dtype in blocks of 256, with scales that are finite and small."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        blocks[:, at : at + 2] = random.uniform(0.001, 0.01, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks
