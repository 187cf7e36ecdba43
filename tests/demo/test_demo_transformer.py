"""The committed `demo-dit`: a small FluxPipeline folder that draws unseen prompts, as diffusers does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_ort import FluxImg2ImgPipeline, FluxPipeline, demo
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr
from sd_ort.core.ownership import sha256
from sd_ort.demo import TRANSFORMER_DIR, fidelity, scenes
from sd_ort.export import templates

WEIGHTS = sorted(TRANSFORMER_DIR.glob("*/*.safetensors"))
PROMPTS = scenes.unseen_prompts(6, seed=0)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return FluxPipeline.from_pretrained("demo-dit", "cpu")


def test_weights_are_small_and_float16() -> None:
    from safetensors.numpy import load_file

    assert [p.parent.name for p in WEIGHTS] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert sum(p.stat().st_size for p in TRANSFORMER_DIR.rglob("*") if p.is_file()) <= 25e6
    tensors = [tensor for path in WEIGHTS for tensor in load_file(path).values()]
    assert {tensor.dtype for tensor in tensors} == {np.dtype(np.float16)}
    assert sum(tensor.size for tensor in tensors) <= 12e6
    assert all(np.isfinite(tensor).all() and tensor.any() for tensor in tensors)
    assert not [p for p in TRANSFORMER_DIR.rglob("*.json") if "_name_or_path" in p.read_text()]


def test_every_component_has_a_template() -> None:
    """So that the first call traces nothing, and needs no torch."""
    source = open_folder("demo-dit", TRANSFORMER_DIR)
    for component in ("text_encoder", "text_encoder_2", "transformer", "vae_encoder", "vae_decoder"):
        path = templates.find_template(templates.component_key(source, component, 20, "dynamo"))
        assert path, component
        assert path.is_relative_to(templates.BUNDLED), component


def test_components_have_the_names_of_diffusers(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is diffusers' object, so that an installation without it says what it lacks."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_scheduler", pipeline.scheduler_config)
        patch.setitem(sys.modules, "diffusers", None)
        with pytest.raises(InputError, match="this needs diffusers, which is not installed: pip install"):
            _ = pipeline.components
    names = {"scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae"}
    assert pipeline.components.keys() == names
    assert pipeline.components["tokenizer_2"] is pipeline.tokenizer_2
    assert pipeline.components["transformer"].config.num_layers == pipeline.transformer_config["num_layers"]


def test_generates_unseen_prompts_as_diffusers_does(pipeline: Any) -> None:
    import diffusers

    images = pipeline(PROMPTS, generator=list(range(len(PROMPTS)))).images
    assert [image.size for image in images] == [(demo.WIDTH, demo.HEIGHT)] * len(PROMPTS)
    assert pipeline.num_timesteps == demo.TRANSFORMER_STEPS
    result = fidelity.score(PROMPTS, images)
    assert result.correct >= len(PROMPTS) - 1, result.failures
    theirs: Any = diffusers.FluxPipeline.from_pretrained(TRANSFORMER_DIR, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    size = {"height": demo.HEIGHT, "width": demo.WIDTH, "max_sequence_length": demo.TEXT_LENGTH}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other longer than one works
    try:
        generator = torch.Generator().manual_seed(1)
        steps = demo.TRANSFORMER_STEPS
        expected = theirs(PROMPTS[1], num_inference_steps=steps, **size, generator=generator, output_type="np").images
    finally:
        torch.set_num_threads(threads)
    actual = pipeline(PROMPTS[1], generator=1, output_type="np").images
    assert psnr(actual, expected, 0.01, peak=1.0) >= 60


def test_defaults(pipeline: Any) -> None:
    """A number of steps that was given is kept; image to image has the demo's defaults too."""
    call = {"prompt": "a red circle on a blue background", "output_type": "latent", "generator": 0}
    assert pipeline(**call, num_inference_steps=2).images.shape == (1, 64, 16)
    assert pipeline.num_timesteps == 2
    changed = FluxImg2ImgPipeline.from_pipe(pipeline)
    changed(**call, image=Image.new("RGB", (demo.WIDTH, demo.HEIGHT), "blue"), strength=0.1)
    assert changed.num_timesteps == demo.TRANSFORMER_STEPS // 10


@pytest.mark.parametrize(
    ("module", "width", "message"),
    [
        ("transformer.transformer_blocks.0.attn.to_q", 3072, "has another shape"),  # Qwen-Image's, as FLUX.1's
        ("diffusion_model.layers.0.attention.to_q", 3840, "none of its 1 modules"),  # Z-Image
        ("diffusion_model.blocks.0.attn.gate", 6144, "none of its 1 modules"),  # Krea 2
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", 640, "none of its 1 modules"),  # SDXL
    ],
)
def test_loras_of_other_families_are_refused(
    pipeline: Any, tmp_path: Path, module: str, width: int, message: str
) -> None:
    from safetensors.numpy import save_file

    from sd_ort.core.errors import InputError

    shapes = {"A": (4, width), "B": (width, 4)}
    path = tmp_path / "lora.safetensors"
    save_file({f"{module}.lora_{end}.weight": np.ones(shape, np.float32) for end, shape in shapes.items()}, path)
    with pytest.raises(InputError, match=f"of another family.*{message}"):
        pipeline.load_lora_weights(path)
    assert pipeline.get_active_adapters() == []


def test_recorded_score() -> None:
    """results/ has the score of the committed weights, on enough prompts and high enough."""
    report = json.loads((Path(__file__).parents[2] / "results/demo_dit_fidelity.json").read_text())
    assert report["weights_sha256"] == {str(p.relative_to(TRANSFORMER_DIR)): sha256(p) for p in WEIGHTS}
    assert (report["steps"], report["provider"]) == (demo.TRANSFORMER_STEPS, "cpu")
    assert report["prompts"] >= 200
    assert report["share"] == report["correct"] / report["prompts"] >= 0.95


def test_controlnets_are_refused_by_name(tmp_path: Path) -> None:
    from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
    from sd_ort.core.errors import InputError

    with pytest.raises(InputError, match="FluxPipeline takes no controlnet: ControlNets of diffusion transformers"):
        FluxPipeline.from_pretrained("demo-dit", "cpu", controlnet=tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "FluxControlNetModel"}')
    with pytest.raises(InputError, match="holds a FluxControlNetModel, not a ControlNetModel"):
        open_checkpoint("demo-dit", CheckpointOptions(controlnet=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"_class_name": "ControlNetModel"}')
    with pytest.raises(InputError, match="demo-dit has a transformer: sd-ort takes a ControlNet for a UNet only"):
        open_checkpoint("demo-dit", CheckpointOptions(controlnet=str(tmp_path)))
