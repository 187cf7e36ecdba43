"""Folders without config.json, as diffusers' old conversion script wrote them: read, optimized and run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from image_metrics import psnr

from scripts.fixtures import graph_fixtures
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.config_inference import infer_configs
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.inspect.verify import verify
from sd_ort.stages import optimize

pytestmark = pytest.mark.usefixtures("one_thread")
PARTS = {
    "sd15-tiny-eager-14": ("text_encoder", "unet", "vae_encoder", "vae_decoder"),
    "sdxl-tiny-torchscript-17": ("text_encoder", "unet"),
}
GUESSED = {"sample_size", "scaling_factor", "addition_time_embed_dim", "projection_class_embeddings_input_dim"}


@pytest.mark.parametrize("name", PARTS)
def test_what_a_graph_shows_is_what_its_config_said(tmp_path: Path, name: str, caplog: Any) -> None:
    folder = tmp_path / "old"
    for part in PARTS[name]:
        (folder / part).mkdir(parents=True)
        onnx.save(graph_fixtures.load(f"{name}.{part}"), folder / part / MODEL)
    with caplog.at_level(logging.WARNING):
        configs = infer_configs(folder)
        assert infer_configs(folder) is configs
    assert caplog.text.count("no config.json") == 1
    assert set(configs) == set(PARTS[name])
    for part, config in configs.items():
        expected = PRESETS[name.partition("-tiny")[0] + "-tiny"].models[MODEL_OF.get(part, part)]
        shown = {key: value for key, value in config.items() if key not in GUESSED and key in expected}
        assert len(shown) > 2
        assert shown == {key: expected[key] for key in shown}


# Inputs as the old script declares them, every axis open; as few nodes as show what is read.
GRAPHS = {
    "text_encoder": """(int32[batch,sequence] input_ids) => (float[batch,sequence,8] last_hidden_state) {
        h = Gather (words, input_ids)  w = Softmax (h)  last_hidden_state = Add (h, w) }""",
    "unet": """(float[batch,channels,height,width] sample, int64[batch] timestep,
               float[batch,sequence,8] encoder_hidden_states) => (float[batch,4,h,w] out_sample) {
        a = Conv <strides = [2, 2], kernel_shape = [2, 2]> (sample, down)
        time = Cast <to = 1> (timestep)  small = Mul (time, little)  t = Reshape (small, column)
        mean = ReduceMean <axes = [1, 2]> (encoder_hidden_states)  text = Reshape (mean, column)
        b = Add (a, t)  d = Add (b, text)
        e = Resize <mode = "nearest"> (d, , double)  out_sample = Conv <kernel_shape = [1, 1]> (e, up) }""",
    "vae_decoder": """(float[batch,channels,height,width] latent_sample) => (float[batch,3,h,w] sample) {
        a = Conv <kernel_shape = [1, 1]> (latent_sample, up)
        b = Resize <mode = "nearest"> (a, , double)  c = Conv <kernel_shape = [1, 1]> (b, up)
        d = Resize <mode = "nearest"> (c, , double)  e = Conv <kernel_shape = [1, 1]> (d, up)
        f = Resize <mode = "nearest"> (e, , double)  g = Conv <kernel_shape = [1, 1]> (f, up)
        sample = Conv <kernel_shape = [1, 1]> (g, rgb) }""",
    "vae_encoder": """(float[batch,channels,height,width] sample) => (float[batch,4,h,w] latent_sample) {
        a = Conv <strides = [2, 2], kernel_shape = [2, 2]> (sample, pixels)
        b = Conv <strides = [2, 2], kernel_shape = [2, 2]> (a, down)
        c = Conv <strides = [2, 2], kernel_shape = [2, 2]> (b, down)
        d = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (c, wide)  mean, log = Split <axis = 1> (d)
        n = RandomNormalLike (mean)  latent_sample = Add (mean, n) }""",
}


def make_small_folder(path: Path, graphs: Mapping[str, str] = GRAPHS) -> Path:
    random = np.random.default_rng(0)
    shapes = {"words": (514, 8), "down": (4, 4, 2, 2), "up": (4, 4, 1, 1), "rgb": (3, 4, 1, 1), "pixels": (4, 3, 2, 2)}
    shapes["wide"] = (8, 4, 3, 3)
    weights = {name: random.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}
    weights |= {"little": np.float32(1e-3), "column": np.array([-1, 1, 1, 1]), "double": np.array([1, 1, 2, 2], "f")}
    weights |= {"first": np.array([0]), "second": np.array([2]), "fourth": np.array([4])}
    open_preset("sd15-tiny", 0).write_configs(make(path))
    (path / "model_index.json").write_text(json.dumps(INDEX))
    for name, text in graphs.items():
        model = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : 14]> {name} {text}')
        used = {value for node in model.graph.node for value in node.input}
        model.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for n, w in weights.items() if n in used)
        onnx.save(model, make(path / name) / MODEL)
    return path


def make(path: Path) -> Path:
    path.mkdir()
    return path


INDEX = {
    "_class_name": "OnnxStableDiffusionPipeline",
    "scheduler": ["diffusers", "PNDMScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    **{name: ["diffusers", "OnnxRuntimeModel"] for name in GRAPHS},
}


def test_old_folders_are_optimized_verified_and_run(tmp_path: Path) -> None:
    source = make_small_folder(tmp_path / "old")
    optimize(source, tmp_path / "out", target="portable")
    report = verify(source, tmp_path / "out")
    assert report["passed"]
    assert [note for note in report["notes"] if "vae_encoder: outputs NOT compared, since its RandomNormal" in note]
    settings: dict[str, Any] = {"height": 64, "width": 32, "num_inference_steps": 2, "output_type": "np"}
    images = []
    for folder in (source, tmp_path / "out"):
        for device_loop in (False, True):
            pipeline = StableDiffusionPipeline.from_pretrained(folder, device_loop=device_loop)
            images.append(np.asarray(pipeline("a cat", generator=1, **settings).images))
            assert psnr(images[0], images[-1]) > 80
    assert images[0].shape == (1, 64, 32, 3)
    assert component_config(tmp_path / "out", "unet") == component_config(source, "unet", required=True)


FIXED = 'Resize <mode = "nearest"> (d, , double)'
FOLLOWING = """Shape (sample)  e2 = Shape (d)  e3 = Slice (e2, first, second)  e4 = Slice (e1, second, fourth)
        e5 = Concat <axis = 0> (e3, e4)  e = Resize <mode = "nearest"> (d, , , e5)"""


def test_sizes_that_do_not_halve_are_refused_where_the_graph_doubles(tmp_path: Path) -> None:
    """Resizes to the size of another value, as diffusers' `upsample_size` is traced, draw any multiple of 8."""
    settings: dict[str, Any] = {"height": 72, "width": 64, "num_inference_steps": 1, "output_type": "np"}
    fixed = StableDiffusionPipeline.from_pretrained(make_small_folder(tmp_path / "fixed"))
    with pytest.raises(InputError, match="multiples of 16: this UNet's graph doubles images that no skip"):
        fixed("a cat", **settings)
    with pytest.raises(InputError, match=r"must be multiples of 8"):
        fixed("a cat", **settings | {"height": 60})
    assert FIXED in GRAPHS["unet"]
    unet = GRAPHS["unet"].replace(f"e = {FIXED}", f"e1 = {FOLLOWING}")
    following = make_small_folder(tmp_path / "following", GRAPHS | {"unet": unet})
    optimize(following, tmp_path / "out", target="portable")
    for folder in (following, tmp_path / "out"):
        pipeline = StableDiffusionPipeline.from_pretrained(folder)
        assert pipeline("a cat", **settings).images.shape == (1, 72, 64, 3)
        with pytest.raises(InputError, match="must be multiples of 8"):
            pipeline("a cat", **settings | {"height": 60})


def test_missing_config_values_are_required(tmp_path: Path) -> None:
    folder = make_small_folder(tmp_path / "old")
    shutil.copy(folder / "text_encoder" / MODEL, folder / "unet" / MODEL)
    with pytest.raises(InputError, match="does not show its resolutions"):
        component_config(folder, "unet", required=True)
    with pytest.raises(InputError, match=r"unet.config\.json"):
        component_config(tmp_path, "unet", required=True)
