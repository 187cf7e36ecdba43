"""Write a pipeline folder of 40 kB in milliseconds. Every command accepts it; the hostile tests damage copies of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sd_ort.checkpoints.random_weights import write_byte_tokenizer

VOCABULARY, WIDTH = 514, 8
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [4] * 4, "latent_channels": 4, "in_channels": 3,
       "out_channels": 3, "sample_size": 64, "scaling_factor": 0.18215}  # fmt: skip
CONFIGS = {
    "text_encoder": {
        "architectures": ["CLIPTextModel"], "hidden_size": WIDTH, "max_position_embeddings": 16,
        "vocab_size": VOCABULARY,
    },
    "unet": {
        "_class_name": "UNet2DConditionModel", "in_channels": 4, "out_channels": 4, "block_out_channels": [4, 4],
        "layers_per_block": 1, "sample_size": 8, "cross_attention_dim": WIDTH,
    },
    "vae_decoder": VAE,
}  # fmt: skip


def write(folder: Path) -> Path:
    """Write the whole pipeline to `folder`, which must not exist."""
    folder.mkdir(parents=True)
    dump(folder / "model_index.json", INDEX)
    (folder / "scheduler").mkdir()
    dump(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_byte_tokenizer(folder / "tokenizer", VOCABULARY)
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        dump(folder / name / "config.json", config)
        save(GRAPHS[name](), folder / name)
    return folder


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def save(model: onnx.ModelProto, component: Path) -> None:
    """Write model.onnx with its weights beside it."""
    onnx.save(
        model, component / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=100
    )


def text_encoder() -> onnx.ModelProto:
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"], axis=0)]
    return model(
        nodes,
        {"input_ids": (onnx.TensorProto.INT64, ["batch", "sequence"])},
        {"last_hidden_state": (onnx.TensorProto.FLOAT, ["batch", "sequence", WIDTH])},
        {"table": random(VOCABULARY, WIDTH)},
    )


def unet() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["sample", "kernel"], ["features"], pads=[1] * 4, kernel_shape=[3, 3]),
        helper.make_node("ReduceMean", ["encoder_hidden_states", "axes"], ["text"], keepdims=1),
        helper.make_node("Unsqueeze", ["text", "last"], ["told"]),
        helper.make_node("Add", ["features", "told"], ["sum"]),
        helper.make_node("Cast", ["timestep"], ["time"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["time", "small"], ["shift"]),
        helper.make_node("Add", ["sum", "shift"], ["moved"]),
        helper.make_node("Sigmoid", ["moved"], ["gate"]),
        helper.make_node("Mul", ["moved", "gate"], ["out_sample"]),
    ]
    latents = (onnx.TensorProto.FLOAT, ["batch", 4, "height", "width"])
    return model(
        nodes,
        {
            "sample": latents,
            "timestep": (onnx.TensorProto.FLOAT, [1]),
            "encoder_hidden_states": (onnx.TensorProto.FLOAT, ["batch", "sequence", WIDTH]),
        },
        {"out_sample": latents},
        {
            "kernel": random(4, 4, 3, 3),
            "axes": np.array([1, 2]),
            "last": np.array([3]),
            "small": np.array([1e-4], np.float32),
        },
    )


def vae_decoder() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["latent_sample", "kernel"], ["small"], pads=[1] * 4, kernel_shape=[3, 3]),
        helper.make_node("Resize", ["small", "", "scales"], ["sample"], mode="nearest"),
    ]
    return model(
        nodes,
        {"latent_sample": (onnx.TensorProto.FLOAT, ["batch", 4, "height", "width"])},
        {"sample": (onnx.TensorProto.FLOAT, ["batch", 3, "8*height", "8*width"])},
        {"kernel": random(3, 4, 3, 3), "scales": np.array([1, 1, 8, 8], np.float32)},
    )


GRAPHS = {"text_encoder": text_encoder, "unet": unet, "vae_decoder": vae_decoder}


def model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    outputs: Mapping[str, tuple[int, list[Any]]],
    weights: Mapping[str, np.ndarray],
    opset: int = 20,
) -> onnx.ModelProto:
    """A model of IR version 10; inputs and outputs are name -> (element type, axes)."""
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32) / 4
