"""Fuzz every format that sd-ort reads, and the arguments of its Python API: valid inputs, changed by structure.

    python scripts/checks/fuzz.py --minutes 60 --folder raw --log results/fuzz.txt

A case is a target and a number, which is the seed of its changes. What it raises must be an SdOrtError, within
LIMIT_S seconds of processor time, and no input file may change. `tests/hostile/test_fuzz.py` runs the first cases of
every target; this script runs as long as --minutes says, reports each failure with its target and number, and then
exits with 1.
"""

from __future__ import annotations

import argparse
import copy
import csv
import faulthandler
import io
import json
import logging
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from PIL import Image

from sd_ort.core.errors import SdOrtError, describe_error

LIMIT_S = 10.0
HANG_S = 1200.0  # by the clock: a case that does not end is shown by its stack
ODD_NUMBERS = [0, 1, -1, 2, 7, 99, 1 << 31, (1 << 63) - 1, -(1 << 63), 10**40, 0.5, -1.5, 1e308, 1e-320]
ODD_TEXTS = "|x|sample|moved|../../secret|/dev/zero|Sigmoid|Loop|com.microsoft|\0|NaN|é".split("|")
ODD_VALUES: list[Any] = [
    None, True, False, [], {}, [[]], {"": {}}, float("nan"), float("inf"), *ODD_NUMBERS, *ODD_TEXTS,
]  # fmt: skip


# --- Changes --------------------------------------------------------------------------------------------------------


def change_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value with one to three entries replaced, removed, renamed, nested or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        home, key = rng.choice(places)
        action = rng.choice(["replace", "replace", "replace", "remove", "rename", "nest", "repeat"])
        if action == "replace":
            home[key] = copy.deepcopy(rng.choice(ODD_VALUES))  # later changes must not change the choices
        elif action == "remove":
            del home[key]
        elif action == "rename" and isinstance(home, dict):
            home[rng.choice(ODD_TEXTS)] = home.pop(key)
        elif action == "nest":
            home[key] = rng.choice([[home[key]], {"x": home[key]}])
        elif isinstance(home, list):
            home.extend([home[key]] * rng.choice([1, 1000]))
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield value, key
        yield from _places(entry)


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return data cut, extended, or with some bytes changed."""
    at = rng.randrange(len(data) + 1)
    action = rng.choice(["cut", "flip", "flip", "insert", "zero", "empty", "repeat"])
    if action == "flip" and data:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(min(len(data), rng.choice([16, 256, len(data)])))] = rng.randrange(256)
        return bytes(changed)
    odd = {"cut": data[:at], "insert": data[:at] + rng.randbytes(9) + data[at:], "empty": b"",
           "repeat": data + data[:at]}  # fmt: skip
    return odd.get(action, data[:at] + bytes(len(data) - at))


def change_proto(rng: random.Random, model: Message) -> None:
    """Change one field of one message anywhere in `model`: clear it, set it, or repeat or drop an element."""
    message = rng.choice(_messages(model))
    field = rng.choice(list(message.DESCRIPTOR.fields))
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        if len(value) and rng.random() < 0.5:
            del value[rng.randrange(len(value))]
        elif len(value):
            value.extend([rng.choice(value)])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        message.ClearField(field.name)
    else:
        odd = {"str": rng.choice(ODD_TEXTS), "bytes": rng.randbytes(rng.randrange(9))}
        try:
            setattr(message, field.name, odd.get(type(value).__name__, rng.choice(ODD_NUMBERS)))
        except (ValueError, TypeError):  # out of the field's range
            message.ClearField(field.name)


def _messages(message: Message) -> list[Message]:
    messages = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            messages += [part for inner in (value if field.is_repeated else [value]) for part in _messages(inner)]
    return messages


def change_tensors(rng: random.Random, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with one to three of them renamed, removed, reshaped, converted, or with odd values."""
    changed = dict(tensors)
    for _ in range(rng.randint(1, 3)):
        if not changed:
            break
        name = rng.choice(sorted(changed))
        tensor = changed[name]
        action = rng.choice(["remove", "rename", "shape", "shape", "dtype", "nan", "add"])
        if action == "remove":
            del changed[name]
        elif action == "rename":
            odd = [name + ".x", name[1:], name.replace(".", "_"), name.replace("down", "up"), *ODD_TEXTS[:5]]
            changed[rng.choice(odd)] = changed.pop(name)
        elif action == "shape":
            size, shape = tensor.size, tensor.shape
            shapes = [(), (0,), (1,), (size,), (1, size), (*shape, 1), shape[::-1], (3, 0, 5)]
            changed[name] = np.resize(tensor, rng.choice(shapes))
        elif action == "dtype":
            changed[name] = tensor.astype(rng.choice([np.float16, np.float64, np.int64, np.uint8, np.bool_]))
        elif action == "nan" and tensor.dtype.kind == "f":
            changed[name] = np.full_like(tensor, rng.choice([np.nan, np.inf, 1e30]))
        else:
            changed[rng.choice(ODD_TEXTS[1:])] = tensor
    return changed


