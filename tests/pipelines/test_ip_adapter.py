"""IP-Adapters: exported with a U-Net, fused, and used as in diffusers; files that do not fit are refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from small_presets import mini

from scripts.fixtures import ip_adapters
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import relative_l2_error
from sd_ort.export import templates
from sd_ort.export.exporter import export
from sd_ort.optimize.merge import merge
from sd_ort.pipelines.ip_adapter import layer_scales
from sd_ort.stages import optimize

TOLERANCE = 2e-5  # relative error of fp32 latents; what pictures change is above EFFECT
EFFECT = 0.01
SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 4.0, "height": 64, "width": 64}
Y, X = np.mgrid[:40, :57]
PICTURE = Image.fromarray(np.stack([6 * Y, 4 * X, X * Y % 256], -1).astype(np.uint8))
OTHER = PICTURE.rotate(90)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def presets() -> Iterator[None]:
    """`sd15-seen`, sd15-small with a small U-Net, and `sdxl-seen`, both without weights."""
    small = PRESETS["sd15-small"]
    PRESETS["sd15-seen"] = replace(small, models={**small.models, "unet": mini(PRESETS["sd15-tiny"]).models["unet"]})
    PRESETS["sdxl-seen"] = mini(PRESETS["sdxl-tiny"])
    yield
    del PRESETS["sd15-seen"], PRESETS["sdxl-seen"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of both kinds, and the image encoder beside them."""
    root = tmp_path_factory.mktemp("adapters")
    ip_adapters.make_encoder(root / "image_encoder")
    ip_adapters.make_adapter(root, "sd15-seen")
    for preset in ("sd15-seen", "sdxl-seen"):
        ip_adapters.make_adapter(root, preset, plus=True)
    return root


def adapted(preset: str, file: Path, encoder: Path | None = None) -> Any:
    return open_checkpoint(
        None, CheckpointOptions(preset=preset, random_weights=True, ip_adapter=file, image_encoder=encoder)
    )


@pytest.fixture(scope="module")
def folder(files: Path, small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A pipeline folder with an adapter, "sd15-seen" or "sd15-seen-plus"."""
    exported: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in exported:
            out = tmp_path_factory.mktemp("exported") / name
            parts = ["unet"] if exported else ["image_encoder", "unet"]
            options = {"exporter": "torchscript", "opset": 17, "components": parts}
            adapter = files / f"{name}.safetensors"
            export(None, out, preset="sd15-seen", random_weights=True, ip_adapter=adapter, **options)  # type: ignore[arg-type]
            for part in ("text_encoder", "vae_decoder"):
                shutil.copytree(small_export / part, out / part)
            if exported:
                shutil.copytree(next(iter(exported.values())) / "image_encoder", out / "image_encoder")
            exported[name] = out
        return exported[name]

    return make


@pytest.fixture(scope="module")
def reference(files: Path) -> Callable[[str], Any]:
    """diffusers' pipeline with the same adapter."""

    def make(name: str) -> Any:
        result = torch_pipeline("sd15-seen", random_weights=True)
        result.load_ip_adapter(
            str(files), subfolder="", weight_name=f"{name}.safetensors", image_encoder_folder="image_encoder"
        )
        return result

    return make


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(7)
    call = {"generator": generator, "output_type": "latent", **SETTINGS, **arguments}
    return np.asarray(pipeline("a red circle", **call)[0])


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return relative_l2_error(actual, expected)


# --- As diffusers ---------------------------------------------------------------------------------------------------


def test_sdxl_unet_with_plus(files: Path) -> None:
    """The modules that are traced, against diffusers' own, of two pictures an image."""
    import diffusers

    file = files / "sdxl-seen-plus.safetensors"
    ours = adapted("sdxl-seen", file).load("unet")
    theirs = open_preset("sdxl-seen", 0).load("unet")
    pipe = diffusers.StableDiffusionXLPipeline(*[None] * 5, theirs, diffusers.DDIMScheduler())
    pipe.load_ip_adapter(str(files), subfolder="", weight_name=file.name, image_encoder_folder=None)
    pipe.set_ip_adapter_scale(0.7)
    random = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 16, 8), (2, 9, 128), (2, 64), (2, 6), (2, 2, 5, 24)]
    sample, text, pooled, sizes, images = (torch.randn(shape, generator=random) for shape in shapes)
    time, scales = torch.tensor([500.0]), torch.full((2, len(ours.config.ip_adapter["layers"])), 0.7)
    with torch.no_grad():
        actual = wrap("unet", ours, True, False)(sample, time, text, pooled, sizes, images, scales)
        conditioning = {"text_embeds": pooled, "time_ids": sizes, "image_embeds": [images]}
        expected = theirs(sample, time, text, added_cond_kwargs=conditioning)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sd15-seen", "sd15-seen-plus"])
