"""Templates: a second checkpoint of an architecture is filled in, bit for bit what export + optimize would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_presets import mini

from scripts.fixtures import make_templates
from scripts.fixtures.make_templates import every, groups, key_of, path_of, weightless, write_group
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.transformer_layouts import original_modules
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.export import templates
from sd_ort.export.exporter import export
from sd_ort.graphs import hoist
from sd_ort.stages import optimize

OPTIONS = {"target": "cuda", "dtype": "float16", "hoist": True, "exporter": "torchscript"}
COMPONENTS = ["text_encoder", "unet", "vae_decoder"]
STEP = [*hoist.PARTS.values(), "text_encoder", "vae_decoder"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Seed -> a diffusers folder with random weights, of one architecture."""
    PRESETS["sd15-filled"] = mini(PRESETS["sd15-tiny"])

    def make(seed: int) -> Path:
        root = tmp_path_factory.mktemp("checkpoint")
        source = open_preset("sd15-filled", seed)
        source.write_configs(root)
        for name in source.configs:
            source.load(name).half().save_pretrained(root / name)
        return root

    yield make
    del PRESETS["sd15-filled"]


@pytest.fixture(scope="module")
def template_cache(checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with the template of the first checkpoint."""
    root = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SD_ORT_TEMPLATES", str(root / "cache"))
        lines: list[str] = []
        optimize(str(checkpoint(1)), root / "first", components=COMPONENTS, **OPTIONS, on_progress=lines.append)
        assert sum("was kept" in line for line in lines) == len(COMPONENTS)
        files = {path.name for path in templates.user_folder().iterdir()}
        assert len(files) == len(COMPONENTS)
        assert {*pipeline_folder.read_manifest(root / "first")["options"]["templates"].values()} == files
        assert not list(root.glob(".first*"))
        yield root


def test_fills_what_export_and_optimize_write(
    template_cache: Path, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    lines: list[str] = []
    second = checkpoint(2)
    manifest = optimize(str(second), tmp_path / "filled", components=COMPONENTS, **OPTIONS, on_progress=lines.append)
    assert "nothing was traced" in lines[-1]
    export(str(second), tmp_path / "raw", exporter="torchscript", components=COMPONENTS, on_progress=lines.append)
    assert any("needs no export" in line for line in lines)
    options = {name: value for name, value in OPTIONS.items() if name != "exporter"}
    optimize(tmp_path / "raw", tmp_path / "slow", **options)
    for part in STEP:
        for name in (pipeline_folder.MODEL, pipeline_folder.DATA):
            assert (tmp_path / "filled" / part / name).read_bytes() == (tmp_path / "slow" / part / name).read_bytes()
    assert pipeline_folder.is_intact(tmp_path / "filled", manifest)
    for name in ("tokenizer", "scheduler"):
        assert pipeline_folder.tree_hash(tmp_path / "filled" / name) == pipeline_folder.tree_hash(second / name)


def test_files_that_do_not_fit(template_cache: Path, checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    third = checkpoint(3)
    path = third / "unet" / "diffusion_pytorch_model.safetensors"
    weights, name = load_file(path), "conv_in.bias"

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(InputError) as error:
            optimize(str(third), tmp_path / "out", components=COMPONENTS, **OPTIONS)
        assert not list(tmp_path.iterdir())
        return str(error.value)

    broken = refused(weights | {name: weights[name] * torch.nan})
    assert "NaN" in broken
    assert "--no-calibrate" not in broken
    assert "do not fit" in refused(weights | {name: weights[name][1:].clone()})
    assert "lacks 1 weights" in refused({key: tensor for key, tensor in weights.items() if key != name})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match="truncated"):
        optimize(str(third), tmp_path / "out", components=COMPONENTS, **OPTIONS)


def test_key_tells_graphs_apart() -> None:
    def key(config: dict, variant: bool = False, opset: int = 20) -> str:
        return templates.template_key("unet", "UNet2DConditionModel", config, variant, opset, "dynamo")

    name = key({"in_channels": 4})
    assert name == key({}), "a default that is said"
    assert name == key({"_name_or_path": "b", "sample_size": 96, "unknown": 1})
    others = {key({"in_channels": 9}), key({"time_cond_proj_dim": 256}), key({}, variant=True), key({}, opset=23)}
    assert len(others | {name}) == 5
    encoder = {"hidden_size": 64, "architectures": ["CLIPTextModel"]}
    names = {
        templates.template_key(n, "CLIPTextModel", encoder, False, 20, "dynamo")
        for n in ("text_encoder", "text_encoder_2")
    }
    assert len(names) == 1


def test_large_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose large weights were never read has the nodes and recipes of one that was exported with them."""
    preset = mini(PRESETS["flux-dev-tiny"])

    def exported(limit: int) -> tuple[list[object], dict[str, object]]:
        monkeypatch.setattr(make_templates, "UNTOUCHED", limit)
        graph, recipes, _ = weightless(preset, "text_encoder_2")
        nodes = [(n.op_type, [v and (recipes.get(str(v.name)) or v.name) for v in n.inputs]) for n in graph.graph]
        return [*nodes], recipes

    assert exported(1 << 40) == exported(2000)


def test_what_the_package_has() -> None:
    """Every published architecture finds its templates, under the names of its checkpoint's tensors."""
    for name, preset, component in every():
        path = templates.find_template(key_of(preset, component))
        assert path is not None, name
        assert path == path_of(name, templates.BUNDLED)
        template = templates.Template(path)
        assert len(template.sources) >= 30  # demo-dit's T5 of three layers
    single = {f"{entries[0][0]}.onnx.xz" for entries in groups().values() if len(entries) == 1}
    archives = {f"{group}{templates.ARCHIVE}" for group, entries in groups().items() if len(entries) > 1}
    assert {path.name for path in templates.BUNDLED.glob("*.xz")} == single | archives
    assert sum(path.stat().st_size for path in templates.BUNDLED.iterdir()) < 2_000_000


@pytest.mark.parametrize(
    ("name", "transformer"),
    [
        ("flux-schnell", "flux-schnell"),
        ("flux-dev", "flux-dev"),
        ("sd35-medium", "sd35-medium"),
        ("sd35-large", "sd35-large"),
        ("sd35-large-turbo", "sd35-large"),
        ("flux2-dev", "flux2-dev"),
    ],
)
def test_transformers_are_whole(name: str, transformer: str) -> None:
    """Each component has a template, and that of the transformer reads each layer of its published checkpoint."""
    preset = PRESETS[name]
    components = [*(model for model in preset.models if model != "vae"), "vae_encoder", "vae_decoder"]
    paths = {component: templates.find_template(key_of(preset, component)) for component in components}
    assert all(paths.values()), paths
    path = paths["transformer"]
    assert path is not None
    assert path.name.startswith(f"{transformer}.transformer.onnx")
    layers = {source.rpartition(".")[0] for source in templates.Template(path).sources}
    modules = {part.module for parts in original_modules(preset.models["transformer"]).values() for part in parts}
    unread = {layer for layer in modules if "guidance_embedder" in layer and name == "flux-schnell"}
    assert layers - {"pos_embed"} == modules - unread


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-2511"])
def test_no_component_of_an_edit_is_exported(name: str) -> None:
    preset = PRESETS[name]
    components = [*(model for model in preset.models if model != "vae"), "vision_encoder", "vae_encoder", "vae_decoder"]
    paths = {component: templates.find_template(key_of(preset, component)) for component in components}
    assert all(paths.values()), paths


def test_templates_of_a_family_are_one_archive(tmp_path: Path) -> None:
    """Reading returns each written template, writing replaces one, and a damaged archive is an error."""
    contents = {"sd15.unet": b"one" * 1000, "sd15-lcm.unet": b"two" * 1000}
    assert write_group(tmp_path, "sd15.unet", {"sd15.unet": contents["sd15.unet"]}) == tmp_path / "sd15.unet.onnx.xz"
    archive = write_group(tmp_path, "sd15.unet", contents)
    assert [*tmp_path.iterdir()] == [archive]
    for name, content in contents.items():
        path = path_of(name, tmp_path)
        assert path == archive / f"{name}.onnx"
        assert templates.read_bytes(path) == content
    assert path_of("sd15-inpaint.unet", tmp_path) is None
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(InputError, match="is damaged"):
        templates.Template(archive / "sd15.unet.onnx")


def test_a_shipped_template_is_a_fresh_export(tmp_path: Path) -> None:
    """The smallest one, traced again; the others come from the same script."""
    preset = next(preset for name, preset, _ in every() if name == "taesd.vae_encoder")
    templates.write_template(tmp_path / "fresh.xz", *weightless(preset, "vae_encoder"))
    paths = (tmp_path / "fresh.xz", templates.BUNDLED / "taesd.vae_encoder.onnx.xz")
    fresh, shipped = (templates.Template(path) for path in paths)
    assert fresh.recipes == shipped.recipes
    assert fresh.config == shipped.config
    assert fresh.proto.graph.SerializeToString() == shipped.proto.graph.SerializeToString()


def test_weightless_is_what_export_traces(
    default_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template made without weights, as the package's are, is to the byte the one that an export keeps."""
    monkeypatch.setenv("SD_ORT_TEMPLATES", str(tmp_path))
    model, recipes, config = weightless(PRESETS["sd15-mini"], "vae_encoder")
    templates.write_template(tmp_path / "made.xz", model, recipes, config)
    entry = pipeline_folder.read_manifest(default_export)["components"]["vae_encoder"]
    assert templates.store_template("kept", default_export / "vae_encoder", entry) is None
    duplicates = entry | {"duplicate_weights": [["a", "b"]]}
    assert "a and b are equal" in str(templates.store_template("x", default_export / "vae_encoder", duplicates))
    other = templates.find_template("kept")
    assert other is not None
    ours, theirs = templates.Template(tmp_path / "made.xz"), templates.Template(other)
    assert ours.recipes == theirs.recipes
    assert ours.proto.graph.SerializeToString() == theirs.proto.graph.SerializeToString()


def test_broken_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD_ORT_TEMPLATES", str(tmp_path))
    assert templates.find_template("x") is None
    (tmp_path / "x.onnx.xz").write_bytes(b"half")
    with pytest.raises(InputError, match="is damaged"):
        templates.Template(tmp_path / "x.onnx.xz")


def test_versions_hash_the_code_that_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(templates.files, "code_hash", lambda *packages: folders.extend(packages) or "0" * 12)
    assert templates.exporter_versions()["sd_ort.export"] == "0" * 12
    assert {folder.name for folder in folders} == {"export", "checkpoints"}
    assert all(folder.is_dir() for folder in folders)