def write_safetensors(rng: random.Random, path: Path, tensors: Mapping[str, np.ndarray], **metadata: str) -> None:
    """Write changed tensors; every third file has a changed header, every third changed bytes."""
    from safetensors.numpy import save

    kind = rng.randrange(3)
    stored = change_tensors(rng, tensors) if kind == 0 else tensors
    data = save({name: np.ascontiguousarray(tensor) for name, tensor in stored.items()}, metadata or None)
    if kind == 1:
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(change_json(rng, json.loads(data[8 : 8 + length]))).encode()
        data = len(header).to_bytes(8, "little") + header + data[8 + length :]
    path.write_bytes(change_bytes(rng, data) if kind == 2 else data)


def write_json(rng: random.Random, path: Path) -> None:
    """Change a JSON file: its structure, at times its bytes."""
    text = path.read_bytes()
    changed = (
        json.dumps(change_json(rng, json.loads(text))).encode() if rng.random() < 0.85 else change_bytes(rng, text)
    )
    path.write_bytes(changed)


# --- Targets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Valid inputs. source, optimized: pipeline folders. pipeline: opened on a copy of `optimized`."""

    source: Path
    optimized: Path
    pipeline: Any


def open_inputs(source: Path, work: Path) -> Inputs:
    """Return the inputs of all targets; `source`: a small pipeline folder. Files are written to `work`."""
    from sd_ort import StableDiffusionPipeline
    from sd_ort.stages import optimize

    optimized = work / "optimized"
    optimize(source, optimized, target="portable")
    shutil.copytree(optimized, work / "opened")
    return Inputs(source, optimized, StableDiffusionPipeline.from_pretrained(work / "opened", "cpu", threads=1))


