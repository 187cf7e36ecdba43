"""Qwen-Image: the modules equal diffusers, which still needs them; fusions; images; files; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from export_limits import assert_not_exportable
from image_metrics import psnr
from PIL import Image
from safetensors.torch import save_file
from transformer_families import (
    built,
    check_cache,
    check_eight_bits,
    check_fusions,
    check_lora,
    check_targets,
    check_text_encoder,
    hoisted_counts,
    nmse,
)

import sd_ort
from scripts.fixtures import parity_pairs
from scripts.fixtures.parity_models import Models
from sd_ort import QwenImagePipeline, transformer_pipeline
from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.checkpoint import build_model
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.core.errors import InputError
from sd_ort.pipelines.transformer_qwen_image import Embeddings
from sd_ort.stages import optimize

CLASS, KIND, FAMILY = "QwenImageTransformer2DModel", "QwenImagePipeline", "qwen_image"
SIZES = ({"batch": 1, "sequence": 19, "image_sequence": 28}, {"batch": 3, "sequence": 7, "image_sequence": 41})


# --- The modules that are exported ----------------------------------------------------------------------------------


def test_the_transformer_equals_diffusers() -> None:
    """Prompts of several lengths, one with a gap in its mask: calls without masks give diffusers' outputs."""
    model, generator = built(FAMILY, "transformer"), torch.Generator().manual_seed(0)
    width = model.config["joint_attention_dim"]
    latents = torch.randn(4, 5 * 7, 64, generator=generator)
    texts = torch.randn(4, 9, width, generator=generator)
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 9, 6])[:, None]
    mask[3, 2] = False
    time = torch.full((4,), 0.3)
    call = {"hidden_states": latents, "timestep": time, "encoder_hidden_states": texts, "return_dict": False}
    with torch.no_grad():
        expected = model(**call, encoder_hidden_states_mask=mask, img_shapes=[[(1, 5, 7)]] * 4)[0]
    module, actual = wrap("transformer", built(FAMILY, "transformer"), False, False), torch.empty_like(expected)
    groups = Embeddings(texts.numpy(), mask.numpy()).groups((5, 7))
    assert [rows for rows, _ in groups] == [[0, 2], [1], [3]]
    for rows, inputs in groups:
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.no_grad():
            actual[rows] = module(hidden_states=latents[rows], timestep=time[:1], **tensors)
    assert nmse(actual, expected) <= 1e-11


