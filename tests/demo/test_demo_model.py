"""The demo's scenes, its fidelity score (accepts correct images, rejects others), and the committed model."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sd_ort.core.errors import InputError
from sd_ort.demo import GUIDANCE, HEIGHT, MODEL_DIR, STEPS, WIDTH, fidelity, scenes
from sd_ort.demo.scenes import COLORS, POSITIONS, RADII, RELATIONS, SHAPES, Item, Scene

WEIGHTS = sorted(MODEL_DIR.glob("*/*.safetensors"))


def render(scene: Scene, seed: object = 0) -> np.ndarray:
    return scenes.render(scene, scenes.random_geometry(scene, random.Random(f"draw {seed}")))


def some_scenes(count: int, items: int | None = None, seed: object = 0) -> list[Scene]:
    rng = random.Random(f"scenes {seed}")
    return [scenes.sample(rng, items or 1 + i % 2, unseen=bool(i // 2 % 2)) for i in range(count)]


# --- Scenes -----------------------------------------------------------------------------------------------------------


def test_captions_are_parsed() -> None:
    for scene in some_scenes(500):
        assert scenes.parse(scenes.caption(scene)) == scene
    assert scenes.parse("A red circle  on a blue background.") == Scene((Item("circle", "red"),), "blue")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a dog",
        "a red circle",
        "red circle on a blue background",
        "a red dog on a blue background",
        "a red circle on a beige background",
        "a huge red circle on a blue background",
        "a red circle on a blue sky",
        "a red circle and a blue square and a green star on a black background",
    ],
)
def test_other_captions_are_rejected(text: str) -> None:
    with pytest.raises(InputError):
        scenes.parse(text)


def test_images_are_deterministic_and_antialiased() -> None:
    scene = scenes.parse("a black circle on a white background")
    image = render(scene)
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(image, render(scene))
    assert not np.array_equal(image, render(scene, 1))
    assert len(np.unique(image)) > 10  # edges mix the two colors


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_adds_up_to_the_area(shape: str) -> None:
    # Areas of the unit shapes: equilateral triangle of side 2, cross with arms 2/3 wide, ring of radii 1 and 0.55,
    # pentagram of circumradius 1.
    area = {
        "circle": np.pi,
        "square": 4.0,
        "triangle": np.sqrt(3),
        "diamond": 2.0,
        "cross": 4 / 9 + 4 * (2 / 3) ** 2,
        "ring": np.pi * (1 - 0.55**2),
        "star": 1.1225699,
    }[shape]
    y, x = np.meshgrid(np.arange(-40, 40) + 0.5, np.arange(-40, 40) + 0.5, indexing="ij")
    assert scenes.coverage(shape, x, y, 30.0).sum() == pytest.approx(area * 30.0**2, rel=0.01)


def test_all_captions_of_a_combination_are_on_one_side_of_the_split() -> None:
    for scene in some_scenes(200, items=2):
        a, b = scene.items
        for first, second in itertools.permutations((replace(a, size="small"), replace(b, size=None))):
            assert scenes.is_unseen(Scene((first, second), scene.background, "above")) == scenes.is_unseen(scene)
    rng = random.Random(0)
    assert not any(scenes.is_unseen(scenes.sample(rng, 1 + i % 2, unseen=False)) for i in range(200))


def test_unseen_prompts() -> None:
    prompts = scenes.unseen_prompts(300, seed=5)
    parsed = [scenes.parse(p) for p in prompts]
    assert len(set(prompts)) == 300
    assert all(scenes.is_unseen(scene) for scene in parsed)
    assert {len(scene.items) for scene in parsed} == {1, 2}
    assert {item.shape for scene in parsed for item in scene.items} == set(SHAPES)
    assert {scene.background for scene in parsed} == set(COLORS)
    assert prompts == scenes.unseen_prompts(300, seed=5) != scenes.unseen_prompts(300, seed=6)


def test_training_data_matches_its_captions_and_is_never_unseen() -> None:
    import torch
    from transformers import CLIPTokenizer

    from scripts.fixtures import demo_data, demo_model

    tokenizer = CLIPTokenizer.from_pretrained(MODEL_DIR / "tokenizer")
    ids = {word: tokenizer(word).input_ids[1] for word in scenes.vocabulary()}
    ids |= {demo_model.START: tokenizer.bos_token_id, demo_model.END: tokenizer.eos_token_id}
    data = demo_data.Data(*map(torch.from_numpy, demo_data.sample_chunk((3, 200, ids))))
    images = demo_data.render(data, torch.arange(200))
    images = ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    captions = tokenizer.batch_decode(data.tokens, skip_special_tokens=True)
    assert not any(scenes.is_unseen(scenes.parse(caption)) for caption in captions)
    assert fidelity.score(captions, images).failures == ()
    assert torch.equal(tokenizer(captions, padding="max_length", return_tensors="pt").input_ids, data.tokens)


# --- Fidelity: correct images -----------------------------------------------------------------------------------------


def test_correct_images_are_accepted() -> None:
    chosen = some_scenes(600)
    result = fidelity.score(map(scenes.caption, chosen), (render(s, i) for i, s in enumerate(chosen)))
    assert result.total == 600
    assert result.share >= 0.995, result.failures


def test_slightly_wrong_pixels_are_accepted() -> None:
    """Noise and soft edges, as a VAE generates them."""
    chosen, noise = some_scenes(200, seed="noise"), np.random.default_rng(0)
    images = []
    for i, scene in enumerate(chosen):
        image = render(scene, i).astype(np.float32)
        soft = (image + sum(np.roll(image, s, a) for s in (-1, 1) for a in (0, 1))) / 5
        images.append((soft + noise.normal(0, 4, image.shape)).clip(0, 255).astype(np.uint8))
    assert fidelity.score(map(scenes.caption, chosen), images).share >= 0.99


def test_detected_measures() -> None:
    scene = scenes.parse("a green ring on a pink background")
    detected = fidelity.detect_scene(scenes.render(scene, [(40, 80, 20)]))
    assert detected.background == "pink"
    (item,) = detected.items
    assert (item.shape, item.color) == ("ring", "green")
    assert (item.x, item.y, item.half_size) == pytest.approx((40, 80, 20), abs=1)


def test_larger_images_have_the_same_measures() -> None:
    scene = scenes.parse("a small red star right of a large cyan cross on a black background")
    image = render(scene).repeat(2, axis=0).repeat(2, axis=1)
    assert fidelity.mismatch(scenes.caption(scene), image) is None


# --- Fidelity: other images -------------------------------------------------------------------------------------------


def assert_rejected(prompt: Scene, other: Scene, seed: object, reason: str) -> None:
    mismatch = fidelity.mismatch(scenes.caption(prompt), render(other, seed))
    assert mismatch, f"{scenes.caption(other)!r} was accepted for {scenes.caption(prompt)!r}"
    assert reason in mismatch


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_other_shape_is_rejected(size: str) -> None:
    for i, (expected, actual) in enumerate(itertools.permutations(SHAPES, 2)):
        prompt = Scene((Item(expected, "red"),), "white")
        assert_rejected(prompt, Scene((Item(actual, "red", size),), "white"), i, f"generated as red {actual}")


def test_every_other_color_is_rejected() -> None:
    for i, (expected, actual) in enumerate(itertools.permutations(COLORS, 2)):
        ground = next(c for c in ("white", "blue", "black") if c not in (expected, actual))
        prompt, other = (Scene((Item("square", c),), ground) for c in (expected, actual))
        assert_rejected(prompt, other, i, f"generated as {actual} square")


def test_every_other_background_is_rejected() -> None:
    for i, (expected, actual) in enumerate(itertools.permutations(COLORS, 2)):
        color = next(c for c in ("white", "blue", "black") if c not in (expected, actual))
        prompt, other = (Scene((Item("diamond", color),), c) for c in (expected, actual))
        assert_rejected(prompt, other, i, f"background {actual}")


def test_missing_and_additional_objects_are_rejected() -> None:
    for i, scene in enumerate(some_scenes(60, items=2, seed="missing")):
        pair = replace(scene, position=None)
        for item in pair.items:
            single = Scene((item,), pair.background)
            assert_rejected(pair, single, i, "1 objects")
            assert_rejected(single, pair, i, "2 objects")


def test_swapped_colors_and_shapes_are_rejected() -> None:
    for i, scene in enumerate(some_scenes(100, items=2, seed="swap")):
        a, b = scene.items
        if a.color == b.color or a.shape == b.shape:
            continue
        swapped = (replace(a, color=b.color), replace(b, color=a.color))
        assert_rejected(replace(scene, position=None), replace(scene, items=swapped, position=None), i, "generated as")


def test_wrong_sizes_are_rejected() -> None:
    for i, (shape, (expected, actual)) in enumerate(itertools.product(SHAPES, itertools.permutations(scenes.SIZES))):
        prompt, other = (Scene((Item(shape, "blue", size),), "yellow") for size in (expected, actual))
        assert_rejected(prompt, other, i, f"not {expected}")


def test_wrong_positions_are_rejected() -> None:
    single, pair = (Item("circle", "red"),), (Item("circle", "red"), Item("star", "green"))
    for items, positions in ((single, POSITIONS), (pair, RELATIONS)):
        for i, (expected, actual) in enumerate(itertools.permutations(positions, 2)):
            assert_rejected(Scene(items, "white", expected), Scene(items, "white", actual), i, f"not {expected}")


def test_empty_images_are_rejected() -> None:
    prompt = "a red circle on a blue background"
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    blue = np.full((128, 128, 3), COLORS["blue"], np.uint8)
    assert fidelity.mismatch(prompt, blue) == "0 objects"
    assert not fidelity.matches(prompt, noise)
    assert not fidelity.matches(prompt, np.zeros((128, 128, 3), np.uint8))


def test_no_color_and_no_shape() -> None:
    prompt = scenes.parse("a red circle on a blue background")
    image = render(prompt)
    gray = image.copy()
    gray[(image == COLORS["red"]).all(axis=-1)] = (128, 128, 128)
    assert "no known color circle" in str(fidelity.mismatch(scenes.caption(prompt), gray))
    half = scenes.render(prompt, [(64, 64, 24)])
    half[:, 64:] = COLORS["blue"]
    assert "red no shape" in str(fidelity.mismatch(scenes.caption(prompt), half))


def test_score() -> None:
    correct, wrong = "a red circle on a blue background", "a red square on a blue background"
    image = render(scenes.parse(correct))
    result = fidelity.score([correct, wrong, correct, correct], [image] * 4)
    assert (result.correct, result.total, result.share) == (3, 4, 0.75)
    assert result.failures == ((wrong, "red square generated as red circle"),)
    with pytest.raises(ValueError, match="shorter"):
        fidelity.score([correct, wrong], [image])
    with pytest.raises(InputError, match="no prompts"):
        fidelity.score([], [])


@pytest.mark.parametrize("image", [np.zeros((128, 128)), np.zeros((64, 64, 3), np.float32)])
def test_other_arrays_are_rejected(image: np.ndarray) -> None:
    with pytest.raises(InputError, match="uint8"):
        fidelity.detect_scene(image)


def test_the_size_threshold() -> None:
    """The size threshold lies between the largest small and the smallest large shape, with 1 px to spare."""
    half = [max(w, (bottom - top) / 2) for _distance, (w, top, bottom) in SHAPES.values()]
    assert max(half) * RADII["small"][1] + 1 < fidelity.SMALL_BELOW < min(half) * RADII["large"][0] - 1


# --- The committed model ----------------------------------------------------------------------------------------------


def test_weights_are_small_float16_and_trained() -> None:
    from safetensors.numpy import load_file

    assert [p.parent.name for p in WEIGHTS] == ["text_encoder", "unet", "vae"]
    assert sum(p.stat().st_size for p in MODEL_DIR.rglob("*") if p.is_file()) <= 25e6
    tensors = {f"{p.parent.name}.{name}": t for p in WEIGHTS for name, t in load_file(p).items()}
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float16)}
    assert sum(t.size for t in tensors.values()) <= 12e6
    # Fusions that mix up biases or norms must show: none is zero and no two are alike.
    vectors = [t.tobytes() for name, t in tensors.items() if t.ndim == 1 and t.size > 3]
    assert len(set(vectors)) == len(vectors)
    assert all(np.isfinite(t).all() and t.any() for t in tensors.values())


def test_the_folder_has_diffusers_layout() -> None:
    index = json.loads((MODEL_DIR / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["safety_checker"] == [None, None]
    assert not [p for p in MODEL_DIR.rglob("*.json") if "_name_or_path" in p.read_text()]
    unet = json.loads((MODEL_DIR / "unet/config.json").read_text())
    assert unet["down_block_types"] == ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
    assert unet["up_block_types"] == ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3
    assert unet["layers_per_block"] == 2
    assert all(channels % 64 == 0 for channels in unet["block_out_channels"])


def test_the_tokenizer_has_every_word() -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(MODEL_DIR / "tokenizer")
    for word in scenes.vocabulary():
        assert tokenizer.tokenize(word) == [f"{word}</w>"]
    tokens = tokenizer("A Red circle, on été!", padding="max_length", truncation=True).input_ids
    assert len(tokens) == tokenizer.model_max_length == 77
    assert tokenizer.unk_token_id not in tokens[1 : tokens.index(tokenizer.eos_token_id)]


def test_the_model_generates_unseen_prompts() -> None:
    import torch
    from diffusers import StableDiffusionPipeline

    from scripts.fixtures import train_demo_model

    pipeline = StableDiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    prompts = scenes.unseen_prompts(8, seed=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other longer than one works
    try:
        result = fidelity.score(prompts, train_demo_model.draw(pipeline, prompts, 0, STEPS, GUIDANCE, batch=8))
    finally:
        torch.set_num_threads(threads)
    assert result.correct >= 7, result.failures


def test_recorded_score() -> None:
    """results/ has the score of the committed weights, on enough prompts and high enough."""
    from sd_ort.core.pipeline_folder import sha256

    report = json.loads((Path(__file__).parents[2] / "results/demo_fidelity_torch.json").read_text())
    assert report["weights_sha256"] == {str(p.relative_to(MODEL_DIR)): sha256(p) for p in WEIGHTS}
    run = report["runs"][0]
    assert (report["dtype"], run["steps"], run["guidance"]) == ("float32", STEPS, GUIDANCE)
    assert report["prompts"] >= 200
    assert run["share"] == run["right"] / report["prompts"] >= 0.95
