"""Shallow steps (DeepCache): what they compute is what PyTorch computes with the deep features of an earlier step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_type import Cli, success
from PIL import Image

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPAGPipeline, StableDiffusionPipeline, demo
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr
from sd_ort.graphs.load import load, serialize_over_data
from sd_ort.graphs.step_cache import DEEP_FEATURES, keep_shallow_part, return_deep_features
from sd_ort.pipelines.png import read_png_text
from sd_ort.runtime.session import ModelOverride, create_session
from sd_ort.stages import optimize

GOLD = demo.MODEL_DIR.parent / "loras" / "gold.safetensors"
CALL: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 12, "output_type": "np"}


@pytest.fixture(scope="module")
def folder(demo_folder: Path) -> Path:
    return demo_folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1)


@pytest.fixture(autouse=True)
def without_cache(pipeline: StableDiffusionPipeline) -> None:
    pipeline.disable_cache()


def draw(pipe: Any, seed: int = 3, **changes: Any) -> np.ndarray:
    image: np.ndarray = pipe(**{**CALL, "generator": seed, "progress": False} | changes).images[0]
    return image * 255


class ReplacedFeatures:
    """PyTorch's U-Net with the deep features of its last full step, computed whole in every step."""

    def __init__(self, unet: torch.nn.Module, interval: int, branch: int) -> None:
        layers = [layer for block in unet.up_blocks for layer in block.resnets]  # type: ignore[union-attr]
        self.layer, self.interval, self.step = layers[-1 - branch], interval, -1
        self.channels = [*(layer.in_channels for layer in layers)][-1 - branch] - self._skip_channels(unet, branch)
        self.features: torch.Tensor | None = None
        unet.register_forward_pre_hook(self.count)
        self.layer.register_forward_pre_hook(self.replace)

    @staticmethod
    def _skip_channels(unet: Any, branch: int) -> int:
        skips = [unet.conv_in.out_channels]
        for block in unet.down_blocks:
            skips += [layer.out_channels for layer in block.resnets]
            skips += [layer.out_channels for layer in block.downsamplers or ()]
        return skips[branch]

    def count(self, *_: Any) -> None:
        self.step += 1

    def replace(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        joined, *rest = inputs
        deep, skip = joined.split([self.channels, joined.shape[1] - self.channels], 1)
        if self.step % self.interval == 0:
            self.features = deep
        assert self.features is not None
        return (torch.cat([self.features, skip], 1), *rest)


@pytest.mark.parametrize(("interval", "branch"), [(2, 0), (3, 4)])
def test_equals_pytorch(pipeline: StableDiffusionPipeline, interval: int, branch: int) -> None:
    """With guidance, over 12 steps; branches inside the last block and below an upsampling."""
    theirs = torch_pipeline("demo")
    ReplacedFeatures(theirs.unet, interval, branch)
    expected = theirs(**{**CALL, "generator": torch.Generator().manual_seed(3), "guidance_scale": demo.GUIDANCE,
                         "height": demo.HEIGHT, "width": demo.WIDTH}).images[0] * 255  # fmt: skip
    pipeline.enable_cache(interval, branch)
    assert pipeline.is_cache_enabled
    ours = draw(pipeline, guidance_scale=demo.GUIDANCE)
    assert psnr(ours, expected) > 55
    pipeline.disable_cache()
    assert psnr(draw(pipeline, guidance_scale=demo.GUIDANCE), expected) < 50


def test_the_cache_ends_with_disable_cache(pipeline: StableDiffusionPipeline) -> None:
    uncached = draw(pipeline)
    pipeline.enable_cache(500)
    cached = draw(pipeline)
    assert psnr(cached, uncached) < 40
    pipeline.enable_cache(2)
    steps = pipeline._shallow_steps([])
    assert steps is not None
    assert [steps.is_full(index) for index in range(5)] == [True, False, True, False, True]
    pipeline.disable_cache()
    np.testing.assert_array_equal(draw(pipeline), uncached)
    assert [name for name in pipeline.models.opened if name.startswith("unet ") and "shallow" in name] == []


@pytest.mark.parametrize(("options", "branch"), [
    ({"target": "cpu"}, 0), ({"target": "cpu", "dtype": "bfloat16"}, 3), ({"target": "portable"}, 4),
])  # fmt: skip
def test_a_shallow_step_with_its_own_features_is_a_full_one(
    tmp_path: Path, folder: Path, options: dict[str, str], branch: int
) -> None:
    if options != {"target": "cpu"}:
        optimize("demo", tmp_path / "other", components=["unet"], **options)  # type: ignore[arg-type]
        folder = tmp_path / "other"
    path, random = folder / "unet" / "model.onnx", np.random.default_rng(0)
    feed = {"sample": random.normal(size=(2, 4, 16, 8)), "timestep": np.array([400]),
            "encoder_hidden_states": random.normal(size=(2, 24, 128))}  # fmt: skip
    sessions = [create_session(path, "cpu")]
    for edit in (return_deep_features, keep_shallow_part):
        model = load(path)
        edit(model, branch)
        graph = serialize_over_data(model, path.parent)
        sessions.append(create_session(path, "cpu", override=ModelOverride(graph=graph)))
    typed = {i.name: feed[i.name].astype(np.int64 if "int" in i.type else np.float32) for i in sessions[0].get_inputs()}
    plain = sessions[0].run(["out_sample"], typed)[0]
    out, features = sessions[1].run(["out_sample", DEEP_FEATURES], typed)
    np.testing.assert_array_equal(out, plain)
    names = {i.name for i in sessions[2].get_inputs()}
    shallow = sessions[2].run(None, {n: v for n, v in typed.items() if n in names} | {DEEP_FEATURES: features})[0]
    np.testing.assert_allclose(shallow, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_shallow_part_has_few_nodes_and_the_same_weights(tmp_path: Path, folder: Path, target: str) -> None:
    """No Shape of a deep value keeps the nodes that compute it; initializers are places in the folder's own file."""
    if target != "cpu":
        optimize("demo", tmp_path / "out", target=target, components=["unet"], dtype="float16")
        folder = tmp_path / "out"
    full, shallow = (load(folder / "unet" / "model.onnx") for _ in range(2))
    keep_shallow_part(shallow, 0)
    assert len(shallow.graph) < len(full.graph) / 4
    places = [
        {(n, v.const_value.offset) for n, v in model.graph.initializers.items() if hasattr(v.const_value, "offset")}
        for model in (full, shallow)
    ]
    assert places[1] < places[0]
    sizes = [sum(v.const_value.nbytes for v in model.graph.initializers.values()) for model in (full, shallow)]  # type: ignore[union-attr]
    assert sizes[1] < 0.06 * sizes[0]


def test_a_lora_changes_shallow_steps_too(pipeline: StableDiffusionPipeline) -> None:
    """The weights of the shallow graph are those of the LoRA: equal to shallow steps of PyTorch with it."""
    theirs = torch_pipeline("demo")
    theirs.load_lora_weights(str(GOLD.parent), weight_name=GOLD.name)
    ReplacedFeatures(theirs.unet, 3, 1)
    expected = theirs(**{**CALL, "generator": torch.Generator().manual_seed(3), "guidance_scale": demo.GUIDANCE,
                         "height": demo.HEIGHT, "width": demo.WIDTH}).images[0] * 255  # fmt: skip
    pipeline.enable_cache(3, 1)
    before = draw(pipeline, guidance_scale=demo.GUIDANCE)
    pipeline.load_lora_weights(GOLD, "gold")
    try:
        assert psnr(draw(pipeline, guidance_scale=demo.GUIDANCE), expected) > 50
    finally:
        pipeline.unload_lora_weights()
    np.testing.assert_array_equal(draw(pipeline, guidance_scale=demo.GUIDANCE), before)


def test_img2img_no_guidance_and_callbacks(pipeline: StableDiffusionPipeline) -> None:
    """Fewer steps of a schedule, and a change of guidance within a call, after which rows and features are others."""
    start = Image.fromarray(draw(pipeline).astype(np.uint8))
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)
    arguments: dict[str, Any] = {"image": start, "strength": 0.6, "num_inference_steps": 20}
    uncached = draw(other, **arguments)
    other.enable_cache(2)
    assert 20 < psnr(draw(other, **arguments), uncached) < 90
    other.disable_cache()

    def stop_guidance(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == 6:
            pipe._guidance_scale = 0.0
        return tensors

    pipeline.enable_cache(2)
    for changes in ({"guidance_scale": 1.0}, {"callback_on_step_end": stop_guidance}):
        assert np.isfinite(draw(pipeline, **changes)).all()


def test_what_is_refused(pipeline: StableDiffusionPipeline, sd_ort: Cli, folder: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((1,), "cache_interval 1 keeps nothing"), ((2.5,), "an integer"), ((3, -1), "cache_branch_id -1"),
        ((3, 99), "12 skip connections"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            pipeline.enable_cache(*arguments)  # type: ignore[arg-type]
        assert not pipeline.is_cache_enabled
    pipeline.enable_cache(3)
    with pytest.raises(InputError, match=r"4 steps are too few .* as LCM and Turbo"):
        draw(pipeline, num_inference_steps=4)
    pipeline.scheduler = "lcm"
    try:
        with pytest.raises(InputError, match="LCM models take few steps"):
            draw(pipeline)
    finally:
        pipeline.scheduler = None
    pipeline.disable_cache()
    config = pipeline.unet_config
    pipeline.unet_config = {**config, "time_cond_proj_dim": 256}
    try:
        with pytest.raises(InputError, match="is an LCM model"):
            pipeline.enable_cache(3)
    finally:
        pipeline.unet_config = config
    code, _, err = sd_ort("generate", "a", "--model", folder, "--steps", 5, "--cache", 3, "--out", tmp_path / "a.png")
    assert code == 2
    assert "5 steps are too few" in err
    assert list(tmp_path.iterdir()) == []


def test_the_command(sd_ort: Cli, folder: Path, tmp_path: Path, pipeline: StableDiffusionPipeline) -> None:
    arguments = ("--model", folder, "--seed", 3, "--cache", 3, "--steps", 12, "--threads", 1, "--provider", "cpu")
    success(sd_ort, "generate", "a red circle", *arguments, "--out", tmp_path / "a.png")
    assert read_png_text(tmp_path / "a.png")["cache"] == "3"
    pipeline.enable_cache(3)
    ours = pipeline("a red circle", num_inference_steps=12, generator=3, progress=False).images[0]
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(ours))


LOOPED: tuple[dict[str, Any], ...] = {}, {"num_inference_steps": 14}, {"guidance_scale": 1.0}


@pytest.fixture(scope="module")
def host_images(pipeline: StableDiffusionPipeline) -> list[np.ndarray]:
    """Images of the loop on the host: with the cache for each of LOOPED, then without the cache."""
    pipeline.enable_cache(3, 1)
    images = [draw(pipeline, **changes) for changes in LOOPED]
    pipeline.disable_cache()
    return [*images, draw(pipeline)]


@pytest.mark.parametrize("hoist", [False, True])
def test_the_loop_on_the_device(
    folder: Path, tmp_path: Path, hoist: bool, pipeline: StableDiffusionPipeline, host_images: list[np.ndarray]
) -> None:
    """As the loop on the host: image after image, of another number of steps, with a LoRA, without the cache."""
    if hoist:
        optimize("demo", tmp_path / "hoisted", target="cpu", hoist=True)
    looped = StableDiffusionPipeline.from_pretrained(
        tmp_path / "hoisted" if hoist else folder, "cpu", threads=1, device_loop=True
    )
    for pipe in (pipeline, looped):
        pipe.enable_cache(3, 1)
    *cached, uncached = host_images
    for changes, expected in zip((*LOOPED, {}), (*cached, cached[0]), strict=True):
        assert psnr(draw(looped, **changes), expected) > 60
    buffers = next(iter(looped.loop.buffer_cache.values()))
    assert buffers.cached_unet is not None
    assert buffers.cached_unet.shallow.outputs["out_sample"] is buffers.cached_unet.full.outputs["out_sample"]
    if not hoist:
        for pipe in (pipeline, looped):
            pipe.load_lora_weights(GOLD, "gold")
        assert psnr(draw(looped), draw(pipeline)) > 60
        for pipe in (pipeline, looped):
            pipe.unload_lora_weights()
    looped.disable_cache()
    assert psnr(draw(looped), uncached) > 60
    assert [name for name in looped.models.opened if name.startswith("unet ")] == []


def test_a_controlnet_and_perturbed_attention(controlled: Path, pipeline: StableDiffusionPipeline) -> None:
    """Shallow steps read the ControlNet's residual of their skip connection, and perturbed rows their own features."""
    call: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 10, "guidance_scale": 4.0}
    call["control_image"] = Image.fromarray(np.full((64, 64, 3), 90, np.uint8))
    images = []
    for looped in (False, True):
        pipe = StableDiffusionPipeline.from_pretrained(controlled, "cpu", threads=1, device_loop=looped)
        uncached = draw(pipe, **call)
        pipe.enable_cache(2)
        images.append(draw(pipe, **call))
        assert psnr(images[-1], uncached) < 90
        (shallow,) = (model for name, model in pipe.models.opened.items() if "shallow" in name)
        assert "down_block_res_sample_0" in shallow.inputs
        assert psnr(draw(pipe, **call, controlnet_conditioning_scale=0.0), images[-1]) < 90
    assert psnr(*images) > 60
    perturbed = StableDiffusionPAGPipeline.from_pipe(pipeline)
    uncached = draw(perturbed, pag_scale=2.0)
    perturbed.enable_cache(2)
    assert 20 < psnr(draw(perturbed, pag_scale=2.0), uncached) < 90