def test_the_text_encoder_equals_transformers() -> None:
    ids = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(11)[None] < torch.tensor([11, 6])[:, None]).long()
    with torch.no_grad():
        expected = built(FAMILY, "text_encoder")(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        actual = wrap("text_encoder", built(FAMILY, "text_encoder"), False, False)(ids, mask)
    visible = mask.bool()
    assert nmse(actual[visible], expected.hidden_states[-1][visible]) <= 1e-12


def test_the_vae_equals_diffusers() -> None:
    """Of one frame, whose 3-D convolutions are 2-D ones with a third of the filters or all of 1x1x1."""
    model, generator = built(FAMILY, "vae"), torch.Generator().manual_seed(0)
    image, latent = (torch.randn(2, *shape, generator=generator) for shape in ((3, 12, 20), (16, 6, 10)))
    with torch.no_grad():
        moments = model.encode(image.unsqueeze(2)).latent_dist.parameters.squeeze(2)
        decoded = model.decode(latent.unsqueeze(2)).sample.squeeze(2)
        assert nmse(wrap("vae_encoder", built(FAMILY, "vae"), False, False)(image), moments) <= 1e-12
        decoder = wrap("vae_decoder", built(FAMILY, "vae"), False, False)
        assert nmse(decoder(latent), decoded) <= 1e-12
    assert not any(isinstance(part, torch.nn.Conv3d) for part in decoder.modules())


class Direct(torch.nn.Module):
    """diffusers' forward with a mask, of a small image."""

    def __init__(self) -> None:
        super().__init__()
        self.model = built(FAMILY, "transformer")

    def forward(self, latents: torch.Tensor, time: torch.Tensor, texts: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.model(latents, texts, mask, time, img_shapes=[[(1, 4, 6)]], return_dict=False)[0]


def test_diffusers_still_needs_the_module() -> None:
    """If this fails, diffusers' forward exports as it is: remove the transformer's classes of qwen_image_modules.py."""
    width = built(FAMILY, "transformer").config["joint_attention_dim"]
    arguments = torch.randn(2, 24, 64), torch.rand(2), torch.randn(2, 12, width), torch.arange(12).expand(2, 12) < 9
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=1024)
    shapes = ({0: batch}, {0: batch}, {0: batch, 1: length}, {0: batch, 1: length})
    assert_not_exportable(Direct, arguments, shapes)


def test_diffusers_vae_still_needs_its_modules() -> None:
    """If this fails, diffusers' VAE computes one frame in two dimensions: remove the VAE's classes too."""
    model = built(FAMILY, "vae")
    conv = next(each for each in model.modules() if isinstance(each, QwenImageCausalConv3d) and each.kernel_size[0] > 1)
    program = torch.export.export(conv, (torch.randn(1, conv.in_channels, 1, 6, 8),), strict=False)
    filters = [node.args[1].meta["val"].shape for node in program.graph.nodes if "conv3d" in str(node.target)]
    assert [tuple(shape[2:]) for shape in filters] == [(3, 3, 3)], "filters of all three frames"


# --- Graphs ---------------------------------------------------------------------------------------------------------


# Two blocks; nothing reads the text after the attention of the last one.
FUSED = {"MultiHeadAttention": 2, "RotaryEmbedding": 4, "RMSNormalization": 9, "LayerNormalization": 8, "Attention": 0}


@pytest.mark.parametrize("opset", [20, 23])
def test_fusions(models: Models, of_opset_23: Path, tmp_path: Path, opset: int) -> None:
    """Attention, rotation and norms are single nodes, modulation is part of the norms; equal outputs."""
    folder = Path(models.export(FAMILY)) if opset == 20 else of_opset_23
    graph = check_fusions(folder, FAMILY, SIZES, tmp_path / "out", FUSED)
    norms = [node for node in graph if node.op_type == "LayerNormalization"]
    assert all(not node.inputs[1].is_initializer() for node in norms), "scale and shift are computed"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_target(models: Models, tmp_path: Path, dtype: str) -> None:
    """Norms are AdaptiveNorm with their gated residuals, heads RotaryQkv; modulation leaves the step."""
    counts = hoisted_counts(Path(models.export(FAMILY)), tmp_path / "out", dtype)["transformer"]
    expected = {"MultiHeadAttention": 2, "RotaryQkv": 2, "AdaptiveNorm": 8}
    expected |= dict.fromkeys(("RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Gelu", "Gemm"), 0)
    assert {op: counts[op] for op in expected} == expected


def test_every_target_fuses_as_much(models: Models, tmp_path: Path) -> None:
    check_targets(Path(models.export(FAMILY)), tmp_path)


def test_eight_bits(models: Models, tmp_path: Path) -> None:
    check_eight_bits(Path(models.export(FAMILY)), tmp_path)


def test_the_text_encoder_is_fused(hoisted: QwenImagePipeline) -> None:
    check_text_encoder(hoisted.folder, layers=2)


# --- Images ---------------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"height": 44, "width": 36, "num_inference_steps": 2, "output_type": "np"}
CACHE_THRESHOLD = 0.87  # random weights change much from step to step
PROMPTS = ["a", "a red circle on a blue background"]


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model."])
def test_images_with_and_without_a_lora(
    models: Models, hoisted: QwenImagePipeline, tmp_path: Path, prefix: str
) -> None:
    """A hoisted folder, guided, with prompts of other lengths; diffusers' and ComfyUI's names of a LoRA."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    width = 96
    for name, out in (("transformer_blocks.0.attn.to_q", width), ("transformer_blocks.0.img_mod.1", 6 * width)):
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, width, generator=generator) * width**-0.5
    for file, before in (("theirs", "transformer."), ("ours", prefix)):
        save_file({f"{before}{name}": tensor for name, tensor in tensors.items()}, tmp_path / f"{file}.safetensors")
    call: dict[str, Any] = {**CALL, "negative_prompt": ["b c", " "]}
    files = (tmp_path / f"{file}.safetensors" for file in ("theirs", "ours"))
    check_lora(models.theirs(FAMILY, KIND), hoisted, call, PROMPTS, *files)


# Of Qwen-Image-Lightning's page: the schedule of its LoRAs for 4 and 8 steps.
LIGHTNING = {
    "base_image_seq_len": 256, "base_shift": math.log(3), "invert_sigmas": False, "max_image_seq_len": 8192,
    "max_shift": math.log(3), "num_train_timesteps": 1000, "shift": 1.0, "shift_terminal": None,
    "stochastic_sampling": False, "time_shift_type": "exponential", "use_beta_sigmas": False,
    "use_dynamic_shifting": True, "use_exponential_sigmas": False, "use_karras_sigmas": False,
}  # fmt: skip


@pytest.mark.parametrize(("layout", "steps"), [("diffusers", 8), ("lightning", 4), ("comfyui", 4)])
def test_few_steps_with_a_lora_and_its_schedule(
    models: Models, hoisted: QwenImagePipeline, tmp_path: Path, layout: str, steps: int
) -> None:
    """Lightning's files have lora_down, lora_up and alpha without a prefix, ComfyUI's with one."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    width, rank = 96, 4
    prefix = {"diffusers": "transformer.", "lightning": "", "comfyui": "diffusion_model."}[layout]
    up, down = ("lora_B", "lora_A") if layout == "diffusers" else ("lora_up", "lora_down")
    for name, out in (("attn.to_q", width), ("attn.add_v_proj", width), ("img_mlp.net.0.proj", 4 * width)):
        full = f"{prefix}transformer_blocks.0.{name}"
        tensors[f"{full}.{up}.weight"] = torch.randn(out, rank, generator=generator)
        tensors[f"{full}.{down}.weight"] = torch.randn(rank, width, generator=generator) * width**-0.5
        if layout != "diffusers":
            tensors[f"{full}.alpha"] = torch.tensor(0.75 * rank)
    save_file(tensors, tmp_path / "lora.safetensors")
    theirs, call = models.theirs(FAMILY, KIND), {**CALL, "num_inference_steps": steps, "true_cfg_scale": 1.0}
    own, seeded = theirs.scheduler, {"prompt": "a", "generator": 5}
    before = hoisted(**call, **seeded).images
    theirs.scheduler = FlowMatchEulerDiscreteScheduler.from_config(LIGHTNING)
    hoisted.scheduler = LIGHTNING if layout == "comfyui" else theirs.scheduler
    try:
        assert psnr(hoisted(**call, **seeded).images, before, peak=1.0) < 50, "the schedule counts"
        assert QwenImagePipeline.from_pipe(hoisted).scheduler_config == hoisted.scheduler_config
        check_lora(theirs, hoisted, call, PROMPTS, *[tmp_path / "lora.safetensors"] * 2, guided=False)
    finally:
        theirs.scheduler, hoisted.scheduler = own, None
    assert np.array_equal(hoisted(**call, **seeded).images, before)


@pytest.mark.parametrize(("scheduler", "message"), [
    ("euler", "cannot be set by name for this model: give a scheduler_config.json"),
    ("missing.json", "missing.json is missing"),
    ({"_class_name": "DDIMScheduler"}, "DDIMScheduler is not supported for diffusion transformers"),
    (DDIMScheduler(), "DDIMScheduler is not supported for diffusion transformers"),
    ({"stochastic_sampling": True}, "stochastic_sampling = True is not supported"),
    ({"base_shift": "3"}, "damaged at 'base_shift'"),
    (3, "A int is no scheduler"),
])  # fmt: skip
def test_schedulers_are_rejected_by_name(hoisted: QwenImagePipeline, scheduler: Any, message: str) -> None:
    before = hoisted.scheduler_config
    with pytest.raises(InputError, match=message):
        hoisted.scheduler = scheduler
    assert hoisted.scheduler_config is before


MAG = {"threshold": 0.3, "num_inference_steps": 12, "mag_ratios": [1.1, 0.9, 1.05, 0.97]}


@pytest.mark.parametrize(("config", "module"), [
    (FirstBlockCacheConfig(threshold=CACHE_THRESHOLD), "transformer_blocks.1.img_mod"),
    (MagCacheConfig(**MAG), "transformer_blocks.0.img_mod"),
    (TaylorSeerCacheConfig(taylor_factors_dtype=torch.float32), "transformer_blocks.1.attn.to_q"),
], ids=["first-block", "mag", "taylor"])  # fmt: skip
def test_caches(models: Models, hoisted: QwenImagePipeline, config: Any, module: str) -> None:
    """The numbers of full steps of both prompts and the image equal those of diffusers' hook."""
    call = {**CALL, "prompt": "a", "negative_prompt": "b c", "num_inference_steps": 12}
    check_cache(models.theirs(FAMILY, KIND), hoisted, config, module, call)


def test_caches_of_gpu_graphs(models: Models, tmp_path: Path) -> None:
    """The last norm of a graph for GPUs adds the last block too: equal images without skipped blocks, others with."""
    optimize(models.export(FAMILY), tmp_path / "out", target="gpu", dtype="float16", hoist=True)
    pipeline: QwenImagePipeline = getattr(sd_ort, KIND).from_pretrained(tmp_path / "out", "cpu")
    call = {**CALL, "prompt": "a", "num_inference_steps": 12, "generator": 1}
    first = pipeline(**call).images[0]
    never, always = FirstBlockCacheConfig(threshold=1e-9), FirstBlockCacheConfig(threshold=0.999)
    for config, alike in ((never, True), (always, False), (MagCacheConfig(**MAG), False)):
        pipeline.enable_cache(config)
        assert (psnr(pipeline(**call).images[0], first) > 60) == alike, config
        assert (pipeline._cached.full_steps == 12) == alike, config
        pipeline.disable_cache()


@pytest.mark.parametrize("task", ["Img2Img", "Inpaint"])
def test_caches_of_images(models: Models, hoisted: QwenImagePipeline, task: str) -> None:
    kind = transformer_pipeline(KIND, task)
    call = {**CALL, "prompt": "a", "negative_prompt": "b c", "num_inference_steps": 14, "strength": 0.9}
    call |= parity_pairs.images_of(parity_pairs.parameters(kind), (36, 44))
    ours = getattr(sd_ort, kind).from_pipe(hoisted)
    config = FirstBlockCacheConfig(threshold=CACHE_THRESHOLD)
    check_cache(models.theirs(FAMILY, kind), ours, config, "transformer_blocks.1.img_mod", call)


def test_generate_command(hoisted: QwenImagePipeline, sd_ort: Any, tmp_path: Path) -> None:
    """`--guidance` is the scale of `--negative`, which guides; `--scheduler` is the file of a schedule."""
    schedule = tmp_path / "scheduler_config.json"
    schedule.write_text(json.dumps(LIGHTNING))
    options = ["--height", "32", "--width", "32", "--provider", "cpu", "--seed", "4", "--steps", "2"]
    out = tmp_path / "image.png"
    more = ["--negative", "blurry", "--guidance", "3", "--scheduler", str(schedule)]
    assert sd_ort("generate", "a square", "--model", hoisted.folder, *options, *more, "--out", out)[0] == 0
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "generator": 4}
    hoisted.scheduler = LIGHTNING
    expected = hoisted("a square", negative_prompt="blurry", true_cfg_scale=3.0, **call).images[0]
    hoisted.scheduler = None
    with Image.open(out) as image:
        assert np.array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_schedule(steps: int) -> None:
    """Sigmas that are stretched to a terminal value are those of diffusers' scheduler."""
    config = PRESETS["qwen-image"].scheduler
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    sigmas = np.linspace(0.99 if steps == 1 else 1.0, 1 / steps, steps)  # a single sigma of 1 is NaN in diffusers
    scheduler.set_timesteps(sigmas=sigmas, mu=flow_match.linear_mu(config, 4096))
    schedule = flow_match.make_schedule(config, steps, 4096, sigmas)
    np.testing.assert_allclose(schedule.sigmas, scheduler.sigmas.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(schedule.timesteps, scheduler.timesteps.numpy(), rtol=1e-5)


# --- Files and refusals ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    out = models.folder / "diffusers"
    models.theirs(FAMILY, KIND).save_pretrained(out)
    return out


def test_a_transformer_in_one_file(folder: Path, tmp_path: Path) -> None:
    """ComfyUI's file has diffusers' names, with a prefix; other models are those of the folder."""
    weights = built(FAMILY, "transformer").state_dict()
    stored = {f"model.diffusion_model.{name}": tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(stored, tmp_path / "qwen.safetensors")
    checkpoint = open_checkpoint(str(tmp_path / "qwen.safetensors"), CheckpointOptions(config=str(folder)))
    assert "Qwen-Image" in checkpoint.detection_note
    name = "transformer_blocks.0.attn.add_k_proj.weight"
    read = checkpoint.read_tensors("transformer", [name])
    np.testing.assert_array_equal(read(name).astype(np.float32), weights[name].bfloat16().float().numpy())


def test_names_of_the_text_encoder(folder: Path) -> None:
    """Published files name the language model as transformers 4 did."""
    checkpoint = open_folder("qwen", folder)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    files = checkpoint.models["text_encoder"].files
    stored = {key for file in files for key in json.loads(_header(file))}
    assert {name, "model.layers.0.mlp.up_proj.weight"} & stored
    assert checkpoint.read_tensors("text_encoder", [name])(name).shape == (128, 64)


def _header(file: Path) -> str:
    data = file.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


@pytest.mark.parametrize("setting", ["use_layer3d_rope", "use_additional_t_cond"])
def test_relatives_are_rejected_by_name(folder: Path, tmp_path: Path, setting: str) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "relative")
    path = tmp_path / "relative" / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: True}))
    with pytest.raises(InputError, match=f"{setting} = True, a relative that sd-ort does not export"):
        open_folder("qwen", tmp_path / "relative")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_embeds": np.ones((1, 3, 64))}, "prompt and prompt_embeds were both given"),
        ({"prompt": None, "prompt_embeds": np.ones((1, 3, 8))}, r"are no \(B, T, 64\)"),
        ({"prompt": None, "prompt_embeds": np.ones((1, 3, 64)), "prompt_embeds_mask": np.zeros((1, 3))}, "a token in"),
        ({"max_sequence_length": 2000}, "between 1 and 1024"),
        ({"latents": np.zeros((1, 4, 64))}, "latents of shape"),
        ({"negative_prompt": ["a", "b"]}, "2 prompts were given"),
    ],
)
def test_arguments_are_rejected_by_name(hoisted: QwenImagePipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hoisted(**{"prompt": "a", **CALL, **arguments})


def test_diffusers_classes_are_refused(models: Models, hoisted: QwenImagePipeline) -> None:
    from sd_ort.integrations.diffusers import accelerate

    assert [transformer_pipeline(KIND, task) for task in ("", "Inpaint")] == [KIND, "QwenImageInpaintPipeline"]
    with pytest.raises(InputError, match=r"generate with sd_ort\.QwenImagePipeline"):
        accelerate(models.theirs(FAMILY, KIND), hoisted.folder, provider="cpu")


def test_preset_is_the_published_model() -> None:
    """20.4 billion parameters, and the classes of its folder."""
    with torch.device("meta"):
        model = build_model(CLASS, PRESETS["qwen-image"].models["transformer"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 20.4
    index = open_preset("qwen-image", 0).index
    assert index["text_encoder"] == ["transformers", "Qwen2_5_VLForConditionalGeneration"]
    assert index["vae"] == ["diffusers", "AutoencoderKLQwenImage"]
