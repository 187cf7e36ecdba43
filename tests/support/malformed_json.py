"""Malformed JSON files and fields of wrong types, with the commands that read each file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROKEN: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"a": [1,',
    "a list": b"[1, 2]",
    "null": b"null",
    "a number": b"3",
    "a text": b'"text"',
    "deep": b"[" * 200_000,
    "no text": b"\xff\xfe{\x00",
}
# File -> commands that read it and must refuse it.
READERS: dict[str, tuple[str, ...]] = {
    "model_index.json": ("merge", "generate"),
    "scheduler/scheduler_config.json": ("merge", "generate"),
    "tokenizer/tokenizer_config.json": ("generate", "optimize"),
    "tokenizer/tokenizer.json": ("generate", "optimize"),
    "unet/config.json": ("merge", "generate", "verify"),
    "vae_decoder/config.json": ("merge", "generate", "verify"),
    "text_encoder/config.json": ("generate", "verify"),
    "sd_ort.json": ("optimize", "explain", "merge", "generate"),
}

WRONG: Any = [None, "x", -1, 1e400, [], {}, True]
FIELDS: dict[tuple[str, str], list[Any]] = {
    ("model_index.json", "_class_name"): [3, None, [], "Nothing"],
    ("model_index.json", "text_encoder"): ["x", 3, {}, [1], [1, 2], ["a"] * 9],
    ("scheduler/scheduler_config.json", "num_train_timesteps"): [2 * 10**9, -1, 0, "x", None, [], 10**400],
    ("scheduler/scheduler_config.json", "beta_schedule"): ["x", 3, None],
    ("scheduler/scheduler_config.json", "beta_start"): ["x", [], {}],
    ("scheduler/scheduler_config.json", "_class_name"): ["x", 3, "../x", "StableDiffusionPipeline"],
    ("unet/config.json", "block_out_channels"): ["x", 3, {}, [], [4] * 10_000],
    ("unet/config.json", "sample_size"): ["x", [], {}, -8, 10**12],
    ("unet/config.json", "in_channels"): ["x", [], 0, 10**12],
    ("unet/config.json", "cross_attention_dim"): ["x", {}, -1],
    ("vae_decoder/config.json", "block_out_channels"): ["x", 3, [4] * 10_000],
    ("vae_decoder/config.json", "scaling_factor"): ["x", [], 0, {}],
    ("vae_decoder/config.json", "latent_channels"): ["x", 0, -4, 10**12],
    ("vae_decoder/config.json", "latents_mean"): ["x", 3, [1], {}],
    ("text_encoder/config.json", "max_position_embeddings"): ["x", 0, -1, []],
    ("text_encoder/config.json", "vocab_size"): ["x", -1, []],
    ("tokenizer/tokenizer_config.json", "model_max_length"): ["x", -1, 0, [], 10**400],
    ("tokenizer/tokenizer_config.json", "tokenizer_class"): ["x", 3, []],
    ("sd_ort.json", "source"): [None, "x", 3, [1], {"folder": 3}, {"model": []}],
    ("sd_ort.json", "files"): [
        {"unet": None}, {"unet": {"model.onnx": None}}, "x", [1], {"unet": 3}, {"unet": {"model.onnx": {}}},
        {"unet": {"model.onnx": 1}},
    ],
    ("sd_ort.json", "components"): [None, {"unet": None}, "x", [1], {"unet": 3}],
    ("sd_ort.json", "options"): [None, "x", [1], {"target": 3}],
    ("sd_ort.json", "format"): ["x", 99, None],
}  # fmt: skip


def cases() -> Iterator[tuple[str, str, Any]]:
    """Yield (case name, file, damage). The damage is the content as bytes, or a (key, value) to set."""
    for file in READERS:
        for kind, content in BROKEN.items():
            yield f"{file} {kind}", file, content
    for (file, key), values in FIELDS.items():
        for value in values:
            yield f"{file} {key} = {str(value)[:30]}", file, (key, value)


def damage(folder: Path, file: str, content: Any) -> None:
    path = folder / file
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    key, value = content
    manifest = json.loads(path.read_text()) if path.is_file() else {"format": 1, "stage": "optimize"}
    path.write_text(json.dumps(manifest | {key: value}))
