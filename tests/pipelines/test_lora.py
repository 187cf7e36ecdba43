"""LoRAs on a loaded pipeline: file formats, layouts of weights, refusals. test_lora_parity.py compares images."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from fusion_passes import weight_recipes as recipes
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.presets import open_preset
from sd_ort.cli.model_options import parse_lora
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.graphs.load import load
from sd_ort.pipelines.lora_methods import NO_LORAS, LoraMixin
from sd_ort.runtime import build, updatable_weights
from sd_ort.runtime.components import Components
from sd_ort.runtime.library import LIBRARY, library_path
from sd_ort.runtime.updatable_weights import supports_in_place_update
from sd_ort.stages import optimize
from sd_ort.weights import updates
from sd_ort.weights.initializers import Consumer, Initializer
from sd_ort.weights.lora import LoraManager
from sd_ort.weights.lora_files import read_adapter
from sd_ort.weights.updates import is_shareable

Tensors = dict[str, torch.Tensor]
SETTINGS: dict[str, Any] = {
    "prompt": "a red circle",
    "num_inference_steps": 2,
    "guidance_scale": 4.0,
    "output_type": "np",
    "height": 64,
    "width": 64,
}
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
MODULES = {
    "unet": [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn1.to_v", f"{BLOCK}.attn1.to_out.0", f"{BLOCK}.attn2.to_k",
             f"{BLOCK}.ff.net.0.proj", "down_blocks.0.resnets.0.conv1", "up_blocks.3.attentions.0.proj_in",
             "down_blocks.0.resnets.0.time_emb_proj", "up_blocks.0.upsamplers.0.conv"],
    "text_encoder": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.2.mlp.fc1"],
}  # fmt: skip
ALPHA, RANK = 2.0, 4


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensors]:
    source = open_preset("sd15-small", 0)
    return {name: source.load(name).state_dict() for name in MODULES}


@pytest.fixture(scope="module")
def make(weights: dict[str, Tensors]) -> Callable[[int], dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]]:
    """Seed -> (component, module) -> (down, up) of MODULES."""

    def pairs(seed: int) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for component, modules in MODULES.items():
            for module in modules:
                out, *rest = weights[component][f"{module}.weight"].shape
                down = torch.randn(RANK, *rest, generator=generator) * 0.3
                up = torch.randn(out, RANK, *([1] * (len(rest) - 1)), generator=generator) * 0.3
                factors[component, module] = down, up
        return factors

    return pairs


def peft(pairs: dict) -> Tensors:
    names = {"unet": "unet.", "text_encoder": "text_encoder.text_model."}
    out = {}
    for (component, module), (down, up) in pairs.items():
        out[f"{names[component]}{module}.lora_A.weight"] = down * (ALPHA / RANK)
        out[f"{names[component]}{module}.lora_B.weight"] = up
    return out


def old_diffusers(pairs: dict) -> Tensors:
    out = {}
    for (component, module), (down, up) in pairs.items():
        name = f"unet.{module}.lora" if component == "unet" else f"text_encoder.text_model.{module}.lora_linear_layer"
        out |= {f"{name}.down.weight": down * (ALPHA / RANK), f"{name}.up.weight": up}
    return out


def kohya(pairs: dict) -> Tensors:
    names = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}
    out = {}
    for (component, module), (down, up) in pairs.items():
        name = names[component] + module.replace(".", "_")
        out |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(ALPHA)}
    return out


def fused(weights: Tensors, component: str, adapters: dict[int, float], make: Callable) -> Tensors:
    """The weights with the corrections added in torch, as diffusers fuses them."""
    new = dict(weights)
    for seed, strength in adapters.items():
        for (where, module), (down, up) in make(seed).items():
            if where == component:
                name = f"{module}.weight"
                delta = (up.flatten(1) @ down.flatten(1)).reshape(new[name].shape)
                new[name] = new[name] + strength * ALPHA / RANK * delta
    return new


def draw(pipeline: Any) -> np.ndarray:
    return np.asarray(pipeline(**SETTINGS, generator=torch.Generator().manual_seed(3)).images)


def test_a_change_is_written_over_the_last_one(
    small_fused: Path, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions are closed before that, each is opened once again, and the numbers are those of new memory."""
    loras, models = LoraManager(small_fused), Components(small_fused)
    loras.add("a", read_adapter(kohya(make(1)), {}), "a")
    monkeypatch.setattr(models, "_open", lambda name: SimpleNamespace(name=name))
    models.open(MODULES)
    loras.apply(models, loras.deltas({"a": 1.0}))
    models.open(MODULES)
    before = {name: dict(numbers) for name, numbers in models.overrides.weights.items()}
    opened: list[str] = []
    monkeypatch.setattr(models, "_open", opened.append)
    changes = loras.deltas({"a": -0.5})
    assert loras.apply(models, changes)
    models.overrides.finish()
    assert not models.opened
    models.open(["unet"])
    assert sorted(opened) == sorted(MODULES)
    for component, change in changes.items():
        for name, numbers in loras.updated_weights(component, component, change).items():
            np.testing.assert_array_equal(models.overrides.weights[component][name], numbers)
    shared = [
        np.shares_memory(models.overrides.weights[n][key], a) for n, some in before.items() for key, a in some.items()
    ]
    assert sum(shared) >= 6  # the rest is no plain product: packed, a table, a vector
    assert loras.apply(models, {})
    assert not models.overrides.weights