Target = Callable[[random.Random, Inputs, Path], Any]
JSON_FILES = (
    "model_index.json", "sd_ort.json", "unet/config.json", "vae_decoder/config.json", "text_encoder/config.json",
    "scheduler/scheduler_config.json",
)  # fmt: skip
TOKENIZER = ("vocab.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "merges.txt")
COMPONENTS = ("unet", "vae_decoder", "text_encoder")


def _copy(inputs: Inputs, work: Path, optimized: bool = False) -> Path:
    return Path(shutil.copytree(inputs.optimized if optimized else inputs.source, work / "in"))


def folder_json(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Configs, index and manifest of a folder that is opened and generates."""
    from sd_ort import StableDiffusionPipeline

    folder = _copy(inputs, work, optimized=True)
    for name in rng.sample(JSON_FILES, rng.randint(1, 2)):
        write_json(rng, folder / name)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1)
    pipeline("a", num_inference_steps=1, height=64, width=64, generator=0, progress=False)


def folder_stages(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Configs, index and manifest of a folder that is optimized, merged, explained or verified."""
    from sd_ort.inspect.explain import explain
    from sd_ort.inspect.verify import verify
    from sd_ort.optimize.merge import merge
    from sd_ort.stages import optimize

    optimized = rng.random() < 0.5
    folder = _copy(inputs, work, optimized)
    for name in rng.sample([name for name in JSON_FILES if (folder / name).is_file()], rng.randint(1, 2)):
        write_json(rng, folder / name)
    calls: list[Callable[[], Any]] = [
        lambda: optimize(folder, work / "out", target="portable"), lambda: merge(folder, work / "out"),
        lambda: explain(folder), lambda: verify(inputs.source, folder), lambda: verify(folder, inputs.optimized),
    ]  # fmt: skip
    rng.choice(calls)()


def tokenizer(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Files of a tokenizer, and a text."""
    from sd_ort.checkpoints.tokenizer import ClipTokenizer

    folder = Path(shutil.copytree(inputs.source / "tokenizer", work / "tokenizer"))
    names = [name for name in TOKENIZER if (folder / name).is_file()]
    path = folder / rng.choice(names)
    if path.suffix == ".json":
        write_json(rng, path)
    else:
        path.write_bytes(change_bytes(rng, path.read_bytes()))
    texts = ["a red circle", "\0", "é" * 99, *rng.sample(ODD_TEXTS, 2)]
    ClipTokenizer(folder).ids(texts)


def write_graph(rng: random.Random, path: Path) -> None:
    """Change one to three fields of a graph, at times its bytes."""
    model = onnx.load(path, load_external_data=False)
    for _ in range(rng.randint(1, 3)):
        change_proto(rng, model)
    path.write_bytes(model.SerializeToString() if rng.random() < 0.9 else change_bytes(rng, path.read_bytes()))


def graph(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Graphs that are optimized, explained, verified or run."""
    from sd_ort import StableDiffusionPipeline
    from sd_ort.inspect.explain import explain
    from sd_ort.inspect.verify import verify
    from sd_ort.stages import optimize

    optimized = rng.random() < 0.3
    folder = _copy(inputs, work, optimized)
    path = folder / rng.choice(COMPONENTS) / "model.onnx"
    write_graph(rng, path)
    calls: list[Callable[[], Any]] = [
        lambda: optimize(folder, work / "out", target="portable"), lambda: explain(folder),
        lambda: verify(inputs.source, folder), lambda: optimize(path, work / "out.onnx", target="portable"),
        lambda: StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1),
    ]  # fmt: skip
    rng.choice(calls)()


def lora_tensors(width: int = 8) -> dict[str, np.ndarray]:
    """Tensors of a LoRA with the names of diffusers and Kohya."""
    names = [
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_{}.weight",
        "unet.conv_in.lora_{}.weight",
    ]
    tensors: dict[str, np.ndarray] = {
        name.format(half): np.ones((2, width) if half == "A" else (width, 2), np.float32)
        for name in names
        for half in "AB"
    }
    for half in ("down", "up"):
        tensors[f"lora_unet_mid_block_attentions_0_proj_in.lora_{half}.weight"] = np.ones((2, width), np.float32)
    return {**tensors, "lora_unet_mid_block_attentions_0_proj_in.alpha": np.array(2, np.float32)}


def write_lora(rng: random.Random, path: Path) -> None:
    metadata = json.dumps(change_json(rng, {"unet.r": 4, "unet.lora_alpha": 8, "text_encoder.lora_alpha": 1}))
    write_safetensors(rng, path, lora_tensors(), **({"lora_adapter_metadata": metadata} if rng.random() < 0.5 else {}))


def lora(rng: random.Random, inputs: Inputs, work: Path) -> None:
    path = work / rng.choice(["a.safetensors", "a.safetensors", "a.safetensors", "a.bin"])
    write_lora(rng, path)
    try:
        inputs.pipeline.load_lora_weights(path, "a")
    finally:
        inputs.pipeline.unload_lora_weights()


def write_embedding(rng: random.Random, path: Path) -> None:
    tensors: dict[str, np.ndarray] = {rng.choice(["<word>", "emb_params", "clip_l"]): np.ones((2, 8), np.float32)}
    write_safetensors(rng, path, tensors)


def embedding(rng: random.Random, inputs: Inputs, work: Path) -> None:
    path = work / "word.safetensors"
    write_embedding(rng, path)
    try:
        inputs.pipeline.load_textual_inversion(path, rng.choice([None, None, "<w>", "", " ", "\0", "a"]))
    finally:
        inputs.pipeline.unload_textual_inversion()


def write_checkpoint(rng: random.Random, path: Path) -> None:
    """Write a checkpoint in one file, which has only some tensors."""
    tensors: dict[str, np.ndarray] = {
        "model.diffusion_model.input_blocks.0.0.weight": np.ones((4, 4, 3, 3), np.float32),
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": np.ones((4, 768), np.float32),
        "first_stage_model.decoder.conv_in.weight": np.ones((4, 4, 3, 3), np.float32),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": np.arange(77, dtype=np.int64),
    }
    write_safetensors(rng, path, tensors)


def single_file(rng: random.Random, inputs: Inputs, work: Path) -> None:
    from sd_ort.checkpoints.open import open_checkpoint

    path = work / "model.safetensors"
    write_checkpoint(rng, path)
    open_checkpoint(str(path))


def write_gguf(rng: random.Random, path: Path) -> None:
    """Write a GGUF file of two tensors in float32, and damage it."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def number(value: int, size: int) -> bytes:
        value = rng.choice([value] * 12 + [0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1])
        return (value % (1 << 8 * size)).to_bytes(size, "little")

    name = rng.choice(["input_blocks.0.0.weight", "double_blocks.0.img_attn.qkv.weight", "x", ""])
    metadata = text("general.architecture") + number(8, 4) + text(rng.choice(["sd1", "flux", "llama"]))
    metadata += text(f"comfy.gguf.orig_shape.{name}") + number(9, 4) + number(4, 4) + number(2, 8)
    metadata += number(4, 4) + number(32, 4)
    tensors = b"".join(
        text(n) + number(2, 4) + number(32, 8) + number(4, 8) + number(kind, 4) + number(0, 8)
        for n, kind in ((name, rng.choice([0, 1, 2, 8, 12])), ("img_in.weight", 0))
    )
    data = b"GGUF" + number(3, 4) + number(2, 8) + number(2, 8) + metadata + tensors + bytes(1000)
    path.write_bytes(change_bytes(rng, data) if rng.random() < 0.5 else data)


def gguf_file(rng: random.Random, inputs: Inputs, work: Path) -> None:
    from sd_ort.checkpoints import weight_file
    from sd_ort.checkpoints.open import open_checkpoint

    path = work / "model.gguf"
    write_gguf(rng, path)
    for entry in weight_file.read_entries(path).values():
        if weight_file.read_tensor(path, entry).shape != tuple(entry["shape"]):
            raise AssertionError(f"another shape than {entry}")
    open_checkpoint(str(path))


def write_arrays(rng: random.Random, path: Path) -> None:
    """Write recorded inputs, or statistics."""
    recorded: dict[str, np.ndarray] = {
        "unet/sample": np.ones((1, 4), np.float32),
        "unet/timestep/0": np.ones(1, np.int64),
    }
    statistics: dict[str, np.ndarray] = {"mu": np.ones(3), "sigma": np.eye(3)}
    buffer = io.BytesIO()
    tensors = change_tensors(rng, rng.choice([recorded, statistics]))
    save: Any = np.savez_compressed if rng.random() < 0.5 else np.savez
    save(buffer, **{name.replace("\0", "_") or "_": tensor for name, tensor in tensors.items()})
    path.write_bytes(change_bytes(rng, buffer.getvalue()) if rng.random() < 0.6 else buffer.getvalue())


def arrays(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Recorded inputs and statistics in .npz archives."""
    import onnx_ir as ir

    from sd_ort.benchmark.quality import read_statistics
    from sd_ort.checkpoints.recorded_inputs import check_recorded, load_recorded_inputs

    path = work / "arrays.npz"
    write_arrays(rng, path)
    values = [ir.Value(name="sample", shape=ir.Shape(["b", 4]), type=ir.TensorType(ir.DataType.FLOAT))]
    calls: list[Callable[[], Any]] = [
        lambda: read_statistics(path), lambda: check_recorded(path, ["unet"]),
        lambda: load_recorded_inputs(path, "unet", values),
    ]  # fmt: skip
    rng.choice(calls)()


def write_picture(rng: random.Random, path: Path) -> None:
    from sd_ort.pipelines.png import png_bytes

    image = Image.new(rng.choice(["RGB", "L", "RGBA", "P", "I;16", "1"]), (rng.randint(1, 40), 9))
    buffer = io.BytesIO()
    image.save(
        buffer, rng.choice(["PNG", "PNG", "TIFF"]) if image.mode != "RGB" else rng.choice(["PNG", "JPEG", "BMP"])
    )
    data = buffer.getvalue() if rng.random() < 0.5 else png_bytes(image.convert("RGB"), {"prompt": "x" * 99})
    path.write_bytes(change_bytes(rng, data))


def picture(rng: random.Random, inputs: Inputs, work: Path) -> None:
    from sd_ort.core.image_file import read_image
    from sd_ort.pipelines.png import read_png_text

    path = work / "picture.png"
    write_picture(rng, path)
    read_png_text(path)
    read_image(path)


def benchmark_report() -> dict[str, Any]:
    """A report with one engine that ran and one that failed."""
    times = {"median": 1.0, "mean": 1.0, "min": 0.9, "max": 1.1, "values": [0.9, 1.0, 1.1]}
    row = {
        "label": "raw", "batch": 1, "status": "ok", "model": "demo", "engine": "onnxruntime", "stage": "export",
        "target": "", "precision": "fp32", "load_s": 1.0, "first_run_s": 0.5, "peak_memory_MB": 800.0, "psnr_db": 60.0,
        "step_ms": times, "image_s": times, "step_speedup": times, "image_speedup": times, "width": 64, "height": 64,
        "total_ms": 1.0, "clock": "nodes", "trace": "trace-a.json", "by_site": [],
        "by_operator": [{"name": "MatMul", "ms": 1.0, "share": 0.5, "count": 1}],
        "Offline": {"images_per_s": 1.0}, "SingleStream": {"latency_s": {"p50": 1.0, "p90": 1.0, "p99": 1.0}},
        "Server": {"latency_s": {"p50": 1.0, "p90": 1.0, "p99": 1.0}, "rate_per_s": 1.0, "mean_batch": 1.0},
        "quality": {"fidelity_percent": 1.0, "clip_score": 1.0, "fid": "none"},
    }  # fmt: skip
    settings = {"component": None, "provider": "cpu", "steps": 20, "height": None, "width": None, "guidance": 3.0,
                "prompt": "a", "seed": 0, "threads": 2, "tuning": False, "batches": [1]}  # fmt: skip
    machine = {"cpu": "A", "cores": 2, "memory_GB": 8.0, "gpus": [], "system": "Linux"}
    return {
        "format": 2, "date": "", "command": "", "commit": None, "machine": machine, "versions": {"onnxruntime": "1"},
        "settings": settings, "notes": ["x"], "finished": True, "baseline": "raw",
        "engines": [row, {**row, "label": "b", "batch": 4},
                    {"label": "c", "batch": 1, "status": "failed", "reason": "x"}],
    }  # fmt: skip


def report(rng: random.Random, inputs: Inputs, work: Path) -> None:
    from sd_ort.benchmark import report as page

    kind = rng.choice(sorted(page.SECTIONS))
    path = work / f"{kind}.json"
    path.write_text(json.dumps(benchmark_report()))
    write_json(rng, path)
    if rng.random() < 0.3:
        rows, notes = page.compare(benchmark_report(), page.read(work)[kind], 0.05, ratios=rng.random() < 0.5)
        page.comparison_table(rows, notes)
    else:
        page.write(work)


def texts(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Captions and lists of prompts."""
    from sd_ort.benchmark.mlperf import read_captions
    from sd_ort.serving.prompt_lists import read_prompts

    table = io.StringIO()
    csv.writer(table, delimiter="\t").writerows([["id", "caption"], ["1", "a"], ["2", "b"]])
    captions = json.dumps(change_json(rng, {"annotations": [{"image_id": i, "caption": "a"} for i in range(3)]}))
    name, text = rng.choice([("a.json", captions), ("a.tsv", table.getvalue()), ("a.txt", "a\nb\n")])
    path = work / name
    path.write_bytes(change_bytes(rng, text.encode()) if rng.random() < 0.7 else text.encode())
    read_prompts(path) if name == "a.txt" and rng.random() < 0.5 else read_captions(path)


def tuning_file(rng: random.Random, inputs: Inputs, work: Path) -> None:
    from sd_ort.runtime import tuning

    record = {
        "format": 1, "validators": {"arch": "gfx942", "driver": "", "library": "", "onnxruntime": ""},
        "operators": {"GroupNorm": {"1": {"candidate": "a", "microseconds": 1.0, "default_microseconds": 2.0}}},
        "onnxruntime": [],
    }  # fmt: skip
    path = work / "results.json"
    path.write_text(json.dumps(record))
    write_json(rng, path)
    tuning.table(tuning.read(path))


def request(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Bodies of requests to the server."""
    from sd_ort.serving.api import Limits, parse_request
    from sd_ort.serving.image_jobs import ModelInfo

    fields = {"prompt": "a", "negative_prompt": "", "n": 2, "size": "64x64", "steps": 2, "guidance": 7.5, "seed": 1,
              "response_format": "b64_json", "output_format": "png", "model": "x", "user": "y"}  # fmt: skip
    body = json.dumps(change_json(rng, fields)).encode()
    parse_request(change_bytes(rng, body) if rng.random() < 0.3 else body, ModelInfo(512, 8, 25, 7.5, 1000), Limits())


def installed(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Markers of extensions in applications."""
    from sd_ort.integrations.managed_folder import MARKER, install_folder, uninstall_folder

    target = work / "extension"
    files = {"a.py": b"1", "b/c.json": b"2"}
    install_folder(target, files)
    write_json(rng, target / MARKER)
    uninstall_folder(target) if rng.random() < 0.5 else install_folder(target, files)


def arguments(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Arguments of a call of the Python API: one or two odd ones."""
    from dataclasses import fields

    from sd_ort.pipelines.request import Request

    names = [field.name for field in fields(Request) if field.init and field.name not in ("progress", "return_dict")]
    odd: list[Any] = [
        *ODD_VALUES, np.zeros(3), np.nan, "a cat", ["a"], [None], (64, 64), b"x", object(), {"scale": "x"},
    ]  # fmt: skip
    valid = {"prompt": "a", "num_inference_steps": 1, "height": 64, "width": 64, "generator": 0, "progress": False}
    changes = {name: rng.choice(odd) for name in rng.sample(names, rng.randint(1, 2))}
    too_long = (1 << 31, (1 << 63) - 1, 10**40)
    if any(changes.get(name) in (7, 99, *too_long) for name in ("num_images_per_prompt", "num_inference_steps")
           if isinstance(changes.get(name), int)):  # fmt: skip
        changes["num_inference_steps"] = 10**40  # only what is refused: else it would be generated
    inputs.pipeline(**{**valid, **changes})


def adapters(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """Arguments of other methods of the Python API."""
    from sd_ort import StableDiffusionPipeline

    pipeline = inputs.pipeline
    odd: Any = rng.choice([*ODD_VALUES, np.zeros((2, 8)), ["a"], b"x", object(), work])
    options: dict[str, Any] = {rng.choice(["threads", "device", "torch_dtype", "low_memory", "provider", "x"]): odd}
    calls: list[Callable[[], Any]] = [
        lambda: pipeline.load_lora_weights(odd), lambda: pipeline.set_adapters(odd),
        lambda: pipeline.set_adapters("a", odd),
        lambda: pipeline.load_textual_inversion(odd), lambda: pipeline.load_textual_inversion({"x": odd}),
        lambda: pipeline.load_textual_inversion({"x": np.ones((1, 8))}, odd), lambda: pipeline.fuse_lora(odd),
        lambda: pipeline.load_lora_weights({"unet.a.lora_A.weight": odd, "unet.a.lora_B.weight": odd}),
        lambda: pipeline.delete_adapters(odd), lambda: pipeline.set_ip_adapter_scale(odd),
        lambda: StableDiffusionPipeline.from_pretrained(odd),
        lambda: StableDiffusionPipeline.from_pretrained(inputs.optimized, **options),
        lambda: StableDiffusionPipeline.from_single_file(odd),
    ]  # fmt: skip
    try:
        rng.choice(calls)()
    finally:
        pipeline.unload_lora_weights()
        pipeline.unload_textual_inversion()


def write_json_file(rng: random.Random, path: Path) -> None:
    path.write_text(json.dumps(benchmark_report()))
    write_json(rng, path)


def write_prompts(rng: random.Random, path: Path) -> None:
    path.write_bytes(change_bytes(rng, b"a\nb\n"))


# What {NAME} stands for in LINES: file name, writer.
FILES: dict[str, tuple[str, Callable[[random.Random, Path], None]]] = {
    "lora": ("a.safetensors", write_lora), "embedding": ("word.safetensors", write_embedding),
    "checkpoint": ("model.safetensors", write_checkpoint), "arrays": ("arrays.npz", write_arrays),
    "gguf": ("model.gguf", write_gguf),
    "picture": ("picture.png", write_picture), "report": ("results/benchmark.json", write_json_file),
    "prompts": ("prompts.txt", write_prompts), "graph": ("in/unet/model.onnx", write_graph),
    "config": ("in/unet/config.json", write_json), "index": ("in/model_index.json", write_json),
    "scheduler": ("in/scheduler/scheduler_config.json", write_json), "manifest": ("in/sd_ort.json", write_json),
    "vocabulary": ("in/tokenizer/vocab.json", write_json),
}  # fmt: skip
GENERATE = "generate a --model in --steps 1 --height 64 --width 64 --out out"
LINES = (
    *(f"{GENERATE} {rest}" for rest in (
        "--lora {lora}", "--lora {lora}:0.5", "--embedding {embedding}", "--image {picture}",
        "--image {picture} --mask {picture}", "--control-image {picture}", "--ip-adapter-image {picture}",
        "{config}", "{index}", "{scheduler}", "{manifest}", "{vocabulary}", "{graph}")),
    "generate --prompts {prompts} --model in --steps 1 --out out", "generate a --model {checkpoint} --out out",
    "optimize in out {graph}", "optimize in out {config} {index}",
    "optimize {checkpoint} out", "optimize in out --float16 --target cuda --inputs {arrays}",
    "optimize in/unet/model.onnx out.onnx {graph}", "optimize in out --ip-adapter {lora}",
    "optimize in out --vae {checkpoint}",
    "verify good in", "verify good in --inputs {arrays}", "verify good in {graph}", "verify in {manifest}",
    "explain in {graph}", "explain in/unet/model.onnx {graph}", "explain in", "merge in out {scheduler}",
    "merge in out",
    "extract in out --component unet --from features --to moved {graph}", "tune in {manifest}",
    "tune --show in",
    "export {checkpoint} out",
    "optimize {gguf} out", "generate a --model {gguf} --out out",
    "report results {report}", "report --compare results results {report}",
    "install-host diffusers in {index}", "uninstall-host diffusers in {index}",
)  # fmt: skip
# Options that may get odd values: numbers and names, not places to write to or how much to do.
_FIXED = {"num_images", "replicas", "gpus", "threads", "batch", "runs"}


def commands(rng: random.Random, inputs: Inputs, work: Path) -> None:
    """A command line with a damaged file, an option with an odd value, or both. It must write nothing if it fails."""
    import click
    from click.testing import CliRunner

    from sd_ort.cli import cli

    _copy(inputs, work, optimized=rng.random() < 0.4)
    (work / "results").mkdir()
    line = rng.choice(LINES).format_map(_Files(rng, work)).split()
    places = ("in", "in/unet/model.onnx", "out", "out.onnx", "results")
    named = {"good": str(inputs.source), **{name: str(work / name) for name in places}}
    arguments = [named.get(part, part) for part in line if part != "@"]
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    options = [
        option for option in command.params
        if isinstance(option, click.Option) and not isinstance(option.type, click.Path) and option.name not in _FIXED
    ]  # fmt: skip
    if rng.random() < 0.5 and options:
        option = rng.choice(options)
        name = rng.choice([*option.opts, *option.secondary_opts])
        arguments += [name] if option.is_flag else [name, str(rng.choice([*ODD_NUMBERS, *ODD_TEXTS, "nan", "-inf"]))]
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        if any((work / name).exists() for name in ("out", "out.onnx")):
            raise AssertionError(f"{arguments} failed and left its output") from result.exception
        raise result.exception
    if result.exit_code not in (0, 2):  # click's own errors; others are exceptions
        raise AssertionError(f"{arguments} exits with {result.exit_code}")


class _Files(dict[str, str]):
    """Writes a damaged file when its name is looked up: its path, or "@" for one in the folder `in`."""

    def __init__(self, rng: random.Random, work: Path) -> None:
        self.rng, self.work = rng, work

    def __missing__(self, key: str) -> str:
        name, write = FILES[key]
        if not name.startswith("in/") or (self.work / name).is_file():
            write(self.rng, self.work / name)
        return "@" if name.startswith(("in/", "results/")) else str(self.work / name)


# Target -> how many of its cases belong to the suite.
TARGETS: dict[Target, int] = {
    folder_json: 150, folder_stages: 120, graph: 200, tokenizer: 150, lora: 150, embedding: 120, single_file: 80,
    arrays: 150, picture: 120, report: 150, texts: 80, tuning_file: 80, request: 120, installed: 60, arguments: 200,
    adapters: 150, commands: 100, gguf_file: 150,
}  # fmt: skip


# --- Cases ----------------------------------------------------------------------------------------------------------


def run_case(target: Target, number: int, inputs: Inputs) -> str | None:
    """Run a case; return what is wrong: a raw exception, more than LIMIT_S seconds, or a changed input file."""
    rng = random.Random(f"{target.__name__} {number}")
    before = _stamps(inputs)
    start = time.process_time()
    with tempfile.TemporaryDirectory(prefix="sd-ort-fuzz-") as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(rng, inputs, Path(work))
        except SdOrtError as error:
            line, _ = describe_error(error)
            if "bug in sd-ort" in line or not line:
                return line or "an error without a message"
        except Exception as error:
            if "bug in sd-ort" in describe_error(error)[0]:
                return "".join(traceback.format_exception(error)[-3:])
    seconds = time.process_time() - start
    if seconds > LIMIT_S:
        return f"{seconds:.0f} s"
    return None if _stamps(inputs) == before else "an input file was changed"


def _stamps(inputs: Inputs) -> list[tuple[str, int, int]]:
    stamps = []
    for folder in (inputs.source, inputs.optimized):
        for parent, _, names in os.walk(folder):
            for name in names:
                status = os.lstat(os.path.join(parent, name))
                stamps.append((f"{parent}/{name}", status.st_size, status.st_mtime_ns))
    return sorted(stamps)


def main() -> None:
    from sd_ort.runtime.machine import commit, machine, versions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--folder", type=Path, required=True, help="A small pipeline folder to damage copies of.")
    parser.add_argument("--target", choices=[target.__name__ for target in TARGETS], help="This one alone.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first case of each target.")
    parser.add_argument("--log", type=Path, help="File for the report [default: standard output].")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    targets = [target for target in TARGETS if options.target in (None, target.__name__)]
    counts = dict.fromkeys((target.__name__ for target in targets), 0)
    end, failures = time.monotonic() + 60 * options.minutes, 0
    command = shlex.join(["python", "scripts/checks/fuzz.py", *sys.argv[1:]])
    head = f"{machine()}\n{versions()}, commit {commit()}\n$ {command}"  # before the log changes a tracked file
    log = options.log.open("w") if options.log else sys.stdout
    print(head, file=log, flush=True)
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = work  # not the user's
        inputs = open_inputs(options.folder, Path(work))
        start = time.process_time()
        while time.monotonic() < end:
            for target in targets:
                number = options.first + counts[target.__name__]
                counts[target.__name__] += 1
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                if wrong := run_case(target, number, inputs):
                    failures += 1
                    print(f"{target.__name__} {number}: {wrong}", file=log, flush=True)
        seconds = time.process_time() - start
    each = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"{sum(counts.values())} cases in {seconds:.0f} s of processor time, {failures} failures: {each}", file=log)
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