def test_draws_as_diffusers(folder: Any, reference: Any, name: str) -> None:
    ours, theirs = StableDiffusionPipeline.from_pretrained(folder(name)), reference(name)
    images = []
    for scale, shown in (
        (1.0, PICTURE),
        (0.6, [[PICTURE, OTHER]]),
        ({"down": 0.5, "up": {"block_1": [0.2, 0.9]}}, OTHER),
    ):
        ours.set_ip_adapter_scale(scale)
        theirs.set_ip_adapter_scale(scale)
        images.append(draw(ours, ip_adapter_image=shown))
        assert error(images[-1], draw(theirs, ip_adapter_image=shown)) < TOLERANCE
        assert len(images) == 1 or error(*images[-2:]) > EFFECT
    embeds = ours.prepare_ip_adapter_image_embeds(OTHER)
    np.testing.assert_array_equal(draw(ours, ip_adapter_image_embeds=embeds), images[-1])
    torch.testing.assert_close(embeds, theirs.prepare_ip_adapter_image_embeds([OTHER], None, "cpu", 1, True))
    hidden = embeds[0].ndim == 4
    torch.testing.assert_close(ours.encode_image(OTHER, "cpu", 2, hidden), theirs.encode_image(OTHER, "cpu", 2, hidden))
    with pytest.raises(InputError, match="This IP-Adapter reads"):
        ours.encode_image(OTHER, "cpu", 1, not hidden)
    alone = {"guidance_scale": 1.0, "ip_adapter_image": PICTURE}
    assert error(draw(ours, **alone), draw(theirs, **alone)) < TOLERANCE
    assert len(draw(ours, **alone, num_images_per_prompt=2)) == 2


def test_scale_0_equals_no_adapter(folder: Any) -> None:
    ours = StableDiffusionPipeline.from_pretrained(folder("sd15-seen"))
    with pytest.raises(InputError, match="has an IP-Adapter: give it an image"):
        draw(ours)
    ours.set_ip_adapter_scale(0)
    image = draw(ours)
    np.testing.assert_array_equal(draw(ours, ip_adapter_image=PICTURE), image)
    assert error(image, draw(torch_pipeline("sd15-seen", random_weights=True))) < TOLERANCE


def test_generate(folder: Any, tmp_path: Path, sd_ort: Any) -> None:
    PICTURE.save(tmp_path / "shown.png")
    options = ("--model", folder("sd15-seen"), "--steps", 1, "--seed", 3, "--height", 64, "--width", 64)
    shown = ("--ip-adapter-image", tmp_path / "shown.png", "--ip-adapter-scale", 0.6)
    assert sd_ort("generate", "a", *options, *shown, "--out", tmp_path / "a.png")[0] == 0
    assert Image.open(tmp_path / "a.png").text["ip_adapter_scale"] == "0.6"  # type: ignore[attr-defined]
    code, _, message = sd_ort("generate", "a", *options, "--out", tmp_path / "b.png")
    assert code == 2
    assert "has an IP-Adapter: give it an image" in message
    assert not (tmp_path / "b.png").exists()


# --- Fused ----------------------------------------------------------------------------------------------------------


