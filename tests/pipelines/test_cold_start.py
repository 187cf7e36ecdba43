"""Images without torch, diffusers, transformers and onnx_ir, in the first process of a folder too."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.numpy import save_file

from sd_ort.core.errors import InputError
from sd_ort.pipelines import noise
from sd_ort.pipelines.images import as_image, nearest, preprocess
from sd_ort.pipelines.mask_crop import crop_region, fill, overlay


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch draws other numbers elsewhere")
def test_noise_is_torchs_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1, 7, 2**31, 2**32 + 5, 2**64 - 1, -1, -(2**63), *range(100, 120)):
        theirs, ours = torch.Generator().manual_seed(seed), noise.TorchNormalGenerator(seed)
        # Some are no whole number of blocks, and some, as of an image of 8 x 8 pixels, less than one.
        for shape in ((1, 4, 72, 64), (1, 4, 1, 1), (2, 4, 8, 24), (3,), (3, 7), (5,), (16,), (1, 4, 1, 2)):
            assert ours.draw(shape).tobytes() == torch.randn(shape, generator=theirs).numpy().tobytes()
    seeds = [3, torch.Generator().manual_seed(4)]
    each = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)).numpy() for seed in (3, 4)]
    assert (noise.draw_noise((2, 4, 8, 8), noise.noise_generators(seeds)) == np.concatenate(each)).all()
    monkeypatch.delitem(sys.modules, "torch")
    samples = noise.draw_noise((1, 4, 8, 8), noise.noise_generators(3))
    assert samples.tobytes() == each[0].tobytes()
    by_chance = noise.draw_noise((2, 4, 8, 8), None)
    assert abs(by_chance.std() - 1) < 0.3
    assert (by_chance[0] != by_chance[1]).all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch draws other numbers elsewhere")
def test_noise_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same noise, the next one too, and if another shape or seed is asked for; a failure is raised where it is read."""
    monkeypatch.delitem(sys.modules, "torch")
    shape, other = (1, 4, 8, 8), (1, 4, 8, 4)
    with ThreadPoolExecutor(1) as executor:
        assert noise.start_noise(5, shape, executor) == noise.start_noise(None, shape, executor) == []
        started = noise.start_noise([5, 6, 5], shape, executor)
        both = noise.noise_generators([5, 7], started)
        assert [each.seed for each in started] == [6, 5]
        for generator, seed in zip(both, (5, 7), strict=True):
            plain = noise.TorchNormalGenerator(seed)
            for _ in range(2):
                assert generator.draw(shape).tobytes() == plain.draw(shape).tobytes()
        generator, plain = noise.noise_generators(6, started), noise.TorchNormalGenerator(6)
        assert [generator.draw(each).tobytes() for each in (other, shape)] == [
            plain.draw(each).tobytes() for each in (other, shape)
        ]
        monkeypatch.setattr(noise, "to_normal", lambda *_: 1 / 0)
        (generator,) = noise.start_noise([5], shape, executor)
        with pytest.raises(ZeroDivisionError):
            generator.draw(shape)


def fused(a: np.ndarray, b: Any, c: Any, wide: np.ndarray) -> None:
    """Replace `a` by a * b + c, rounded once: where the sum in float64 lies half way between two float32 numbers, it
    is moved to its neighbor on the side of the exact sum."""
    product = a.astype(np.float64) * b
    total = product + c
    half = np.flatnonzero(total.view(np.int64) & 0x1FFFFFFF == 0x10000000)
    added = total[half] - product[half]
    rest = (product[half] - (total[half] - added)) + (np.broadcast_to(c, a.shape)[half] - added)
    total[half] = np.where(rest, np.nextafter(total[half], np.where(rest > 0, np.inf, -np.inf)), total[half])
    a[...] = total


