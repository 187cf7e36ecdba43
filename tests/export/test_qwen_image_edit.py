"""Tests of Qwen-Image-Edit: vision tower, image prompts, fusions and images beside diffusers, and bad input."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from image_metrics import psnr
from PIL import Image
from transformer_families import built, check_cache, nmse

from scripts.fixtures import parity_pairs
from scripts.fixtures.parity_models import Models, qwen_processor
from scripts.fixtures.parity_pairs import Pair, sample_image
from sd_ort import QwenImageEditPipeline, transformer_pipeline
from sd_ort.checkpoints.checkpoint import build_model, select_components
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS, QWEN_PREPROCESSOR
from sd_ort.checkpoints.random_weights import fill_random
from sd_ort.checkpoints.signatures import READS_IMAGES, vision_config
from sd_ort.core.errors import InputError
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import verify
from sd_ort.pipelines import transformer_qwen_edit
from sd_ort.pipelines.qwen_vision import VisionProcessor, VisionTokenizer, encode_chats
from sd_ort.pipelines.transformer_qwen_image import Embeddings
from sd_ort.stages import optimize

FAMILY, KIND, PLUS = "qwen_edit", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
LEAST_PSNR = 100  # dB; measured: 120. Another image or other positions of its tokens change no more than 60 and 90
PAIRS = [pair for pair in parity_pairs.pairs() if pair.family == FAMILY]
TEMPLATE = transformer_qwen_edit.TEMPLATE


@pytest.fixture(scope="module")
def tokenizer(models: Models) -> VisionTokenizer:
    return VisionTokenizer(Path(models.export(FAMILY)) / "tokenizer", TEMPLATE, reads_padding=False)


@pytest.fixture(scope="module")
def processor(models: Models) -> VisionProcessor:
    return VisionProcessor.open(
        Path(models.export(FAMILY)), vision_config(built(FAMILY, "text_encoder").config.to_dict())
    )


# --- The modules that are exported, and their inputs ----------------------------------------------------------------


def test_transformers_still_needs_the_vision_module() -> None:
    """If this fails, transformers' vision tower exports as it is: remove qwen_vision_modules.py."""
    visual = built(FAMILY, "text_encoder").model.visual
    config = visual.config
    pixels = torch.randn(96, config.in_channels * config.temporal_patch_size * config.patch_size**2)
    shapes = ({0: torch.export.Dim("patches", min=16, max=4096)}, {})
    with pytest.raises(Exception, match=r"data-dependent|specialized|Constraints violated|Could not"):
        torch.export.export(visual, (pixels, torch.tensor([[1, 8, 12]])), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("size", [(112, 224), (140, 308), (56, 84)], ids=["whole windows", "cut windows", "one window"])
def test_the_vision_tower_equals_transformers(processor: VisionProcessor, size: tuple[int, int]) -> None:
    """Windows as a batch, also with empty places; attention of the whole image in the last block."""
    inputs, places, (rows, columns) = processor.inputs(sample_image(*size))
    patches = np.take(inputs["pixel_values"].reshape(-1, inputs["pixel_values"].shape[-1]), inputs["patch_ids"], 0)
    grid = torch.tensor([[1, 2 * rows, 2 * columns]])
    model = built(FAMILY, "text_encoder").model.visual
    assert {0, 1} - {*model.fullatt_block_indexes} == {0}, "one block of windows, and one of the image"
    with torch.no_grad():
        expected = model(torch.from_numpy(patches), grid).pooler_output
        module = wrap("vision_encoder", built(FAMILY, "text_encoder"), False, False)
        tokens = module(*(torch.from_numpy(array) for array in inputs.values()))
    assert nmse(tokens[torch.from_numpy(places)], expected) <= 1e-11


def test_images_in_prompts_equal_transformers(
    models: Models, tokenizer: VisionTokenizer, processor: VisionProcessor
) -> None:
    """Pixels, token ids, positions and hidden states of two prompts about two images."""
    images, prompts = [sample_image(150, 90), sample_image(64, 64, 40)], ["a", "a red circle"]
    before = "".join(f"Picture {number}: {transformer_qwen_edit.IMAGE}" for number in (1, 2))
    chats = [TEMPLATE.replace("{}", before + prompt) for prompt in prompts]
    theirs = qwen_processor(models.theirs(FAMILY, KIND).tokenizer, QWEN_PREPROCESSOR)
    expected = theirs(text=chats, images=images * 2, padding=True, return_tensors="pt")
    seen = [processor.inputs(image) for image in images]
    inputs = encode_chats(tokenizer, chats, [grid for _, _, grid in seen])
    np.testing.assert_array_equal(inputs["input_ids"], expected["input_ids"])
    np.testing.assert_array_equal(inputs["attention_mask"], expected["attention_mask"])
    pixels = [each["pixel_values"].reshape(-1, each["pixel_values"].shape[-1])[each["patch_ids"]] for each, *_ in seen]
    np.testing.assert_allclose(np.concatenate(pixels * 2), expected["pixel_values"], atol=1e-6)

    model = built(FAMILY, "text_encoder")
    positions = model.model.get_rope_index(
        expected["input_ids"], expected["mm_token_type_ids"], expected["image_grid_thw"],
        attention_mask=expected["attention_mask"],
    )[0]  # fmt: skip
    visible = expected["attention_mask"].bool()
    np.testing.assert_array_equal(inputs["position_ids"][visible], positions.permute(1, 2, 0)[visible])
    with torch.no_grad():
        states = model(**expected, output_hidden_states=True).hidden_states[-1]
        vision = wrap("vision_encoder", built(FAMILY, "text_encoder"), False, False)
        embeds = [vision(*map(torch.from_numpy, each.values()))[torch.from_numpy(places)] for each, places, _ in seen]
        encoder = wrap("text_encoder", built(FAMILY, "text_encoder"), False, False)
        actual = encoder(*map(torch.from_numpy, inputs.values()), torch.cat(embeds))
    assert nmse(actual[visible], states[visible]) <= 1e-11


@pytest.mark.parametrize("modulates_references", [True, False])
def test_the_transformer_equals_diffusers(modulates_references: bool) -> None:
    """Two reference images of other sizes, modulated by timestep 0 or as the generated image."""
    config = PRESETS["qwen-image-edit-2511-tiny"].models["transformer"] | {"zero_cond_t": modulates_references}

    def model() -> Any:
        module: Any = build_model(config["_class_name"], config)
        fill_random(module, 1)
        return module.eval()

    generator, sizes = torch.Generator().manual_seed(0), ((5, 7), (4, 6), (9, 3))
    latents = torch.randn(2, sum(rows * columns for rows, columns in sizes), 64, generator=generator)
    texts = torch.randn(2, 9, config["joint_attention_dim"], generator=generator)
    call = {"hidden_states": latents, "encoder_hidden_states": texts, "return_dict": False}
    with torch.no_grad():
        shapes = [[(1, *size) for size in sizes]] * 2
        expected = model()(**call, timestep=torch.full((2,), 0.3), img_shapes=shapes)[0]
        ((rows, inputs),) = Embeddings(texts.numpy(), np.ones((2, 9), bool)).groups(*sizes)
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        module = wrap("transformer", model(), False, False)
        actual = module(hidden_states=latents, timestep=torch.tensor([0.3]), **tensors)
    assert rows == [0, 1]
    assert nmse(actual, expected) <= 1e-11


@pytest.mark.parametrize("size", [(1, 1), (1024, 1024), (640, 427), (31, 4000), (1999, 10)])
def test_sizes_are_those_of_diffusers(models: Models, size: tuple[int, int]) -> None:
    width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, size[0] / size[1])
    assert transformer_qwen_edit.size_of_area(1024 * 1024, Image.new("L", size)) == (width, height)