def test_fused_and_hoisted(folder: Any, tmp_path: Path) -> None:
    """Both attentions of a layer become one node each, and a step has a sum more: all else runs once a prompt."""
    source = folder("sd15-seen-plus")
    optimize(source, tmp_path / "out", target="portable", components=["image_encoder", "unet"], hoist=True)
    graphs = {
        path.parent.name: onnx.load(path, load_external_data=False).graph for path in tmp_path.glob("out/*/*.onnx")
    }
    ops = {name: Counter(node.op_type for node in graph.node) for name, graph in graphs.items()}
    step, prompt = ops["unet"], ops["unet_prompt"]
    layers = 4
    assert (step["MultiHeadAttention"], prompt["MultiHeadAttention"]) == (3 * layers, ip_adapters.DEPTH)
    assert not step["ScaledDotProductAttention"] + step["Softmax"] + step["Mul"] + prompt["ScaledDotProductAttention"]
    assert {"image_embeds", "ip_adapter_scale"} <= {value.name for value in graphs["unet_prompt"].input}
    assert prompt["MatMul"] >= 4 * layers, "keys and values of text and of pictures"
    for part in ("text_encoder", "vae_decoder"):
        shutil.copytree(source / part, tmp_path / "out" / part)
    plain, fused = (StableDiffusionPipeline.from_pretrained(path) for path in (source, tmp_path / "out"))
    fused.device_loop = True
    for scale in (0.8, 0.3):
        plain.set_ip_adapter_scale(scale)
        fused.set_ip_adapter_scale(scale)
        shown = {"ip_adapter_image": PICTURE, "progress": False}
        assert error(draw(fused, **shown), draw(plain, **shown)) < TOLERANCE
    assert fused.loop.buffer_cache
    for unmerged in (source, tmp_path / "out"):  # a merged model is told a prompt and nothing else
        with pytest.raises(InputError, match="has a UNet that takes image_embeds") as refusal:
            merge(unmerged, tmp_path / "merged")
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("target", ["gpu"])
def test_every_attention_of_a_target(folder: Any, tmp_path: Path, target: str) -> None:
    entry = optimize(folder("sd15-seen"), tmp_path / "out", target=target, components=["unet"], hoist=False)
    counts = entry["components"]["unet"]["op_counts"]
    assert counts["MultiHeadAttention"] + counts.get("Attention", 0) == 12
    assert not counts.get("Softmax", 0)


# --- What does not fit ----------------------------------------------------------------------------------------------


def changed(**changes: Any) -> Callable[[Path], Path]:
    return lambda root: ip_adapters.make_adapter(root, "sd15-seen", **changes)


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / name).write_bytes(content)
        return root / name

    return make