def test_filters_are_summed_while_sessions_open(
    small_fused: Path, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of WinogradConv, which runs alone read; the image is that of sums that are there before."""
    library_path(LIBRARY) or build.build(cpu=True, provider=True)
    counts: list[int] = []

    def late(sums: list[Callable[[], np.ndarray]]) -> Future[Any] | None:
        counts.append(len(sums))
        return start([partial(time.sleep, 0.5), *sums])

    def early(sums: list[Callable[[], np.ndarray]]) -> None:
        updates.compute_sums(sums)

    def image_of(start_them: Callable[..., Any]) -> np.ndarray:
        monkeypatch.setattr(updates, "start_sums", start_them)
        pipeline = StableDiffusionPipeline.from_pretrained(small_fused)
        pipeline.load_lora_weights(kohya(make(1)), "one")
        pipeline.set_adapters("one", 0.7)
        return draw(pipeline)

    start = updates.start_sums
    np.testing.assert_array_equal(image_of(late), image_of(early))
    assert min(counts) > 0


def test_weights_that_a_session_copies_are_there_before(
    small_fused: Path, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited graph has other consumers, for which nothing is shared."""
    loras, models = LoraManager(small_fused), Components(small_fused)
    loras.add("a", read_adapter(kohya(make(1)), {}), "a")
    monkeypatch.setattr(updates, "op_library", lambda library, provider: Path())
    go_on, finished = threading.Event(), []
    start = updates.start_sums
    monkeypatch.setattr(updates, "start_sums", lambda sums: start([go_on.wait, *sums]))

    def opened(*arguments: Any, **options: Any) -> None:
        finished.append(models.overrides.unfinished is None)
        go_on.set()

    monkeypatch.setattr("sd_ort.runtime.component_opener.create_session", opened)
    for shared in (True, False):
        loras.apply(models, loras.deltas({"a": 1.0}))
        override = models.overrides.of("unet")
        models.opener.session("unet", override if shared else replace(override, shared=()))
        assert models.overrides.unfinished is None
    assert finished == [False, True]


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_packed_and_hoisted_weights(
    small_export: Path, weights: dict, make: Callable, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updated initializers equal those of the optimized merged checkpoint up to rounding;
    the same where they are computed on the device, two LoRAs at once; without changes those on disk. The provider is
    told of each that is written, once it is."""
    written: list[tuple[int, bytes]] = []
    record_update = lambda provider: lambda value: written.append((value.data_ptr(), value.numpy().tobytes()))  # noqa: E731
    monkeypatch.setattr("sd_ort.runtime.components.update_callback", record_update)
    out = tmp_path / "out"
    optimize(small_export, out, target=target, dtype="float16", components=["unet"], hoist=True, calibrate=False)
    loras = LoraManager(out)
    for seed in (1, 2):
        loras.add(str(seed), read_adapter(kohya(make(seed)), {}), "a")
    changes = loras.deltas({"1": 0.8, "2": -0.3})
    weights_of = partial(loras.updated_weights, "unet", deltas=changes["unet"])
    changed = {part: updated for part in loras.parts["unet"] if (updated := weights_of(part))}
    new = {n: t.numpy() for n, t in fused(weights["unet"], "unet", {1: 0.8, 2: -0.3}, make).items()}
    assert len(changed) == 3
    models = Components(out)
    models.in_place = True
    assert loras.apply(models, changes)
    updated_tensors = set()
    for part, numbers in changed.items():
        assert models.overrides.updatable[part].changed == numbers.keys()
        for name, array in numbers.items():
            recipe = loras.recipes["unet"][name]
            updated_tensors |= set(recipes.sources(recipe))
            expected = recipes.evaluate(recipe, new.__getitem__)
            assert array.dtype == expected.dtype
            for actual in (array, models.overrides.updatable[part].values[name].numpy()):
                np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), rtol=2e-3, atol=1e-3)
    assert {f"{module}.weight" for module in MODULES["unet"]} <= updated_tensors
    ort_values = [
        models.overrides.updatable[part].values[name] for part, numbers in changed.items() for name in numbers
    ]
    assert sorted(written) == sorted((value.data_ptr(), value.numpy().tobytes()) for value in ort_values)
    check_other_scales(loras, models)
    written.clear()
    open_files = [os.path.realpath(file) for file in Path("/proc/self/fd").glob("*")]
    assert sum(str(out) in file for file in open_files) <= len(changed)  # a data file is opened once
    assert not loras.apply(models, {})
    assert not any(models.overrides.updatable[part].originals for part in changed)
    assert sorted(written) == sorted((value.data_ptr(), value.numpy().tobytes()) for value in ort_values)
    for part, numbers in changed.items():
        values = load(out / part / "model.onnx").graph.initializers
        for name in numbers:
            np.testing.assert_array_equal(
                models.overrides.updatable[part].values[name].numpy(), values[name].const_value.numpy()
            )


def check_other_scales(loras: LoraManager, models: Components) -> None:
    """Other scales of the same LoRAs upload nothing but scales, and add to the weights on disk."""
    updates = dict(loras._device_updates)
    assert len(updates) > 5
    deltas = loras.deltas({"1": -0.4, "2": 0.6})
    assert not loras.apply(models, deltas)
    assert {key: id(update) for key, update in loras._device_updates.items()} == {k: id(u) for k, u in updates.items()}
    for part, name in updates:
        assert name in models.overrides.updatable[part].originals
        array = loras.updated_weights("unet", part, deltas["unet"], [name])[name]
        actual = models.overrides.updatable[part].values[name].numpy()
        np.testing.assert_allclose(actual.astype(np.float32), array.astype(np.float32), rtol=2e-3, atol=1e-3)


def test_formats_are_the_same(make: Callable, tmp_path: Path) -> None:
    adapters = [read_adapter(form(make(1)), {}) for form in (peft, old_diffusers, kohya)]
    save_file(peft(make(1)), tmp_path / "lora.safetensors")
    adapters.append(read_adapter(tmp_path / "lora.safetensors", {}))
    for adapter in adapters:
        assert adapter.unmatched == []
        for component, modules in adapters[0].modules.items():
            assert adapter.modules[component].keys() == modules.keys()
            for name, module in modules.items():
                np.testing.assert_allclose(
                    adapter.modules[component][name].delta().dense(), module.delta().dense(), rtol=1e-5, atol=1e-6
                )


def test_alpha_in_the_metadata(make: Callable, tmp_path: Path) -> None:
    save_file(peft(make(1)), tmp_path / "a.safetensors", {"lora_adapter_metadata": '{"unet.lora_alpha": 8}'})
    adapter = read_adapter(tmp_path / "a.safetensors", {})
    plain = read_adapter(peft(make(1)), {})
    name = f"{BLOCK}.attn1.to_q".replace(".", "_")
    np.testing.assert_allclose(
        adapter.modules["unet"][name].delta().dense(), plain.modules["unet"][name].delta(8 / RANK).dense(), rtol=1e-5
    )


def test_what_cannot_be_applied(
    small_fused: Path, make: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loras = LoraManager(small_fused)
    good = kohya(make(1))
    extra = {
        "lora_unet_nowhere.lora_down.weight": torch.zeros(4, 8),
        "lora_unet_nowhere.lora_up.weight": torch.zeros(8, 4),
        "lora_unet_conv_in.dora_scale": torch.zeros(3),
    }
    with caplog.at_level(logging.WARNING, "sd_ort"):
        loras.add("a", read_adapter(good | extra, {}), "file")
    assert "2 parts are not applied" in caplog.text
    assert "nowhere" in caplog.text
    with pytest.raises(InputError, match="loaded already"):
        loras.add("a", read_adapter(good, {}), "file")
    wrong = {n: torch.zeros(4, 99) if n.endswith("attn1_to_q.lora_down.weight") else t for n, t in good.items()}
    with pytest.raises(InputError, match="another family"):
        loras.add("b", read_adapter(wrong, {}), "file")
    assert list(loras.adapters) == ["a"]
    with pytest.raises(InputError, match="another family"):
        loras.add("c", read_adapter({k: extra[k] for k in extra if "nowhere" in k}, {}), "file")
    with pytest.raises(InputError, match="holds NaN"):
        read_adapter({n: t * torch.nan for n, t in good.items()}, {})
    with pytest.raises(InputError, match="is no LoRA"):
        read_adapter({"conv_in.weight": torch.zeros(3)}, {})
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="cannot be read"):
        read_adapter(tmp_path / "x.safetensors", {})
    with pytest.raises(InputError, match="pickles"):
        read_adapter(tmp_path / "x.bin", {})


def test_folder_without_recipes(tmp_path: Path) -> None:
    (tmp_path / pipeline_folder.MANIFEST).write_text(
        f'{{"format": {pipeline_folder.FORMAT}, "components": {{"unet": {{}}}}}}'
    )
    with pytest.raises(InputError, match="export it again"):
        LoraManager(tmp_path)


def test_strength_on_the_command_line() -> None:
    assert parse_lora("a/b.safetensors") == ("a/b.safetensors", 1.0)
    assert parse_lora("a/b.safetensors:0.8") == ("a/b.safetensors", 0.8)
    with pytest.raises(InputError, match="is not a number"):
        parse_lora("b.safetensors:much")
    with pytest.raises(InputError, match="nan"):
        parse_lora("b.safetensors:nan")


def test_weights_change_when_scales_do() -> None:
    """Not at every call; cross_attention_kwargs={"scale": s} weighs all LoRAs, and disabled ones have no part."""
    applied: list[dict[str, Any]] = []
    adapter = SimpleNamespace(modules={"unet": {"conv_in": 1}})

    class Recorded(LoraMixin):
        loras: Any = SimpleNamespace(
            deltas=dict, adapters={"a": adapter, "b": adapter}, apply=lambda _, changes: applied.append(changes)
        )
        models: Any = None
        lora_state = replace(NO_LORAS, scales={"a": 1.0, "b": 1.0})

    pipeline = Recorded()
    pipeline.set_adapters(["a", "b"], [0.5, -0.25])
    for scale in (1.0, 0.5, 0.5, 1.0):
        pipeline.scale_loras(scale)
    pipeline.disable_lora()
    pipeline.set_adapters("b", 2.0)
    pipeline.enable_lora()
    pipeline.delete_adapters(["b"])
    assert [{name: scale["unet"] for name, scale in scales.items()} for scales in applied] == [
        {"a": 0.5, "b": -0.25}, {"a": 0.25, "b": -0.125}, {"a": 0.5, "b": -0.25}, {}, {"b": 2.0}, {"a": 0.5},
    ]  # fmt: skip
    assert pipeline.get_list_adapters() == {"unet": ["a"]}
    with pytest.raises(InputError, match="no LoRA named 'b' is loaded"):
        pipeline.delete_adapters("b")


def test_who_reads_in_place() -> None:
    """A provider is tried on one product: the CPU's own follows what is written, when it may not pack."""
    assert supports_in_place_update("cpu", "cpu", {})


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (lambda current, first: current, True),
        (lambda current, first: first, False),  # a copy from the opening
        (lambda current, first: current.transpose(0, 3, 1, 2).reshape(current.shape), False),  # another layout
    ],
    ids=["in place", "a copy", "another layout"],
)
def test_filters_are_shared_if_the_provider_follows_them(
    monkeypatch: pytest.MonkeyPatch, reads: Callable[[np.ndarray, np.ndarray], np.ndarray], expected: bool
) -> None:
    def open_graph(graph: bytes, provider: str, options: Any, updatable: dict[str, Any]) -> Any:
        first = updatable["weight"].numpy().copy()

        def run(_: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [reads(updatable["weight"].numpy(), first).reshape(8, 72) @ feed["x"].ravel()]

        return SimpleNamespace(run=run)

    monkeypatch.setattr(updatable_weights, "open_graph", open_graph)
    assert supports_in_place_update("cuda", "cpu", {}, "NhwcConv") is expected


def test_filters_in_another_layout_stay_with_onnx_runtime() -> None:
    filters, matrix = (
        onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w") for shape in ((2, 2, 3, 3), (2, 2))
    )
    for tensor, domain, op_type, expected in (
        (filters, "com.microsoft", "NhwcConv", [True, False]),
        (filters, "", "Conv", [True, True]),
        (matrix, "", "MatMul", [True, True]),
        (matrix, "", "Cast", [False, False]),
    ):
        weight = Initializer(tensor, [Consumer(domain, op_type)])
        assert [is_shareable(weight, transposed) for transposed in ((), ("NhwcConv",))] == expected