# --- Graphs ---------------------------------------------------------------------------------------------------------


def test_fusions(models: Models, tmp_path: Path) -> None:
    """Both blocks' attention, of windows and of the image; norms and gated layers; the hoisted transformer."""
    folder, out = Path(models.export(FAMILY)), tmp_path / "out"
    parts = ["vision_encoder", "text_encoder", "transformer"]
    optimize(folder, out, target="gpu", dtype="float16", components=parts, hoist=True)
    result = verify(folder, out, components=parts)
    assert result["passed"], result["rows"]
    counts = {name: Counter(node.op_type for node in load(out / name / "model.onnx").graph) for name in parts}
    vision = {"MultiHeadAttention": 2, "SwiGlu": 2, "AdaptiveNorm": 5, "Softmax": 0}
    assert {op: counts["vision_encoder"][op] for op in vision} == vision
    assert counts["text_encoder"]["RotaryEmbedding"] == 0, "positions differ by prompt"
    assert counts["transformer"]["Gemm"] == 0, "the modulation of references too leaves the step"


# --- Images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_same_image(models: Models, pair: Pair) -> None:
    outcome = parity_pairs.compare(models, pair)
    assert (outcome.psnr or 0) > LEAST_PSNR, outcome


CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "height": 32, "width": 48, "generator": 3}