def test_no_uniform_sample_is_rounded_otherwise_in_two_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^24 samples: logarithm, cosine and sine of fused multiply-adds to the byte, without fusing them."""
    last = np.float32(2**-23)  # the last bit of 1; a b is a little less than half of it
    a, b, c = np.full(2, np.float32(2**-24) * (1 + last)), np.float64(1 - last), np.array([1 + last, 1 + last])
    once, twice = a.copy(), a.copy()
    fused(once, b, c, np.empty(2))
    noise.multiply_add(twice, b, c, np.empty(2))
    assert (once == c).all()
    assert (twice != c).all()  # rounded to the half, and then up
    size, wide = 1 << 14, np.empty(1 << 14)
    for start in range(0, 1 << 24, size):
        uniform = np.arange(start, start + size, dtype=np.float32) * np.float32(2**-24)
        inputs = np.float32(1) - uniform, np.float32(2 * np.pi) * uniform
        results = []
        for function in (noise.multiply_add, fused):
            monkeypatch.setattr(noise, "multiply_add", function)
            results.append((noise.log(inputs[0], wide), *noise.cosine_sine(inputs[1], wide)))
        for two, one in zip(*results, strict=True):
            assert two.tobytes() == one.tobytes()


# --- Images that are given ------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, (70, 50, 3), dtype=np.uint8)
WIDE = Image.fromarray(RANDOM.integers(0, 256, (30, 90, 3), dtype=np.uint8))
IMAGES: list[Any] = [
    Image.fromarray(BYTES), [Image.fromarray(BYTES), WIDE], Image.fromarray(BYTES[..., 0]), BYTES, [BYTES, BYTES],
    RANDOM.random((2, 70, 50, 3)), RANDOM.random((70, 50)), torch.rand(3, 70, 50), torch.rand(2, 3, 70, 50),
    [torch.rand(3, 70, 50)] * 2, torch.rand(1, 4, 8, 8), [torch.rand(1, 3, 40, 41)] * 2,
]  # fmt: skip
MASKS: list[Any] = [
    Image.fromarray(BYTES), [Image.fromarray(BYTES)] * 2, RANDOM.random((70, 50)), RANDOM.random((70, 50, 1)),
    RANDOM.random((2, 70, 50)), [RANDOM.random((70, 50))] * 2, torch.rand(70, 50), torch.rand(1, 70, 50),
    torch.rand(2, 70, 50), torch.rand(2, 1, 70, 50), [torch.rand(1, 70, 50)] * 2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Passing `image` as a list of 4d:FutureWarning")
def test_images_are_diffusers_to_the_byte() -> None:
    signed = VaeImageProcessor(8, vae_latent_channels=4, do_convert_rgb=True)
    unsigned = VaeImageProcessor(8, do_convert_rgb=True, do_normalize=False)
    for image in map(as_image, IMAGES):
        for theirs, is_signed in ((signed, True), (unsigned, False)):
            expected = theirs.preprocess(image, 64, 56).float().numpy()
            ours = preprocess(image, 64, 56, signed=is_signed, latent_channels=4)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, expected)


def test_masks_are_diffusers_to_the_byte() -> None:
    theirs = VaeImageProcessor(8, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    for mask in map(as_image, MASKS):
        expected = theirs.preprocess(mask, 64, 56).float().numpy()
        np.testing.assert_array_equal(preprocess(mask, 64, 56, mask=True), expected)
    x = torch.rand(1, 1, 70, 50)
    for size in ((8, 8), (9, 13), (100, 64)):
        np.testing.assert_array_equal(nearest(x.numpy(), *size), torch.nn.functional.interpolate(x, size=size).numpy())


def test_crops_of_masks_are_diffusers_to_the_byte() -> None:
    images, masks = (
        VaeImageProcessor(8),
        VaeImageProcessor(8, do_normalize=False, do_binarize=True, do_convert_grayscale=True),
    )
    image, patch = Image.fromarray(BYTES), Image.fromarray(BYTES[:64, :48])
    for left, top, right, bottom, padding in (
        (5, 9, 20, 60, 4),
        (0, 0, 50, 70, 0),
        (40, 2, 49, 5, 9),
        (3, 66, 44, 69, 1),
    ):
        mask = Image.new("L", image.size)
        mask.paste(255, (left, top, right, bottom))
        for width, height in ((64, 64), (96, 40), (40, 96)):
            region = masks.get_crop_region(mask, width, height, pad=padding)
            assert crop_region(mask, width, height, padding) == region
            for processor, each, is_mask in ((images, image, False), (masks, mask, True)):
                expected = processor.preprocess(each, height, width, crops_coords=region, resize_mode="fill").numpy()
                filled = preprocess(fill(each, region, width, height), height, width, mask=is_mask)
                np.testing.assert_array_equal(filled, expected)
            laid = overlay(mask, image, patch, region)
            np.testing.assert_array_equal(laid, masks.apply_overlay(mask, image, patch, region))
    with pytest.raises(InputError, match="no pixel above 0"):
        crop_region(Image.new("L", image.size), 64, 64, 4)


# --- The command ----------------------------------------------------------------------------------------------------

SLOW_PACKAGES = ("diffusers", "onnx", "onnx_ir", "torch", "transformers")
FIRST_TIME = "onnx"  # checks a folder that no earlier process has seen
COMMANDS = f"""
import json, sys
from sd_ort.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["sd-ort", *words]
    try:
        main()
    except SystemExit as exit_:
        if exit_.code:
            raise
    print("imported:", *(name for name in {SLOW_PACKAGES!r} if name in sys.modules))