MISFITS = {
    "a pickle": (written("a.bin", b"\x80"), "is a pickle, .* get the .safetensors file"),
    "nothing": (lambda root: root / "none.safetensors", "is no file"),
    "no safetensors": (written("a.safetensors", b"nothing"), "cannot be read as a safetensors file"),
    "SDXL's": (lambda root: ip_adapters.make_adapter(root, "sdxl-seen"), "tokens of 128 numbers, and this"),
    "something else": (lambda root: ip_adapters.make_lora(root), "no IP-Adapter: it holds no image_proj"),
    "FaceID": (changed(ip_adapter__0__to_q_lora__down__weight=torch.zeros(2, 2)), "FaceID"),
    "Full Face": (changed(image_proj__proj__3__weight=torch.zeros(2)), "Full Face"),
    "one layer less": (changed(ip_adapter__7__to_k_ip__weight=None), "lacks 1 weights .* ip_adapter.7.to_k_ip"),
    "one layer more": (changed(ip_adapter__9__to_k_ip__weight=torch.zeros(2)), "has 1 weights .* ip_adapter.9"),
    "a wide layer": (changed(ip_adapter__1__to_k_ip__weight=torch.zeros(8, 64)), r"\[8, 64\], not \[32, 64\]"),
    "no norm": (changed(image_proj__norm__weight=None), "no whole IP-Adapter: its image_proj.norm.weight"),
    "flat": (changed(image_proj__proj__weight=torch.zeros(8)), "image_proj.proj.weight is missing or has no axis 1"),
    "another encoder's": (changed(image_proj__proj__weight=torch.zeros(256, 7)), "reads 7 numbers .* gives 20"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_files_that_do_not_fit(files: Path, tmp_path: Path, kind: str) -> None:
    make, message = MISFITS[kind]
    with pytest.raises(InputError, match=message) as refusal:
        adapted("sd15-seen", make(tmp_path), files / "image_encoder")
    assert "\n" not in str(refusal.value)


def test_encoders_that_do_not_fit(files: Path, tmp_path: Path) -> None:
    adapter = ip_adapters.make_adapter(tmp_path, "sd15-seen")
    with pytest.raises(InputError, match=r"no image encoder in .*image_encoder .give it as --image-encoder"):
        adapted("sd15-seen", adapter)
    encoder = tmp_path / "image_encoder"
    encoder.mkdir()
    config = (files / "image_encoder" / "config.json").read_text()
    (encoder / "config.json").write_text(config)
    with pytest.raises(InputError, match=r"no .safetensors file"):
        adapted("sd15-seen", adapter)
    (encoder / "config.json").write_text(config.replace("WithProjection", ""))
    with pytest.raises(InputError, match="holds no CLIPVisionModelWithProjection"):
        adapted("sd15-seen", adapter)
    with pytest.raises(InputError, match="--ip-adapter"):
        open_checkpoint(None, CheckpointOptions(preset="sd15-seen", random_weights=True, image_encoder=encoder))


def test_numbers_that_are_none(files: Path, tmp_path: Path) -> None:
    """Found when the U-Net is loaded; nothing is written then."""
    nan = torch.full((32, 64), np.nan)
    broken = ip_adapters.make_adapter(tmp_path, "sd15-seen", ip_adapter__1__to_k_ip__weight=nan)
    options: dict[str, Any] = {"ip_adapter": broken, "image_encoder": files / "image_encoder"}
    with pytest.raises(InputError, match=r"ip_adapter.1.to_k_ip.weight holds NaN"):
        export(None, tmp_path / "out", preset="sd15-seen", random_weights=True, components=["unet"], **options)
    assert [path.name for path in tmp_path.iterdir()] == [broken.name]


def test_a_template_of_its_own(files: Path) -> None:
    """A U-Net with an adapter has another graph than its checkpoint's, which the package carries."""
    with_adapter = adapted("sd15-seen", files / "sd15-seen.safetensors")
    without = open_preset("sd15-seen", 0)
    keys = {templates.component_key(source, "unet", 20, "dynamo") for source in (with_adapter, without)}
    assert len(keys) == 2
    assert with_adapter.hash != without.hash


@pytest.mark.parametrize(
    "damage", [{"width": 1 << 20}, {"layers": []}, {"layers": ["mid_block"]}, {"hidden_state_length": -1}, {"rows": -1}]
)
def test_damaged_configs(tmp_path: Path, damage: dict[str, Any]) -> None:
    record = {"width": 8, "layers": ["mid_block.attentions.0.transformer_blocks.0"], **damage}
    (tmp_path / "config.json").write_text(json.dumps({"ip_adapter": record}))
    with pytest.raises(InputError, match="damaged at 'ip_adapter"):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ip_adapter_image": [PICTURE, OTHER]}, "2 images .* for one IP-Adapter"),
        ({"ip_adapter_image": "a.png"}, "no image for the IP-Adapter was given"),
        ({"ip_adapter_image": torch.zeros(1, 3, 8, 8)}, r"\[images, 3, 32, 32\]"),
        ({"ip_adapter_image_embeds": [torch.zeros(2, 1, 3)]}, r"\[rows, images, 20\] are read, 2 rows a prompt"),
        ({"ip_adapter_image_embeds": [torch.zeros(6, 1, 20)]}, "3 rows of embeddings for 1 prompts"),
        ({"ip_adapter_image": PICTURE, "ip_adapter_image_embeds": [torch.zeros(2, 1, 20)]}, "say the same"),
        (
            {"ip_adapter_image": PICTURE, "cross_attention_kwargs": {"ip_adapter_masks": []}},
            "cross_attention_kwargs must be",
        ),
    ],
)
def test_arguments_that_do_not_fit(folder: Any, arguments: dict[str, Any], message: str) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(folder("sd15-seen"), low_memory=True)
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


def test_a_folder_without(small_export: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(small_export, low_memory=True)
    for call in (lambda: draw(pipeline, ip_adapter_image=PICTURE), lambda: pipeline.set_ip_adapter_scale(1)):
        with pytest.raises(InputError, match="has no IP-Adapter: export its model with --ip-adapter FILE"):
            call()
    with pytest.raises(AttributeError, match="sd-ort export MODEL OUT --ip-adapter FILE"):
        pipeline.load_ip_adapter("file")


def test_scales_by_layer() -> None:
    blocks = ("down_blocks.1.attentions.0", "down_blocks.1.attentions.1", "up_blocks.0.attentions.0",
              "mid_block.attentions.0")  # fmt: skip
    layers = [f"{block}.transformer_blocks.{i}" for block in blocks for i in (0, 1)]
    assert layer_scales([0.5], layers).tolist() == [0.5] * 8
    assert layer_scales({"down": {"block_1": [0.25, 1]}, "mid": 2}, layers).tolist() == [0.25, 0.25, 1, 1, 0, 0, 2, 2]
    for scale, message in (
        ({"down": {"block_0": 1}}, "no layer of down block_0 .* are down block_1, mid, up block_0"),
        ({"middle": 1}, "no layer of middle"),
        ({"down": [1, 2, 3]}, "3 scales for down block_1, which attends 2 times"),
        ([1, 2], "2 scales .* for one IP-Adapter"),
        ("much", "is a number such as 0.6"),
        (float("nan"), "is a number"),
    ):
        with pytest.raises(InputError, match=message):
            layer_scales(scale, layers)
