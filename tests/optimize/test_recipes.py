"""Recipes and templates: every weight of an optimized graph is rebuilt from its checkpoint, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from recompute_weights import checked_recipes, init_tensors, lowered_parts
from small_presets import mini

from fusion_passes import weight_recipes
from fusion_passes.canonicalize import canonicalize
from fusion_passes.fuse import fuse
from scripts.fixtures import graph_fixtures
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.export.exporter import export
from sd_ort.export.initializer_sources import duplicate_tensors, initializer_recipes
from sd_ort.graphs import hoist
from sd_ort.optimize.options import HOIST_TARGETS
from sd_ort.optimize.targets import TARGETS
from sd_ort.stages import optimize
from sd_ort.weights import update_graph

NAMES = ["text_encoder", "unet", "vae_decoder"]


@pytest.fixture(scope="module")
def preset() -> Iterator[str]:
    PRESETS["sd21-recipes"] = mini(PRESETS["sd21-tiny"])
    yield "sd21-recipes"
    del PRESETS["sd21-recipes"]


@pytest.fixture(scope="module")
def exported(preset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recipes") / "raw"
    export(None, out, preset=preset, random_weights=True, components=NAMES, exporter="torchscript")
    return out


def rebuild(path: Path, preset: str) -> dict[str, int]:
    """Component -> how many weights were rebuilt; fails on one that differs or has no recipe."""
    counts = {}
    for name, entry in pipeline_folder.read_manifest(path)["components"].items():
        state = {k: t.numpy() for k, t in open_preset(preset, 0).load(MODEL_OF.get(name, name)).state_dict().items()}
        table = weight_recipes.load(entry["weight_recipes"])
        parts = [hoist.PARTS.get(part, part) for part in entry.get("hoisted", [name])]
        counts[name] = 0
        for value in (
            v for part in parts for v in ir.load(path / part / pipeline_folder.MODEL).graph.initializers.values()
        ):
            weight = value.const_value.numpy()
            if value.name in table:
                rebuilt = weight_recipes.evaluate(table[value.name], state.__getitem__)
                assert rebuilt.dtype == weight.dtype
                np.testing.assert_array_equal(rebuilt, weight, err_msg=value.name)
                counts[name] += 1
            else:  # zeros, ones, scales and sinusoids: the graph's own
                assert (
                    weight.dtype.kind == "i"
                    or (weight == weight.flat[0]).all()
                    or "sin" in value.name
                    or weight.size <= 32
                )
    return counts


def test_export_knows_every_weight(default_export: Path, exported: Path, preset: str) -> None:
    """By both exporters."""
    for path, name in ((default_export, "sd15-mini"), (exported, preset)):
        assert rebuild(path, name)["unet"] == len(open_preset(name, 0).load("unet").state_dict())


@pytest.mark.parametrize(("target", "dtype", "hoisted"), [("cpu", "float32", False), ("cuda", "float16", True)])
def test_every_weight_is_rebuilt(
    exported: Path, preset: str, tmp_path: Path, target: str, dtype: str, hoisted: bool
) -> None:
    calibrate = False if dtype == "float16" else None
    optimize(exported, tmp_path / "out", target=target, dtype=dtype, hoist=hoisted, calibrate=calibrate)
    counts = rebuild(tmp_path / "out", preset)
    assert all(counts.values())
    text = json.dumps(pipeline_folder.read_manifest(tmp_path / "out")["components"]["unet"]["weight_recipes"])
    assert ("interleave" in text) == (target == "cuda")


@pytest.mark.parametrize("component", ["unet", "vae_decoder", "text_encoder"])
def test_for_every_target_and_type(component: str) -> None:
    """As `optimize_component` does it, on a graph that is fused once; other families: `test_families.test_counts`."""
    model = ir.from_proto(graph_fixtures.load(f"sd15-tiny-dynamo-20.{component}"))
    checkpoint = init_tensors(model)
    canonicalize(model)
    fuse(model)
    for target in (target for name, target in TARGETS.items() if name != "gpu"):  # as hip
        few = component == "unet" and target.name != "cpu"  # its graph takes the time of all others together
        for dtype in ["float16"] if few else target.dtypes[1:]:
            hoisted = component == "unet" and target.name == HOIST_TARGETS[0]  # the split takes as long as all else
            parts = lowered_parts(model.clone(), target, dtype, hoisted=hoisted)
            assert checked_recipes(parts, checkpoint) > 50


def test_recipes_as_text() -> None:
    table = {"a": "x.weight", "b": ["cast", "FLOAT16", ["transpose", [1, 0], "x.weight"]]}
    assert weight_recipes.load(json.loads(json.dumps(weight_recipes.dump(table)))) == table
    assert weight_recipes.sources(table["b"]) == ["x.weight"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(
        weight_recipes.evaluate(table["b"], {"x.weight": x}.__getitem__), x.T.astype(np.float16)
    )


@pytest.mark.parametrize(("old", "new"), weight_recipes.ALIASES.items())
def test_load_accepts_earlier_names_of_operations(old: str, new: str) -> None:
    stored = {
        name: f'["cast","FLOAT16",["{name}",null,["transpose",[1,0],"a[\\"{old}\\",.b"],"b"]]' for name in (old, new)
    }
    recipes = weight_recipes.load(stored)
    assert recipes[old] == recipes[new] == ["cast", "FLOAT16", [new, None, ["transpose", [1, 0], f'a["{old}",.b'], "b"]]


def test_delta_of_a_bias_multiplied_by_filters_is_rejected() -> None:
    """The delta is not linear in either tensor alone."""
    recipe = ["conv1x1_bias", None, "w", "b"]
    tensors = {"w": np.arange(6, dtype=np.float16).reshape(2, 1, 1, 3), "b": np.ones(3, np.float32)}
    np.testing.assert_array_equal(weight_recipes.evaluate(recipe, tensors.__getitem__), [3, 12])
    assert weight_recipes.weight_delta(recipe, {"other": np.ones(3)}) is None
    for name, numbers in tensors.items():
        with pytest.raises(ValueError, match="by the product with its filters"):
            weight_recipes.weight_delta(recipe, {name: numbers})


def test_subpixel_phases() -> None:
    """Taps are summed in float32 for any dtype and rounded once; deltas too, on the host and by a device's graph."""
    recipe = ["cast", "FLOAT16", ["subpixel_phases", None, ["transpose", [0, 2, 3, 1], "w"]]]
    random = np.random.default_rng(0)
    up, down = random.normal(size=(5, 2)).astype(np.float32), random.normal(size=(2, 36)).astype(np.float32)
    w = (up @ down).reshape(5, 4, 3, 3)
    phases = weight_recipes.evaluate(recipe, {"w": w.astype(np.float16)}.__getitem__)
    of_half = w.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(phases[:5, 0, 0], of_half[:, :, 0, 0].astype(np.float16))  # even row, even column
    np.testing.assert_array_equal(phases[5:10, 1, 1], of_half[:, :, 1:, 2].sum(2).astype(np.float16))  # odd column
    np.testing.assert_array_equal(phases[10:15, 0, 1], of_half[:, :, :2, 1:].sum((2, 3)).astype(np.float16))  # odd row
    change = weight_recipes.weight_delta(recipe, {"w": w})
    form = update_graph.weight_update_spec(recipe, w.shape, phases.dtype)
    assert form is not None
    session = ort.InferenceSession(update_graph.build_weight_update(form), providers=["CPUExecutionProvider"])
    inputs = {"base": phases, "up_0": up, "down_0": down, "source_shape": np.array(w.shape)}
    for scale in (1.0, -0.5):
        summed = session.run(None, {**inputs, "scale_0": np.full(2, scale, np.float32)})[0]
        np.testing.assert_allclose(summed, phases + scale * change, rtol=1e-3, atol=1e-3)


def test_origins_compare_all_numbers() -> None:
    """Equal first and last numbers do not make an origin; equal tensors are told."""
    x = torch.arange(6.0).reshape(2, 3)
    other = x.clone()
    other[0, 1] = 9
    values = {"w": x.T.contiguous().numpy(), "v": other.numpy() + np.eye(2, 3, 1, dtype=np.float32)}
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20})
    for name, array in values.items():
        graph.register_initializer(
            ir.Value(name=name, const_value=ir.tensor(array), type=ir.TensorType(ir.DataType.FLOAT))
        )
    assert initializer_recipes(graph.initializers.values(), {"x": x}) == {"w": ["transpose", [1, 0], "x"]}
    assert list(duplicate_tensors({"x": x, "y": x.clone(), "z": other})) == [("x", "y")]
