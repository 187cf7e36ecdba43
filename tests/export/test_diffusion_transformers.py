"""Diffusion transformers: exports equal to torch at three sizes, batches 1 to 3; fusions; images of diffusers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from test_export import check_against_torch
from transformer_families import check_eight_bits, check_targets

import sd_ort as sd_ort_package
from sd_ort import Flux2KleinPipeline, FluxPipeline, StableDiffusion3Pipeline
from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.prompt_tokenizers import T5Tokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.export import exporter, templates
from sd_ort.graphs.load import load
from sd_ort.graphs.skip_blocks import skip_blocks
from sd_ort.inspect.explain import explain
from sd_ort.inspect.verify import verify
from sd_ort.pipelines import transformer_steps
from sd_ort.runtime.session import OrtModel
from sd_ort.stages import optimize
from sd_ort.weights.recipes import read_recipes

SIZES = (
    {"batch": 1, "sequence": 19, "height": 24, "width": 16, "image_sequence": 28},
    {"batch": 2, "sequence": 33, "height": 16, "width": 20, "image_sequence": 41},
    {"batch": 3, "sequence": 7, "height": 10, "width": 48, "image_sequence": 15},
)
SD3, LARGE, FLUX, KLEIN = "sd35-medium-mini", "sd35-large-mini", "flux-dev-mini", "flux2-klein-base-4b-mini"
WHOLE = {SD3: 20, FLUX: 23, KLEIN: 20}  # opset of the exports that images are generated with
EXPORTS = {
    (SD3, 20): ["text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae_encoder", "vae_decoder"],
    (SD3, 23): ["transformer"],
    (LARGE, 20): ["transformer"],
    (FLUX, 23): ["text_encoder", "text_encoder_2", "transformer", "vae_encoder", "vae_decoder"],
    (KLEIN, 20): ["text_encoder", "transformer", "vae_encoder", "vae_decoder"],
    (KLEIN, 23): ["text_encoder", "transformer"],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, mini_presets):
    """Return a function that exports the components of `EXPORTS` once and returns the folder."""

    @cache
    def export(preset: str, opset: int) -> Path:
        out = tmp_path_factory.mktemp(preset) / "out"
        options = {"opset": opset, "components": EXPORTS[preset, opset]}
        exporter.export(None, out, preset=preset, random_weights=True, **options)
        return out

    return export


@pytest.mark.parametrize(("preset", "opset"), EXPORTS)
def test_equals_torch(exported, preset, opset):
    folder = exported(preset, opset)
    for component in EXPORTS[preset, opset]:
        assert check_against_torch(folder, component, preset, *SIZES) <= 1e-10, component


def test_the_check_sees_positions_and_guidance(exported):
    """Another order of the image ids, another guidance scale and another timestep each change the output."""
    folder = exported(FLUX, 23)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    signature = exporter.component_signature(open_preset("flux-dev-mini", 0), "transformer", config)
    inputs = {t.name: exporter.example_input(t, SIZES[1], config, seed=7) for t in signature.inputs}
    path = folder / "transformer" / "model.onnx"
    (output,) = exporter.run_onnx(path, inputs)
    for name in ("img_ids", "txt_ids", "guidance", "timestep"):
        changed = inputs | {name: torch.flip(inputs[name], [0]) if "ids" in name else inputs[name] * 0.5}
        (other,) = exporter.run_onnx(path, changed)
        assert np.square(other - output).sum() > 1e-7 * np.square(output).sum(), name


# Nodes of the fused transformers: SD 3 has joint attention in each block, 3.5 medium a second one of the image in the
# first; FLUX.1 has one double block and two single blocks, FLUX.2 one of each.
FUSED = {
    SD3: {"MultiHeadAttention": 3, "RMSNormalization": 10, "LayerNormalization": 9, "Transpose": 2},
    LARGE: {"MultiHeadAttention": 2, "RMSNormalization": 8, "LayerNormalization": 8, "Transpose": 2},
    FLUX: {"MultiHeadAttention": 3, "RotaryEmbedding": 6, "RMSNormalization": 8, "LayerNormalization": 7, "Neg": 0},
    KLEIN: {"MultiHeadAttention": 2, "RotaryEmbedding": 4, "RMSNormalization": 6, "Neg": 0},
}


@pytest.mark.parametrize("target", ["cpu", "portable"])
@pytest.mark.parametrize(("preset", "opset"), [key for key in EXPORTS if key[0] in FUSED])
def test_fusions(exported, folder, tmp_path, preset, opset, target):
    """The same nodes from every opset, equal outputs; no attention is taken apart, no modulation stays."""
    source, out = exported(preset, opset), tmp_path / "out"
    tested = [name for name in EXPORTS[preset, opset] if name in ("transformer", "text_encoder_2", "text_encoder_3")]
    if (target, opset) == ("cpu", WHOLE.get(preset)):
        out = folder(preset)
    else:
        optimize(source, out, target=target, components=tested)
    graph = load(out / "transformer" / "model.onnx").graph
    counts = Counter(node.op_type for node in graph)
    expected = FUSED[preset] | dict.fromkeys(("ScaledDotProductAttention", "Softmax", "Attention", "ReduceMean"), 0)
    assert {op: counts[op] for op in expected} == expected
    norms = [node for node in graph if node.op_type == "LayerNormalization"]
    assert preset == KLEIN or all(not node.inputs[1].is_initializer() for node in norms), "scale and shift are computed"
    result = verify(source, out, components=tested)
    assert result["passed"], result["rows"]
    assert {row["component"] for row in result["rows"]} == set(tested)


@pytest.mark.parametrize("preset", [SD3, FLUX, KLEIN])
def test_every_target_fuses_as_much(exported, folder, tmp_path, preset):
    check_targets(exported(preset, WHOLE[preset]), tmp_path, {"cpu": folder(preset)})


@pytest.mark.parametrize("preset", [SD3, FLUX, KLEIN])
def test_eight_bits(exported, tmp_path, preset):
    check_eight_bits(exported(preset, WHOLE[preset]), tmp_path)


@pytest.mark.parametrize(("target", "dtype"), [("gpu", "float16"), ("gpu", "bfloat16"), ("cuda", "float16")])
@pytest.mark.parametrize("preset", [SD3, FLUX])
def test_gpu_targets(exported, tmp_path, preset, target, dtype):
    """Heads are one node behind one product a stream, norms with their gated residuals another; equal outputs."""
    folder, out = exported(preset, WHOLE[preset]), tmp_path / "out"
    manifest = optimize(folder, out, target=target, dtype=dtype, components=["transformer"])
    assert "exceed" in manifest["components"]["transformer"].get("calibration", "exceed"), "it was calibrated"
    graph = load(out / "transformer" / "model.onnx").graph
    counts = Counter(node.op_type for node in graph)
    attentions, norms = FUSED[preset]["MultiHeadAttention"], FUSED[preset]["LayerNormalization"]
    expected = {"MultiHeadAttention": attentions, "RotaryQkv": attentions, "AdaptiveNorm": norms}
    expected |= dict.fromkeys(("RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Einsum", "Gelu"), 0)
    assert {op: counts[op] for op in expected} == expected
    assert not [value for node in graph for value in node.outputs if value.dtype == ir.DataType.DOUBLE]
    if preset == SD3:  # every block's modulation is found, for skip-layer guidance
        model = load(out / "transformer_time" / "model.onnx")
        before = len(model.graph)
        skip_blocks(model, read_recipes(out)["transformer"], [0, 1])
        assert len(model.graph) == before + 4
    result = verify(folder, out, components=["transformer"])
    assert result["passed"], result["rows"]


def test_templates_tell_the_encoders_apart(mini_presets):
    """CLIP-L of SD3 returns the penultimate hidden state, that of FLUX.1 the pooled output. Both have the same T5."""

    def key(preset: str, component: str) -> str:
        return templates.component_key(open_preset(preset, 0), component, 20, "dynamo")

    assert key("sd35-medium-mini", "text_encoder") != key("flux-dev-mini", "text_encoder")
    assert key("sd35-medium-mini", "text_encoder_3") == key("flux-dev-mini", "text_encoder_2")


# --- Folders --------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, **changes) -> Path:
    """Write the configs of `flux-schnell-mini` as a diffusers folder without weights; `changes` of its index."""
    source = open_preset("flux-schnell-mini", 0)
    source.write_configs(folder)
    for name, config in source.configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({**source.index, **changes}))
    return folder


def test_diffusers_folder(mini_presets, tmp_path):
    checkpoint = open_folder("flux", write_folder(tmp_path))
    assert list(checkpoint.models) == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert exporter.select_components(checkpoint, None)[1:3] == ["text_encoder_2", "transformer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer": ["diffusers", "AuraFlowTransformer2DModel"]}, "transformer of class AuraFlowTransformer2D"),
        ({"transformer": [None, None]}, "neither a UNet nor a transformer"),
        ({"text_encoder_2": ["transformers", "Qwen3ForCausalLM"]}, "text_encoder_2 of class Qwen3ForCausalLM, but"),
        ({"text_encoder_2": [None, None]}, "no text_encoder_2, but its FluxTransformer2DModel needs a T5EncoderModel"),
        ({"tokenizer_3": ["transformers", "T5TokenizerFast"]}, "lacks its tokenizer_3"),
        ({"_class_name": "AnimateDiffPipeline"}, "AnimateDiffPipeline makes videos with motion modules in its UNet"),
        ({"_class_name": "WanImageToVideoPipeline"}, "WanImageToVideoPipeline makes videos: sd-ort generates images"),
        ({"_class_name": "HunyuanVideoPipeline"}, "HunyuanVideoPipeline makes videos"),
        ({"_class_name": "LTXPipeline"}, "LTXPipeline makes videos"),
        ({"_class_name": "CogVideoXPipeline"}, "CogVideoXPipeline makes videos"),
        ({"_class_name": "QwenImageEditInpaintPipeline"}, "edits whole images with the same models"),
        ({"_class_name": "ZImageOmniPipeline"}, "sd-ort runs Z-Image from text alone"),
    ],
)
def test_unsupported_folders_are_rejected_by_name(mini_presets, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        open_folder("flux", write_folder(tmp_path, **changes))


# --- Images ---------------------------------------------------------------------------------------------------------

PROMPTS = ["a red square", "Blue circles; on the left"]
CLASSES = {SD3: StableDiffusion3Pipeline, FLUX: FluxPipeline, KLEIN: Flux2KleinPipeline}
IMAGE_PRESETS = [SD3, FLUX]  # with pipelines that start from an image


@pytest.fixture(scope="module")
def folder(tmp_path_factory, exported):
    """Return a function that optimizes the export of a preset for target cpu once and returns the folder."""

    @cache
    def make(preset: str, hoist: bool = False) -> Path:
        out = tmp_path_factory.mktemp(preset) / "out"
        optimize(exported(preset, WHOLE[preset]), out, target="cpu", hoist=hoist)
        return out

    return make


@pytest.fixture(scope="module")
def pipeline_of(folder):
    """Return a function that opens the pipeline of a preset's optimized folder once. Do not change it."""
    return cache(lambda preset, hoist=False: CLASSES[preset].from_pretrained(folder(preset, hoist), "cpu"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, mini_presets):
    """Return a function that loads diffusers' pipeline with the weights of a preset once."""

    @cache
    def load(preset: str):
        from diffusers import DiffusionPipeline

        source = open_preset(preset, 0)
        configs = tmp_path_factory.mktemp(f"{preset}-configs")
        source.write_configs(configs)
        models = {name: source.load(name) for name in source.configs}
        absent = {} if preset == KLEIN else {"image_encoder": None, "feature_extractor": None}
        pipeline = DiffusionPipeline.from_pretrained(configs, **models, **absent)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return load


CALLS = {
    "two prompts, two images each, guided": (SD3, {"num_images_per_prompt": 2, "negative_prompt": ["dark", "blur"]}),
    "skip-layer guidance": (SD3, {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 0.8}),
    "not guided, other texts": (SD3, {"guidance_scale": 1.0, "prompt_2": PROMPTS[::-1], "prompt_3": ["x", "y"]}),
    "own sigmas": (SD3, {"sigmas": [0.9, 0.5, 0.1], "num_inference_steps": None}),
    "distilled guidance": (FLUX, {"num_images_per_prompt": 2, "guidance_scale": 2.0}),
    "klein, guided": (KLEIN, {"num_images_per_prompt": 2, "guidance_scale": 3.0}),
    "klein, reference images": (KLEIN, {"image": [Image.linear_gradient("L").resize((80, 70)).convert("RGB")] * 2}),
    "true guidance": (FLUX, {"true_cfg_scale": 3.0, "negative_prompt": ["dark", "blur"], "prompt_2": PROMPTS[::-1]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_image_of_diffusers(pipeline_of, reference, name):
    preset, arguments = CALLS[name]
    call = {
        "prompt": PROMPTS, "height": 32, "width": 48, "num_inference_steps": 3, "max_sequence_length": 20,
        "output_type": "np", **arguments,
    }  # fmt: skip
    if call["num_inference_steps"] is None:
        del call["num_inference_steps"]
    if preset == KLEIN:  # a chat takes 12 tokens, and the tiny encoder has four layers
        call |= {"max_sequence_length": 40, "text_encoder_out_layers": (1, 2, 3)}
    with torch.no_grad():
        expected = reference(preset)(**call, generator=torch.Generator().manual_seed(5)).images
    for hoist in (False, True):
        pipeline = pipeline_of(preset, hoist)
        actual = pipeline(**call, generator=5).images
        assert actual.shape == expected.shape == (4 if "num_images_per_prompt" in arguments else 2, 32, 48, 3)
        assert psnr(actual, expected, 0.01, peak=1.0) >= 60
    other = pipeline(**call, generator=6).images
    assert psnr(other, expected, 0.01, peak=1.0) < 40, "the comparison does not see the seed"


@pytest.mark.parametrize("preset", CLASSES)
def test_hoisted_folder(folder, exported, preset):
    """Modulation leaves the step, and joined graphs are equal; explain and verify know the three as one component."""
    out, source = folder(preset, True), exported(preset, WHOLE[preset])
    nodes = read_manifest(out)["components"]["transformer"]["hoisted"]
    assert nodes.keys() == {"transformer_prompt", "transformer_time", "transformer"}
    parts = {name: load(out / name / "model.onnx").graph for name in nodes}
    weights = {name: sum(v.const_value.nbytes for v in part.initializers.values()) for name, part in parts.items()}
    initializers = load(folder(preset) / "transformer" / "model.onnx").graph.initializers
    assert weights["transformer"] < 0.9 * sum(value.const_value.nbytes for value in initializers.values())
    assert {value.name for value in parts["transformer"].inputs}.isdisjoint({"timestep", "encoder_hidden_states"})
    assert list(explain(out, ["transformer"])["components"]) == ["transformer"]
    result = verify(source, out, components=["transformer"])
    assert result["passed"], result["rows"]
    assert {row["component"] for row in result["rows"]} == {"transformer"}
    with pytest.raises(InputError, match="optimized already"):
        optimize(out, out.with_name("again"), target="cpu")


@pytest.mark.parametrize("hoist", [False, True])
def test_parts_run_once(folder, monkeypatch, hoist):
    """The prompt's part runs once a call, modulation of all steps at once; a callback's new prompt runs both again."""
    runs: Counter[int] = Counter()
    run = OrtModel.__call__

    def counted(model: OrtModel, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        runs[id(model)] += 1
        return run(model, **arrays)

    monkeypatch.setattr(OrtModel, "__call__", counted)
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder(SD3, hoist), "cpu", low_memory=False)

    def count(**more) -> list[int]:  # of transformer, transformer_prompt and transformer_time
        runs.clear()
        call = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 4, "output_type": "latent"}
        pipeline("a", **call, **more, generator=1)
        return [runs[id(model)] for name, model in sorted(pipeline.models.opened.items()) if "transformer" in name]

    assert count() == [4, 1, 1][: 3 if hoist else 1]

    def replace(pipe, i, timestep, tensors):
        return {"prompt_embeds": 2 * tensors["prompt_embeds"]} if i == 1 else {}

    more = {"callback_on_step_end": replace, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    assert count(**more) == [4, 2, 2][: 3 if hoist else 1]
    monkeypatch.setattr(transformer_steps, "TIME_ROWS", 6)  # two rows in each of three steps
    assert count() == [4, 1, 2][: 3 if hoist else 1]


def pictures() -> tuple[Image.Image, Image.Image]:
    """Return an image, and a mask whose edge lies within a latent."""
    random = np.random.default_rng(3)
    image = Image.fromarray(random.integers(0, 255, (5, 7, 3), np.uint8)).resize((70, 50))
    mask = np.zeros((50, 70), np.uint8)
    mask[:21, 10:44] = 255
    return image, Image.fromarray(mask)


LATENTS = torch.linspace(-2, 2, 2 * 16 * 16 * 24).reshape(2, 16, 16, 24)
IMAGE_CALLS = {
    "two prompts": ("Img2Img", {"strength": 0.7}),
    "strength 1, two images of each": ("Img2Img", {"strength": 1.0, "num_images_per_prompt": 2}),
    "latents of an image": ("Img2Img", {"image": LATENTS}),
    "a mask": ("Inpaint", {"strength": 0.7}),
    "a mask, strength 1": ("Inpaint", {"strength": 1.0, "num_images_per_prompt": 2}),
    "a mask, latents": ("Inpaint", {"latents": LATENTS}),
}


@pytest.mark.parametrize("name", IMAGE_CALLS)
@pytest.mark.parametrize("preset", IMAGE_PRESETS)
def test_images_from_images(pipeline_of, reference, preset, name):
    """Image to image and inpainting are those of diffusers, also the generator afterwards."""
    import diffusers

    task, arguments = IMAGE_CALLS[name]
    class_name = CLASSES[preset].__name__.replace("Pipeline", f"{task}Pipeline")
    image, mask = pictures()
    call = {
        "prompt": PROMPTS, "image": image, "height": 32, "width": 48, "num_inference_steps": 4, "guidance_scale": 3.0,
        "max_sequence_length": 12, "output_type": "np",
        **({"mask_image": mask} if task == "Inpaint" else {}), **arguments,
    }  # fmt: skip
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    pipeline = getattr(diffusers, class_name)(**reference(preset).components)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        expected = pipeline(**call, generator=generators[0]).images
    ours = getattr(sd_ort_package, class_name).from_pipe(pipeline_of(preset))
    actual = ours(**call, generator=generators[1]).images
    assert psnr(actual, expected, 0.01, peak=1.0) >= 60
    assert torch.equal(*(each.get_state() for each in generators))
    other = image.transpose(Image.Transpose.ROTATE_180)
    changed = ours(**call | {"image": other}, generator=5).images
    replaced = arguments.get("strength") == 1 and task == "Img2Img"  # noise replaces the image
    assert (psnr(actual, changed, 0.01, peak=1.0) < 40) != replaced, "the comparison does not see the image"


@pytest.mark.parametrize("preset", IMAGE_PRESETS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": 0.0}, "strength"),
        ({"strength": 1.5}, "strength"),
        ({"image": None}, "no image"),
        ({"mask_image": None}, "no mask"),
        ({"padding_mask_crop": 8}, "padding_mask_crop"),
        ({"prompt": ["a"] * 3, "image": [None] * 2}, "no image"),
    ],
)
def test_arguments_of_inpainting_are_rejected_by_name(pipeline_of, preset, arguments, message):
    name = CLASSES[preset].__name__.replace("Pipeline", "InpaintPipeline")
    image, mask = pictures()
    call = {"prompt": "a", "image": image, "mask_image": mask, "height": 32, "width": 32, "num_inference_steps": 2}
    with pytest.raises(InputError, match=message):
        getattr(sd_ort_package, name).from_pipe(pipeline_of(preset))(**call | arguments, max_sequence_length=4)


@pytest.mark.parametrize("preset", ["sd35-medium", "flux-schnell", "flux-dev"])
@pytest.mark.parametrize("steps", [1, 4, 28])
def test_schedule(preset, steps):
    """The timesteps and sigmas of diffusers' scheduler, with and without dynamic shifting."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = PRESETS[preset].scheduler
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = None if preset.startswith("sd3") else np.linspace(1.0, 1 / steps, steps)
    mu = flow_match.linear_mu(config, 1000)
    scheduler.set_timesteps(None if sigmas is not None else steps, sigmas=sigmas, mu=mu)
    schedule = flow_match.make_schedule(config, steps, 1000, sigmas)
    np.testing.assert_allclose(schedule.timesteps, scheduler.timesteps.numpy(), rtol=2e-7)
    np.testing.assert_allclose(schedule.sigmas, scheduler.sigmas.numpy(), rtol=2e-7)


def test_scheduler_is_one_object(folder):
    """The scheduler is the caller's object, settings of `set_shift` are used, and another pipeline shares it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipeline = sd_ort_package.StableDiffusion3Pipeline.from_pretrained(folder(SD3), "cpu")
    assert pipeline.scheduler is pipeline.scheduler
    own = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, shift=2.0)
    pipeline.scheduler = own
    assert pipeline.scheduler is own
    own.set_shift(5.0)
    own.set_timesteps(4)
    other = sd_ort_package.StableDiffusion3Img2ImgPipeline.from_pipe(pipeline)
    assert other.scheduler is own
    for each in (pipeline, other):
        schedule = flow_match.make_schedule(each.scheduler_config, 4, 64, None)
        np.testing.assert_allclose(schedule.sigmas, own.sigmas.numpy(), rtol=2e-7)
    pipeline.scheduler = None
    assert pipeline.scheduler.shift == PRESETS["sd35-medium"].scheduler["shift"]


@pytest.mark.parametrize(("option", "value"), [("use_karras_sigmas", True), ("invert_sigmas", True)])
def test_unsupported_schedules_are_named(option, value):
    with pytest.raises(InputError, match=option):
        flow_match.check_config({"_class_name": flow_match.CLASS, option: value})


def test_t5_tokens_are_those_of_transformers(tmp_path, mini_presets):
    from transformers import AutoTokenizer

    open_preset(FLUX, 0).write_configs(tmp_path)
    texts = ["a red square", "", "Ünknown  and   spaces ", "long " * 12]
    expected = AutoTokenizer.from_pretrained(tmp_path / "tokenizer_2")(
        texts, padding="max_length", max_length=24, truncation=True, return_tensors="np"
    ).input_ids
    np.testing.assert_array_equal(T5Tokenizer(tmp_path / "tokenizer_2").token_ids(texts, 24), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 33}, "multiples of 4"),
        ({"height": 4096}, "too large"),
        ({"num_inference_steps": 0}, "0 steps"),
        ({"max_sequence_length": 600}, "max_sequence_length"),
        ({"output_type": "jpeg"}, "output_type"),
        ({"generator": [1, 2, 3]}, "3 generators"),
        ({"latents": np.zeros((1, 16, 4, 4))}, "latents of shape"),
        ({"skip_guidance_layers": [2]}, "blocks from 0 to 1"),
        ({"negative_prompt": ["a", "b", "c"]}, "3 prompts"),
        ({"sigmas": [0.5, 0.0]}, "sigmas"),
    ],
)
def test_arguments_are_rejected_by_name(folder, pipeline_of, arguments, message):
    """One of them after text encoders that are opened and closed in turn, which collects garbage for each."""
    pipeline = pipeline_of(SD3)
    if "latents" in arguments:
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder(SD3), "cpu", low_memory=True)
    with pytest.raises(InputError, match=message):
        pipeline("a", **{"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 4} | arguments)


def test_folders_are_rejected_by_name(folder, tmp_path):
    with pytest.raises(InputError, match="holds a StableDiffusion3Pipeline, not a FluxPipeline"):
        FluxPipeline.from_pretrained(folder(SD3), "cpu")
    with pytest.raises(InputError, match="split_guidance"):
        StableDiffusion3Pipeline.from_pretrained(folder(SD3), "cpu", split_guidance=(0, 1))
    shutil.copytree(folder(FLUX), tmp_path / "flux")
    shutil.rmtree(tmp_path / "flux" / "text_encoder_2")
    with pytest.raises(InputError, match="has no text_encoder_2"):
        FluxPipeline.from_pretrained(tmp_path / "flux", "cpu")


def test_sd3_without_t5(folder, reference, tmp_path):
    """A folder without T5 reads zeros in place of its hidden states, as diffusers does."""
    shutil.copytree(folder(SD3), tmp_path / "sd3")
    shutil.rmtree(tmp_path / "sd3" / "text_encoder_3")
    path = tmp_path / "sd3" / "model_index.json"
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    path.write_text(json.dumps(json.loads(path.read_text()) | absent))
    call = {"prompt": "a", "height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 9}
    pipeline = reference(SD3)
    encoder = pipeline.text_encoder_3
    pipeline.text_encoder_3 = None
    with torch.no_grad():
        expected = pipeline(**call, output_type="np", generator=torch.Generator().manual_seed(1)).images
    pipeline.text_encoder_3 = encoder
    actual = StableDiffusion3Pipeline.from_pretrained(tmp_path / "sd3", "cpu")(**call, output_type="np", generator=1)
    assert psnr(actual.images, expected, 0.01, peak=1.0) >= 60


def test_generate_command(folder, pipeline_of, sd_ort, tmp_path):
    """Images from the shell with the folder's defaults, from text and from an image."""
    out = tmp_path / "image.png"
    options = ["--model", folder(FLUX), "--height", "32", "--width", "32", "--provider", "cpu", "--seed", "4"]
    assert sd_ort("generate", "a red square", *options, "--steps", "2", "--out", out)[0] == 0
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "generator": 4}
    expected = pipeline_of(FLUX)("a red square", **call).images[0]
    with Image.open(out) as image:
        assert np.array_equal(np.asarray(image), np.asarray(expected))
        assert image.info["guidance"] == "3.5"
    again = tmp_path / "again.png"
    assert sd_ort("generate", "a red square", *options, "--steps", "4", "--image", out, "--out", again)[0] == 0
    with Image.open(again) as image:
        assert image.size == (32, 32)


@pytest.mark.parametrize("preset", CLASSES)
def test_component_of_diffusers(folder, reference, preset):
    """diffusers' pipeline with the folder's transformer generates the same image."""
    from sd_ort.integrations.diffusers import OrtTransformer, accelerate

    theirs = reference(preset)
    call = {"prompt": "a", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np"}
    call |= {"max_sequence_length": 48, "text_encoder_out_layers": (1, 2, 3)} if preset == KLEIN else {}
    with torch.no_grad():
        expected = theirs(**call, generator=torch.Generator().manual_seed(2)).images
    settings = {"is_distilled": theirs.config.is_distilled} if preset == KLEIN else {}
    for hoist in (False, True):
        pipeline = accelerate(type(theirs)(**theirs.components, **settings), folder(preset, hoist), provider="cpu")
        pipeline.set_progress_bar_config(disable=True)
        assert isinstance(pipeline.transformer, OrtTransformer)
        with torch.no_grad():
            actual = pipeline(**call, generator=torch.Generator().manual_seed(2)).images
        assert psnr(actual, expected, 0.01, peak=1.0) >= 60


# --- LoRAs ----------------------------------------------------------------------------------------------------------


def lora_tensors(layout: str) -> dict[str, torch.Tensor]:
    """Return a LoRA of FLUX.1 with rank 4, strong enough to see: attention of a double block, a single block's output.

    diffusers: split query, key and value. kohya, comfyui: joined, under the original names.
    """
    generator, width = torch.Generator().manual_seed(3), 96
    blocks = ("transformer_blocks.0.attn", "single_transformer_blocks.1")
    if layout == "diffusers":  # with parts that run once a prompt and once a schedule
        shapes = {f"transformer.{blocks[0]}.to_{name}": (width, width) for name in "qkv"}
        shapes["transformer.context_embedder"] = (
            width,
            open_preset(FLUX, 0).configs["transformer"]["joint_attention_dim"],
        )
        shapes["transformer.transformer_blocks.0.norm1.linear"] = (6 * width, width)
        shapes[f"transformer.{blocks[1]}.proj_out"] = (width, 5 * width)
        ends = ("lora_B.weight", "lora_A.weight")
    else:
        names = {"double_blocks.0.img_attn.qkv": (3 * width, width), "single_blocks.1.linear2": (width, 5 * width)}
        kohya = layout == "kohya"
        prefix = "lora_unet_" if kohya else "diffusion_model."
        shapes = {prefix + (name.replace(".", "_") if kohya else name): shape for name, shape in names.items()}
        ends = ("lora_up.weight", "lora_down.weight") if kohya else ("lora_B.weight", "lora_A.weight")
    tensors = {}
    for name, (out, width_in) in shapes.items():
        tensors[f"{name}.{ends[0]}"] = torch.randn(out, 4, generator=generator)
        tensors[f"{name}.{ends[1]}"] = torch.randn(4, width_in, generator=generator) * width_in**-0.5
        if layout != "diffusers":
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
    return tensors


@pytest.mark.parametrize(
    ("layout", "hoist"), [("diffusers", False), ("diffusers", True), ("kohya", False), ("comfyui", True)]
)
def test_loras(folder, reference, tmp_path, layout, hoist):
    """The image with a LoRA is that of diffusers with PEFT; without it, the image is as before.

    diffusers does not read ComfyUI's names: it gets the same LoRA with Kohya's.
    """
    from safetensors.torch import save_file

    path, reference_path = tmp_path / "lora.safetensors", tmp_path / "reference.safetensors"
    save_file(lora_tensors(layout), path)
    save_file(lora_tensors("kohya" if layout == "comfyui" else layout), reference_path)
    call = {"prompt": PROMPTS, "height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 12,
            "output_type": "np"}  # fmt: skip
    theirs = reference(FLUX)
    ours = FluxPipeline.from_pretrained(folder(FLUX, hoist), "cpu")
    before = ours(**call, generator=5).images
    theirs.load_lora_weights(str(reference_path))
    try:
        with torch.no_grad():
            expected = theirs(**call, generator=torch.Generator().manual_seed(5)).images
    finally:
        theirs.unload_lora_weights()
    ours.load_lora_weights(path)
    actual = ours(**call, generator=5).images
    assert psnr(actual, expected, 0.01, peak=1.0) >= 60
    assert psnr(before, expected, 0.01, peak=1.0) < 40, "the LoRA changes nothing"
    ours.unload_lora_weights()
    assert np.array_equal(ours(**call, generator=5).images, before)