"""
# Options of the commands of one process.
KINDS: dict[str, dict[str, list[str]]] = {
    "generate": {
        "text": [],
        "schedulers": ["--scheduler", "dpmsolver", "--negative", "blue"],
        "image": ["--image", "{image}", "--scheduler", "euler_ancestral"],
        "inpainting": ["--image", "{image}", "--mask", "{image}"],
        "weights": ["--weights", "--negative", "(blue:1.2)"],
        "controlnet": ["--control-image", "{image}"],
    },
    "change weights": {"lora": ["--lora", "{lora}:0.5"], "embedding": ["--embedding", "{word}"]},
}


@pytest.mark.parametrize("kinds", KINDS)
def test_commands_import_none_of_them(
    kinds: str, cache: Path, small_export: Path, controlled: Path, tmp_path: Path
) -> None:
    """In the first process of a folder and a cache, and in the second."""
    Image.fromarray(BYTES).save(tmp_path / "in.png")
    width = json.loads((small_export / "unet" / "config.json").read_text())["block_out_channels"][-1]
    query = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    lora = {f"{query}.lora_A.weight": np.ones((2, width)), f"{query}.lora_B.weight": np.ones((width, 2))}
    save_file({name: factor.astype(np.float32) for name, factor in lora.items()}, tmp_path / "lora.safetensors")
    save_file({"<circle>": np.ones(64, np.float32)}, tmp_path / "word.safetensors")
    files = {"image": "in.png", "lora": "lora.safetensors", "word": "word.safetensors"}
    paths = {name: tmp_path / file for name, file in files.items()}
    for process, expected in (("first", FIRST_TIME), ("second", FIRST_TIME if kinds == "change weights" else "")):
        commands = []
        for kind, options in KINDS[kinds].items():
            folder = controlled if kind == "controlnet" else small_export
            words = ["generate", "a red <circle>", "--model", folder, "--steps", 4, "--height", 64, "--width", 64]
            words += ["--seed", 1, *(option.format(**paths) for option in options)]
            commands.append([str(word) for word in (*words, "--out", tmp_path / f"{kind} {process}.png")])
        assert run(COMMANDS, json.dumps(commands)) == [expected] * len(commands)
    for kind in KINDS[kinds]:
        images = [Image.open(tmp_path / f"{kind} {process}.png") for process in ("first", "second")]
        np.testing.assert_array_equal(*map(np.asarray, images))


def test_a_replica_imports_none_of_them(cache: Path, small_export: Path, tmp_path: Path) -> None:
    """`serve`'s and `--replicas`' processes, and the loop on the device, whose graphs are cached too."""
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sd_ort.serving.replica import PipelineReplica, ReplicaConfig
import numpy as np
from PIL import Image
from sd_ort import StableDiffusionInpaintPipeline
replica = PipelineReplica(ReplicaConfig(Path({str(small_export)!r}), {{"device_loop": True}}))
replica.pipeline("a red circle", num_inference_steps=2, height=64, width=64, generator=0, progress=False)
pipeline = StableDiffusionInpaintPipeline.from_pipe(replica.pipeline)
image, mask = Image.new("RGB", (70, 50)), Image.new("L", (70, 50))
mask.paste(255, (20, 20, 30, 40))
pipeline("a red circle", image, mask, num_inference_steps=2, height=64, width=64, padding_mask_crop=4, progress=False)
print("imported:", *(name for name in {SLOW_PACKAGES!r} if name in sys.modules))
"""
    assert [run(code), run(code)] == [[FIRST_TIME], [""]]


def run(code: str, *arguments: str) -> list[str]:
    """Run Python code in a process of its own; the slow packages that it names in each line."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line.removeprefix("imported:").strip() for line in lines if line.startswith("imported:")]