def test_image_and_positions_count(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another image, or positions as in a text, change the image: the pairs see both."""
    pipeline, image = models.ours(FAMILY, KIND), sample_image(90, 150)
    first = pipeline(image, "a red circle", **CALL).images
    assert psnr(pipeline(image.transpose(Image.Transpose.ROTATE_180), "a red circle", **CALL).images, first) < 70

    def as_text(*arguments: Any) -> dict[str, np.ndarray]:
        inputs = encode_chats(*arguments)
        count = inputs["input_ids"].shape[1]
        return inputs | {"position_ids": np.broadcast_to(np.arange(count)[None, :, None], (1, count, 3)).copy()}

    monkeypatch.setattr(transformer_qwen_edit, "encode_chats", as_text)
    assert psnr(pipeline(image, "a red circle", **CALL).images, first) < LEAST_PSNR - 5


def test_first_block_cache(models: Models, hoisted: QwenImageEditPipeline) -> None:
    """The numbers of full steps and the image equal those of diffusers' FirstBlockCache."""
    call = CALL | {"image": sample_image(90, 150), "prompt": "a", "negative_prompt": "b c", "num_inference_steps": 12}
    del call["generator"]
    config = FirstBlockCacheConfig(threshold=0.3)
    check_cache(models.theirs(FAMILY, KIND), hoisted, config, "transformer_blocks.1.img_mod", call, fewest=2)


def test_several_prompts(models: Models) -> None:
    """Prompts of other lengths about one image, which diffusers refuses: each image as by itself."""
    pipeline, prompts = models.ours(FAMILY, PLUS), ["a", "a red circle"]
    call = CALL | {"image": sample_image(90, 150), "negative_prompt": " "}
    images = pipeline(prompt=prompts, **call | {"generator": [3, 4]}).images
    for number, prompt in enumerate(prompts):
        alone = pipeline(prompt=prompt, **call | {"generator": 3 + number}).images[0]
        assert psnr(images[number], alone) > 80


def test_generate_command(models: Models, sd_ort: Any, tmp_path: Path) -> None:
    sample_image(90, 150).save(tmp_path / "start.png")
    options = ["--height", "32", "--width", "48", "--provider", "cpu", "--seed", "3", "--steps", "2"]
    options += ["--model", str(models.export(FAMILY)), "--negative", "blurry", "--guidance", "3"]
    image = ["--image", tmp_path / "start.png"]
    assert sd_ort("generate", "a square", *options, *image, "--out", tmp_path / "image.png")[0] == 0
    call = {name: value for name, value in CALL.items() if name != "output_type"}
    more = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    expected = models.ours(FAMILY, PLUS)(sample_image(90, 150), "a square", **call, **more).images[0]
    with Image.open(tmp_path / "image.png") as written:
        assert np.array_equal(np.asarray(written), np.asarray(expected))
    code, _, error = sd_ort("generate", "a square", *options, "--out", tmp_path / "none.png")
    assert code != 0
    assert "changes images: give image" in error.splitlines()[-1]


# --- Files and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": None}, "changes images: give image, a PIL image"),
        ({"image": np.zeros((64, 64, 3))}, "give image, a PIL image"),
        (
            {"image": [sample_image(), sample_image()]},
            "2 images were given: give at most 1 or QwenImageEditPlusPipeline",
        ),
        ({"image": Image.new("I;16", (64, 64))}, "the mode I;16: convert it to RGB"),
        ({"image": Image.new("RGB", (1, 300))}, "image 1 x 300 is too long: at most 200 to 1"),
        ({"image": Image.new("RGB", (0, 3))}, "image 0 x 3 is too long"),
        ({"prompt": "a <|image_pad|>"}, "must not have the token"),
        ({"prompt": None}, "no prompt was given"),
        ({"max_sequence_length": 2000}, "between 1 and 1024"),
        ({"strength": 0.5}, "does not support the argument strength"),
    ],
)
def test_arguments_are_rejected_by_name(models: Models, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        models.ours(FAMILY, KIND)(**{"prompt": "a", "image": sample_image(), **CALL, **arguments})


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "CMYK"])
def test_modes(models: Models, mode: str) -> None:
    """Images of 8 bits are read as their RGB forms, also those for which diffusers fails."""
    image = sample_image(90, 150).convert(mode)
    images = [models.ours(FAMILY, KIND)(each, "a", **CALL).images for each in (image, image.convert("RGB"))]
    np.testing.assert_array_equal(*images)


def test_folders(models: Models, tmp_path: Path) -> None:
    """A folder of diffusers: its vision tower is a component. Without its processor, and of other classes: refused."""
    folder = tmp_path / "diffusers"
    pipeline = models.theirs(FAMILY, KIND)
    processor, pipeline.processor = pipeline.processor, None
    try:
        pipeline.save_pretrained(folder)
    finally:
        pipeline.processor = processor
    path = folder / "text_encoder" / "config.json"  # as published, without our key
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items()
                                if name != READS_IMAGES}))  # fmt: skip
    path = folder / "model_index.json"
    index = json.loads(path.read_text()) | {"processor": ["transformers", "Qwen2VLProcessor"]}
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match="lacks its processor"):
        open_folder("edit", folder)
    shutil.copytree(Path(models.export(FAMILY)) / "processor", folder / "processor")
    checkpoint = open_folder("edit", folder)
    assert "vision_encoder" in select_components(checkpoint, None)
    config: Any = checkpoint.load("text_encoder").config
    assert config.reads_images
    name = "model.visual.blocks.0.attn.qkv.weight"
    assert checkpoint.read_tensors("text_encoder", [name])(name).shape == (96, 32)
    for kind, message in (("QwenImageEditInpaintPipeline", "edits whole images"), ("QwenImagePipeline", None)):
        path.write_text(json.dumps(index | {"_class_name": kind}))
        if message is None:
            assert "vision_encoder" not in select_components(open_folder("edit", folder), None)
            continue
        with pytest.raises(InputError, match=message):
            open_folder("edit", folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"patch_size": 16}, "patch_size = 16, and the vision tower 14"), ({"max_pixels": 0}, "damaged at 'max_pixels'")],
)
def test_damaged_processors(models: Models, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "processor").mkdir()
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(QWEN_PREPROCESSOR | settings))
    with pytest.raises(InputError, match=message):
        VisionProcessor.open(tmp_path, vision_config({"vision_config": {}}))
    (tmp_path / "processor" / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"lacks its processor/preprocessor_config\.json"):
        VisionProcessor.open(tmp_path, vision_config({"vision_config": {}}))


def test_tasks() -> None:
    assert transformer_pipeline(KIND, "Img2Img") == transformer_pipeline(KIND, "") == KIND
    with pytest.raises(InputError, match="Qwen-Image-Edit has no inpainting"):
        transformer_pipeline(PLUS, "Inpaint")
    assert QwenImageEditPipeline.OTHER_INDEX_CLASSES == (PLUS,)
