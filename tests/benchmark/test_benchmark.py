"""The benchmark: which engines, rows and ratios, failures as rows, nothing lost on an interrupt. Doctor beside it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import mmap
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import graph_fixtures
import numpy as np
import pytest

from sd_ort.benchmark import ablation, contenders, mlperf, profile, recipes, runner, tables
from sd_ort.benchmark.engines.contract import Engine, Settings
from sd_ort.benchmark.worker import Case, Worker, is_tuned
from sd_ort.check import doctor
from sd_ort.core import metrics
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.folder import DATA, MODEL, write_manifest
from sd_ort.demo import scenes
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime import device, machine

Cli = Callable[..., tuple[int, str, str]]

ORT_COLUMNS = (
    "model_name,directory,engine,version,provider,disable_safety_checker,height,width,steps,batch_size,batch_count,"
    "num_prompts,average_latency,median_latency,first_run_memory_MB,second_run_memory_MB,enable_cuda_graph"
)


# --- Which engines --------------------------------------------------------------------------------------------------


def fake_folder(path: Path, **manifest: Any) -> Path:
    """A pipeline folder as far as `find_engines` looks."""
    (path / "unet").mkdir(parents=True)
    (path / "unet" / MODEL).touch()
    (path / "model_index.json").write_text("{}")
    if manifest:
        write_manifest(path, manifest)
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return fake_folder(tmp_path / "raw", stage="export", source={"model": "demo", "random_weights": False}, options={})


def optimized(raw: Path, name: str, dtype: str, target: str = "portable") -> Path:
    source = {"model": "demo", "random_weights": False, "folder": str(raw)}
    options = {"target": target, "dtype": dtype}
    return fake_folder(raw.parent / name, stage="optimize", source=source, options=options)


def test_raw_comes_first_and_torch_last(raw: Path) -> None:
    half, full = optimized(raw, "half", "float16"), optimized(raw, "full", "float32")
    engines, notes = contenders.find_engines([half, full, raw])
    assert [e.label for e in engines] == ["raw ONNX", "fused fp16", "fused fp32", "torch eager"]
    assert [e.engine for e in engines] == ["onnxruntime"] * 3 + ["torch"]
    assert engines[-1].model == "demo"
    assert notes == []


def test_the_export_joins_an_optimized_folder(raw: Path) -> None:
    engines, _ = contenders.find_engines([optimized(raw, "full", "float32")], "none")
    assert [(e.label, Path(e.directory).name) for e in engines] == [("raw ONNX", "raw"), ("fused fp32", "full")]


def test_optimized_folder_whose_export_is_gone(raw: Path) -> None:
    folder = optimized(raw, "full", "float32")
    shutil.rmtree(raw)
    engines, _ = contenders.find_engines([folder], "none")
    assert [e.label for e in engines] == ["fused fp32"]


def test_equal_labels_are_told_apart(raw: Path) -> None:
    folders = [optimized(raw, "a", "float32"), optimized(raw, "b", "float32", "cpu"), optimized(raw, "c", "float32")]
    engines, _ = contenders.find_engines([raw, *folders], "none")
    assert [e.label for e in engines[1:]] == ["fused fp32 portable a", "fused fp32 cpu", "fused fp32 portable c"]


def test_random_weights_are_made_again_for_torch(tmp_path: Path) -> None:
    source = {"model": "sd15-tiny", "random_weights": True}
    folder = fake_folder(tmp_path / "raw", stage="export", source=source, options={"seed": 3})
    torch = contenders.find_engines([folder])[0][-1]
    assert (torch.engine, torch.model, torch.random_weights, torch.weights_seed) == ("torch", "sd15-tiny", True, 3)


def test_torch_model_that_cannot_be_found_is_a_note(tmp_path: Path) -> None:
    folder = fake_folder(tmp_path / "raw", stage="export", source={"model": "owner/name"}, options={})
    engines, notes = contenders.find_engines([folder])
    assert [e.engine for e in engines] == ["onnxruntime"]
    assert "torch was not measured" in notes[0]
    with pytest.raises(InputError, match="not a diffusers folder"):
        contenders.find_engines([folder], str(tmp_path / "nowhere"))


def test_folder_of_another_tool_is_named_by_its_folder(tmp_path: Path) -> None:
    engines, _ = contenders.find_engines([fake_folder(tmp_path / "optimum-export")])
    assert engines[0].label == "optimum-export"


def test_named_engines(tmp_path: Path) -> None:
    source = {"model": "sd15-tiny", "random_weights": True}
    folder = fake_folder(tmp_path / "raw", stage="export", source=source, options={"seed": 3})
    names = [
        "raw",
        "raw-fp16",
        "ours",
        "ours-graph",
        "ours-hoist-graph",
        "ours-portable",
        "ort",
        "onnxscript",
        "torch-compile",
        "tensorrt",
        "openvino-bf16",
    ]
    engines, _ = contenders.find_engines([folder], None, names, "cuda")
    assert [(e.label, e.engine, e.make, e.graph, e.variant) for e in engines] == [
        ("raw ONNX", "onnxruntime", (), False, ""),
        ("raw ONNX fp16", "onnxruntime", ("raw", "float16"), False, ""),
        ("ours fp16", "onnxruntime", ("ours", "cuda", "float16"), False, ""),
        ("ours fp16 + graph", "onnxruntime", ("ours", "cuda", "float16"), True, ""),
        ("ours fp16 hoisted + graph", "onnxruntime", ("ours", "cuda", "float16", "hoist"), True, ""),
        ("ours fp16 portable", "onnxruntime", ("ours", "portable", "float16"), False, ""),
        ("ORT optimizer fp16", "onnxruntime", ("ort", "cuda", "float16"), False, ""),
        ("onnxscript fp16", "onnxruntime", ("onnxscript", "float16"), False, ""),
        ("torch.compile", "torch", (), False, "compile"),
        ("TensorRT fp16", "tensorrt", (), False, ""),
        ("OpenVINO bf16", "openvino", (), False, "bfloat16"),
    ]
    with pytest.raises(InputError, match="unknown engine 'tpu': choose from raw, "):
        contenders.find_engines([folder], None, ["tpu"])


def test_ablation_adds_one_thing_a_row(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "library_path", lambda: Path("libsd_ort_ops.so"))
    rows, _ = contenders.ablation(raw, "cuda")
    labels = [
        "raw fp32",
        "raw fp16",
        *(step.label for step in ablation.ABLATION.values() if step.label != "nothing fused"),
    ]
    assert [row.label for row in rows] == [*labels, "ours: + op library", "+ hoisting", "+ graph capture"]
    assert [row.library for row in rows] == [False] * len(labels) + [True] * 3
    assert [row.graph for row in rows] == [False] * (len(labels) + 2) + [True]
    steps = list(ablation.ablation_steps(TARGETS["cuda"]).values())
    assert steps[-1].fusions == TARGETS["cuda"].fusions
    assert set(steps[-1].passes) < set(TARGETS["cuda"].passes)
    for before, after in pairwise(steps):
        assert set(before.fusions) <= set(after.fusions)
        assert {each.name for each in before.passes} - {"take_apart"} <= {each.name for each in after.passes}
    assert [any(each.name == "nhwc_layout" for each in step.passes) for step in steps] == [False] * 2 + [True] * 6

    monkeypatch.setattr(contenders, "library_path", lambda: None)
    rows, notes = contenders.ablation(raw, "cpu")
    assert rows[-1].label == "+ hoisting"
    assert [row.make for row in rows[:3]] == [(), ("raw", "float16"), ("ours", "cpu", "float32", "mha")]
    assert not any(row.graph for row in rows)
    assert all(any(f"no row for {what}" in note for note in notes) for what in ("graph capture", "the op library"))


# --- Folders that a benchmark makes ---------------------------------------------------------------------------------


def test_every_step_of_the_ablation_adds_its_operator(tmp_path: Path) -> None:
    name = "sd15-tiny-dynamo-20.unet"
    source = graph_fixtures.make_folder(tmp_path / "raw", name) / "unet" / MODEL
    steps = ablation.ablation_steps(TARGETS["cuda"])
    counts = {
        step: optimize_component(source, tmp_path / step / "unet" / MODEL, steps[step])["counts"]
        for step in ("none", "mha", "norm", "skip")
    }
    fused = ("MultiHeadAttention", "NhwcConv", "GroupNorm", "BiasSplitGelu", "BiasAdd", "SkipGroupNorm")
    found = {step: tuple(count.get(op, 0) for op in fused) for step, count in counts.items()}
    assert found == {
        "none": (0, 0, 0, 0, 0, 0),
        "mha": (32, 0, 0, 0, 0, 0),
        "norm": (32, 98, 61, 0, 0, 0),
        "skip": (32, 98, 61, 16, 16, 0),
    }


def raw_component(raw: Path) -> Path:
    (raw / "unet" / "config.json").write_text("{}")
    (raw / "unet" / DATA).write_bytes(b"0")
    return raw


def test_made_component_appears_whole(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(task: recipes.Task, word: str) -> None:
        assert (task.source, word) == (raw / "unet" / MODEL, "twice")
        task.out.write_text("made")
        part = task.out.parent.with_name("unet_prompt")
        part.mkdir()
        (part / MODEL).write_text("a part")

    monkeypatch.setitem(recipes.RECIPES, "copy", copy)
    out = tmp_path / "home" / "copy-twice"
    out.mkdir(parents=True)
    recipes._make_component(("copy", "twice"), raw_component(raw), out, "unet")
    assert (out / "unet" / MODEL).read_text() == "made"
    assert (out / "unet_prompt" / MODEL).read_text() == "a part"
    assert (out / "unet" / "config.json").read_text() == "{}"
    assert float((out / "unet" / recipes.SECONDS).read_text()) >= 0


def test_component_that_cannot_be_made_leaves_nothing(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(task: recipes.Task) -> None:
        task.out.write_text("half")
        raise ValueError("\nno such pattern\nmore")

    monkeypatch.setitem(recipes.RECIPES, "fail", fail)
    out = tmp_path / "home" / "fail"
    out.mkdir(parents=True)
    with pytest.raises(SdOrtError, match=r"^unet: ValueError: no such pattern$"):
        recipes._make_component(("fail",), raw_component(raw), out, "unet")
    assert list(out.iterdir()) == []


# --- A run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report_folder(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one run of three engines: raw ONNX, the same with a truncated UNet, torch eager."""
    folder = tmp_path_factory.mktemp("benchmark")
    broken = Path(shutil.copytree(tiny_export, folder / "broken"))
    path = broken / "unet" / MODEL
    path.write_bytes(path.read_bytes()[:1000])
    engines, notes = contenders.find_engines([tiny_export, broken])
    settings = Settings(steps=2, batches=(1, 2), height=64, width=64, runs=3, threads=1, tuning=True)
    runner.run(engines, settings, folder / "out", notes=notes)
    return folder / "out"


@pytest.fixture(scope="module")
def report(report_folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((report_folder / "benchmark.json").read_text())
    return loaded


def test_report_says_where_and_how(report: dict[str, Any]) -> None:
    assert report["finished"] is True
    assert report["interrupted"] is False
    assert report["machine"]["cores"] >= 1
    assert {"python", "torch", "onnxruntime"} <= report["versions"].keys()
    assert report["settings"]["steps"] == 2
    assert report["baseline"] == "raw ONNX raw"


def test_every_engine_has_a_row(report: dict[str, Any]) -> None:
    rows = [("raw ONNX raw", "ok"), ("raw ONNX broken", "failed"), ("torch eager", "ok")]
    expected = [(label, status, batch) for batch in (1, 2) for label, status in rows]
    assert [(r["label"], r["status"], r["batch"]) for r in report["engines"]] == expected
    assert "truncated" in report["engines"][1]["reason"]
    assert "image_s" not in report["engines"][1]


def test_numbers_of_an_engine(report: dict[str, Any]) -> None:
    for row in [row for row in report["engines"] if row["status"] == "ok"]:
        assert len(row["image_s"]["values"]) == len(row["step_ms"]["values"]) == 3
        assert row["image_s"]["median"] == median(row["image_s"]["values"])
        # The UNet's two steps are part of the batch's time.
        assert 2 * row["step_ms"]["min"] / 1e3 < row["batch"] * row["image_s"]["max"]
        assert 50 < row["base_memory_MB"] <= row["load_memory_MB"] <= row["peak_memory_MB"] < 10_000
        assert row["first_run_s"] > 0
        assert row["load_s"] > 0
        assert (row["height"], row["width"], row["precision"]) == (64, 64, "fp32")


def test_ratios_are_taken_round_by_round(report: dict[str, Any]) -> None:
    first, _, torch = report["engines"][3:]
    for times, ratios in (("image_s", "image_speedup"), ("step_ms", "step_speedup")):
        expected = [a / b for a, b in zip(first[times]["values"], torch[times]["values"], strict=True)]
        assert torch[ratios]["values"] == pytest.approx(expected)
        assert torch[ratios]["median"] == pytest.approx(median(expected))
        assert torch[ratios]["of_medians"] == pytest.approx(first[times]["median"] / torch[times]["median"])
        assert first[ratios]["values"] == [1, 1, 1]


def test_engines_draw_the_same_image(report: dict[str, Any], report_folder: Path) -> None:
    assert report["engines"][2]["psnr_db"] > 50
    assert (report_folder / "raw-ONNX-raw.png").is_file()
    assert (report_folder / "torch-eager.png").is_file()


def test_tuning_without_tunable_operators_is_said(report: dict[str, Any]) -> None:
    assert any("--tuning changed nothing" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("provider", "built", "note"),
    [
        ("cpu", "libsd_ort_cuda.so", "changed nothing: the cpu provider has no tunable operators."),
        ("cuda", "", "changed nothing: the cuda provider has no tunable operators, and no op library is built for it"),
        ("cuda", "libsd_ort_hip.so", "changed nothing: the cuda provider has no tunable operators, and no op library"),
        ("cuda", "libsd_ort_cuda.so", "was on: the op library's kernels"),
        ("rocm", "", "was on: the rocm provider's kernels"),
        ("rocm", "libsd_ort_hip.so", "was on: the rocm provider's and the op library's kernels"),
    ],
)
def test_note_on_tuning(provider: str, built: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tuned depends on the provider and on the GPU half of the op library; engines without it are not."""
    (tmp_path / built).touch()
    for module in ("runner", "worker"):
        monkeypatch.setattr(f"sd_ort.benchmark.{module}.library_path", lambda: tmp_path / "libsd_ort_ops.so")
    notes = runner._notes(Settings(provider=provider, tuning=True), device.Meter())
    assert any(f"--tuning {note}" in line for line in notes)
    assert not any("--tuning" in line for line in runner._notes(Settings(provider=provider), device.Meter()))
    ours = Engine("ours", "onnxruntime", "folder", "demo")
    assert is_tuned(ours, provider) is ("was on" in note)
    assert is_tuned(replace(ours, library=False), provider) is (provider == "rocm")
    assert not is_tuned(replace(ours, engine="torch"), provider)


def test_csv_has_onnxruntimes_columns(report: dict[str, Any], report_folder: Path) -> None:
    text = (report_folder / "benchmark.csv").read_text()
    assert text.splitlines()[0] == ORT_COLUMNS
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["engine"] for row in rows] == ["onnxruntime", "torch"] * 2
    assert float(rows[2]["median_latency"]) == pytest.approx(2 * report["engines"][3]["image_s"]["median"])
    assert float(rows[0]["first_run_memory_MB"]) > 0
    assert [(row["batch_size"], row["batch_count"], row["steps"]) for row in rows[1:3]] == [
        ("1", "3", "2"),
        ("2", "3", "2"),
    ]


def test_table_shows_every_engine(report: dict[str, Any]) -> None:
    table = tables.to_table(report)
    assert "raw ONNX broken (batch 2) failed:" in table
    assert "torch eager" in table
    assert "1.00x" in table  # the baseline itself


# --- What goes wrong ------------------------------------------------------------------------------------------------


class FakeWorker(Worker):
    """A worker whose process stays idle, and whose third batch is interrupted."""

    started: ClassVar[list[FakeWorker]] = []

    def __init__(self, engine: Engine, meter: device.Meter, failure: str | None = None) -> None:
        super().__init__(engine, meter, failure)
        self.batches = 0
        self.started.append(self)

    def call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> tuple[dict[str, Any], device.Watch]:
        if len(arguments) == 2:
            loaded = {"precision": "fp32", "load_s": 1.0, "base_memory_MB": 1.0, "load_memory_MB": 2.0}
            return loaded, device.Watch()
        self.batches += 1
        if self.batches == 3:
            raise KeyboardInterrupt
        image = np.zeros((1, 8, 8, 3), np.uint8)
        batch = {"seconds": float(self.batches), "steps": [0.1], "memory_MB": 3.0, "images": image}
        return {**batch, "output": None, "size": (8, 8)}, device.Watch()


def test_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    engine = Engine("raw ONNX", "onnxruntime", "folder", "demo")
    with pytest.raises(KeyboardInterrupt):
        runner.run([engine], Settings(warmup=1, runs=5), tmp_path)
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["interrupted"] is True
    assert report["finished"] is False
    assert report["engines"][0]["image_s"]["values"] == [2.0]  # the first batch warmed up, the third was interrupted
    assert not FakeWorker.started[-1].process.is_running()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_engine_killed_by_the_system_is_a_row(tmp_path: Path) -> None:
    worker = Worker(Engine("raw ONNX", "onnxruntime", str(tmp_path), "demo"), device.Meter())
    worker.cases = {1: Case(1), 2: Case(2)}
    worker.process.kill()
    for batch in (1, 2):
        worker.draw(batch, counted=True)
    worker.pool.shutdown()
    for case in worker.cases.values():
        row = worker.row(case, None, Settings())
        assert row["status"] == "failed"
        assert "out of memory" in row["reason"]


class TooLarge(FakeWorker):
    """A worker that has no room for a batch of 4."""

    def call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> tuple[dict[str, Any], device.Watch]:
        if arguments == (4,):
            raise SdOrtError("Failed to allocate memory")
        self.batches = 0
        return super().call(function, *arguments)


def test_batch_without_room_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Worker", TooLarge)
    engine = Engine("raw ONNX", "onnxruntime", "folder", "demo")
    report = runner.run([engine], Settings(batches=(1, 4, 8), runs=2), tmp_path)
    assert [(row["batch"], row["status"], "step_ms" in row) for row in report["engines"]] == [
        (1, "ok", True),
        (4, "failed", False),
        (8, "ok", True),
    ]
    assert report["engines"][1]["reason"] == "Failed to allocate memory"
    assert report["finished"] is True


def test_folder_that_cannot_be_made_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise SdOrtError("unet: ValueError: no such pattern")

    monkeypatch.setattr(runner, "Worker", TooLarge)
    monkeypatch.setattr(recipes, "make", fail)
    engines = [
        Engine("raw ONNX", "onnxruntime", "folder", "demo"),
        Engine("ORT optimizer", "onnxruntime", "folder", "demo", make=("ort", "cpu", "float32"), raw="folder"),
    ]
    report = runner.run(engines, Settings(component="unet", runs=1), tmp_path)
    assert [row["status"] for row in report["engines"]] == ["ok", "failed"]
    assert report["engines"][1]["reason"] == "unet: ValueError: no such pattern"


def test_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def record(group: Any, *_: Any) -> None:
        order.append([item.engine.label for item in group])

    monkeypatch.setattr(runner, "_measure", record)
    engines = [Engine(label, "onnxruntime", "folder", "demo") for label in "ab"]
    report = runner.run(engines, Settings(sequential=True), tmp_path)
    assert order == [["a"], ["b"]]
    assert any("different moments" in note for note in report["notes"])


def test_command_refuses_bad_input(sd_ort: Cli, tmp_path: Path, raw: Path) -> None:
    code, _, error = sd_ort("benchmark", tmp_path / "nowhere")
    assert (code, len(error.strip().splitlines())) == (2, 1)
    assert "is not a folder" in error
    code, _, error = sd_ort("benchmark", raw, "--provider", "tpu")
    assert (code, error) == (
        3,
        "sd-ort: unknown provider 'tpu': choose one of cpu, cuda, rocm, migraphx, hip, sdcuda.\n",
    )


def test_command_says_where_an_interrupted_run_is(
    sd_ort: Cli, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    code, _, error = sd_ort("benchmark", raw, "--out", tmp_path / "out")
    assert code == 130
    assert f"what was measured is in {tmp_path / 'out' / 'benchmark.json'}" in error


# --- Measuring ------------------------------------------------------------------------------------------------------


def test_psnr() -> None:
    black, grey = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 51, np.uint8)
    assert metrics.psnr(grey, black) == pytest.approx(20 * np.log10(5))
    assert metrics.psnr(black, black) == metrics.EQUAL_DB
    with pytest.raises(ValueError, match="cannot be compared"):
        metrics.psnr(black, black[:2])


def test_peak_memory_counts_from_its_reset() -> None:
    """Of mapped memory: what malloc gave stays with a process whose heap had room for it."""
    if not machine.reset_peak_memory():
        pytest.skip("this system does not let a process reset its peak")
    before = machine.peak_memory_MB()
    with mmap.mmap(-1, 64 * machine.MEGABYTE) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert machine.peak_memory_MB() - before == pytest.approx(64, abs=8)
    machine.reset_peak_memory()
    assert machine.peak_memory_MB() - before == pytest.approx(0, abs=8)


def test_device_memory_and_power_of_an_amd_gpu(tmp_path: Path) -> None:
    power = tmp_path / "hwmon" / "hwmon3" / "power1_average"
    power.parent.mkdir(parents=True)
    (tmp_path / "mem_info_vram_used").write_text("1048576000\n")
    power.write_text("250000000\n")
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "vram_1").write_text("1048576000\n")
    meter = device.AmdGpu(tmp_path, tmp_path / "proc")
    assert meter.used_MB(42) == 1000
    assert meter.used_MB(43) == 0
    with device.watching(meter, 42, interval=0.001) as watch:
        for bytes_ in ("2097152000", "1572864000"):
            (tmp_path / "new").write_text(bytes_)
            (tmp_path / "new").replace(process / "vram_1")
            time.sleep(0.05)
    assert watch.peak == 2000
    assert watch.joules is not None
    assert 250 * 0.1 <= watch.joules < 250 * 0.5
    power.unlink()
    assert device.AmdGpu(tmp_path).energy_J() is None


def test_energy_of_the_processor(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no RAPL"):
        device.Rapl(tmp_path)
    for package, microjoules in ((0, 1_500_000), (1, 500_000)):
        (tmp_path / f"intel-rapl:{package}").mkdir()
        (tmp_path / f"intel-rapl:{package}" / "energy_uj").write_text(f"{microjoules}\n")
    assert device.Rapl(tmp_path).energy_J() == 2


def test_device_that_is_not_there() -> None:
    meter = device.open_meter("rocm")
    if not meter.note.startswith(device.NOT_READABLE) or meter.energy_J() is not None:
        pytest.skip("this machine has an AMD GPU")
    assert meter.energy_J() is None
    assert meter.note.startswith("not readable: ")


# --- MLPerf's scenarios ---------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps or draws; a batch takes `fixed` and `each` an image."""

    def __init__(self, fixed: float, each: float) -> None:
        self.now, self.fixed, self.each = 100.0, fixed, each
        self.batches: list[list[int]] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def draw(self, numbers: Any) -> None:
        self.batches.append(list(numbers))
        self.now += self.fixed + self.each * len(numbers)


def serve(clock: Clock, queries: int, batch: int, rate: float) -> dict[str, Any]:
    return mlperf.server(clock.draw, queries, batch, rate, 0, lambda: clock.now, clock.sleep)


def test_server_draws_what_waits_together() -> None:
    idle = Clock(0.001, 0)
    result = serve(idle, 200, 4, rate=1.0)
    assert [n for batch in idle.batches for n in batch] == list(range(200))
    assert result["latency_s"]["p50"] == pytest.approx(0.001)
    assert result["mean_batch"] == pytest.approx(1, abs=0.02)

    busy = Clock(1.0, 0)
    result = serve(busy, 200, 4, rate=3.0)  # four a second at most, three arrive: a queue, but a bounded one
    assert max(map(len, busy.batches)) == 4
    assert result["mean_batch"] > 2
    assert 1 < result["latency_s"]["p50"] < 10

    flooded = Clock(1.0, 0)
    assert serve(flooded, 200, 4, rate=40.0)["latency_s"]["p99"] > 40
    assert len(flooded.batches) == pytest.approx(50, abs=2)


def test_arrivals_are_poisson() -> None:
    gaps = np.diff(mlperf.arrivals(20_000, 5.0, 0))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # exponential: as large as the mean
    assert (mlperf.arrivals(10, 5.0, 1) == mlperf.arrivals(10, 5.0, 1)).all()


def test_percentiles_are_measured_values() -> None:
    assert mlperf.percentiles(range(1, 101))["p99"] == 100
    assert mlperf.percentiles([1.0, 2.0])["p50"] == 2.0


def test_scores_that_cannot_be_had_say_why() -> None:
    image = np.zeros((128, 128, 3), np.uint8)
    scores = mlperf.quality("sd15", ["a dog"], {0: image})
    assert "demo" in scores["fidelity_percent"]
    assert isinstance(scores["fid"], str)
    assert mlperf.quality("demo", scenes.unseen_prompts(1), {0: image})["fidelity_percent"] == 0.0


SMALL = ("--torch", "none", "--steps", 1, "--height", 64, "--width", 64, "--threads", 1)


def test_mlperf_of_a_tiny_model(sd_ort: Cli, tiny_export: Path, tmp_path: Path) -> None:
    loads = ("--mlperf", "--queries", 3, "--load", 0.5, "--batch", "1,2")
    code, table, _ = sd_ort("benchmark", tiny_export, *loads, *SMALL, "--out", tmp_path)
    assert code == 0
    report = json.loads((tmp_path / "mlperf.json").read_text())
    (row,) = report["engines"]
    assert row["status"] == "ok"
    assert row["Offline"]["batch"] == 2
    assert row["Offline"]["images_per_s"] == pytest.approx(3 / row["Offline"]["seconds"])
    assert row["Server"]["rate_per_s"] == pytest.approx(row["Offline"]["images_per_s"] / 2)
    for name in ("SingleStream", "Server"):
        assert 0 < row[name]["latency_s"]["p50"] <= row[name]["latency_s"]["p99"] <= row[name]["latency_s"]["max"]
    assert "not an official MLPerf result" in table
    assert "SingleStream" in (tmp_path / "report.html").read_text()


# --- Profile --------------------------------------------------------------------------------------------------------


def ort_trace() -> list[dict[str, Any]]:
    """Two runs of three nodes each; the first run is a warm-up."""
    events: list[dict[str, Any]] = [{"cat": "Session", "name": "session_initialization", "ts": 0, "dur": 50}]
    for start in (100, 200):
        events.append({"cat": "Session", "name": "model_run", "ts": start, "dur": 90})
        for i, (name, op) in enumerate((("conv", "Conv"), ("conv_nchwc", "Conv"), ("attn_1", "MatMul"))):
            arguments = {"op_name": op, "provider": "CPUExecutionProvider"}
            where = {"ts": start + 10 + 20 * i, "dur": 10 * (i + 1)}
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "args": arguments, **where})
            events.append({"cat": "Node", "name": f"{name}_fence_before", "args": {"op_name": op}, **where})
    return events


def test_profile_sums_by_operator_and_site() -> None:
    events = profile.node_events(ort_trace(), runs=1)
    assert [event.name for event in events] == ["conv", "conv_nchwc", "attn_1"]
    sites = {"conv": "down_blocks.0.resnets.0", "attn_1": "mid_block.attentions.0"}
    found = profile.summary(profile.with_sites(events, sites))
    assert found["total_ms"] == pytest.approx(0.06)
    assert [(r["name"], r["ms"], r["count"]) for r in found["by_operator"]] == [
        ("Conv [CPU]", 0.03, 2),
        ("MatMul [CPU]", 0.03, 1),
    ]
    assert {r["name"]: r["ms"] for r in found["by_site"]} == {"down_blocks.0": 0.03, "mid_block.attentions": 0.03}


def test_kernels_belong_to_the_node_that_launched_them() -> None:
    events = profile.node_events(ort_trace(), runs=2)
    trace: list[dict[str, Any]] = []
    for number, start in enumerate((1000, 5000)):
        trace.append({"ph": "X", "cat": "user_annotation", "name": profile.STEP, "ts": start, "dur": 120})
        for i, (launch, duration) in enumerate(
            ((12, 500), (33, 70), (51, 3), (85, 1))
        ):  # 7 us from Python into the run
            correlation = {"correlation": 10 * number + i}
            trace.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": start + 7 + launch,
                    "dur": 2,
                    "args": correlation,
                }
            )
            trace.append(
                {"ph": "X", "cat": "kernel", "name": f"k{i}", "ts": start + 900, "dur": duration, "args": correlation}
            )
    kernels = profile.kernel_events({"traceEvents": trace})
    assert len(kernels) == 8
    timed = profile.by_kernels(events, kernels)
    assert [event.duration for event in timed[:3]] == [500, 70, 3]
    assert [(event.operator, event.duration) for event in timed[6:]] == [("(other kernels)", 1)] * 2


def test_trace_loads_in_perfetto() -> None:
    events = profile.node_events(ort_trace(), runs=1)
    made = profile.to_trace(events, [])["traceEvents"]
    assert [event["ph"] for event in made] == ["M", "X", "X", "X"]
    assert all(event["dur"] > 0 and event["ts"] >= 200 for event in made[1:])


def test_profile_of_a_tiny_unet(sd_ort: Cli, tiny_export: Path, tmp_path: Path) -> None:
    code, table, _ = sd_ort("benchmark", tiny_export, "--profile", *SMALL, "--out", tmp_path)
    assert code == 0
    (row,) = json.loads((tmp_path / "profile.json").read_text())["engines"]
    assert (row["status"], row["clock"]) == ("ok", "nodes")
    for title in ("by_operator", "by_site"):
        assert sum(r["ms"] for r in row[title]) == pytest.approx(row["total_ms"])
    convolutions = next(r for r in row["by_operator"] if r["name"] == "Conv [CPU]")
    assert convolutions["count"] == 98
    sites = {r["name"]: r["share"] for r in row["by_site"]}
    assert {"down_blocks.0", "mid_block.attentions", "up_blocks.3"} <= sites.keys()
    assert sites.get(profile.OTHER, 0) < 0.5
    events = json.loads((tmp_path / row["trace"]).read_text())["traceEvents"]
    assert sum(e.get("dur", 0) for e in events) / 1e3 == pytest.approx(row["total_ms"])
    assert "Conv [CPU]" in table


# --- Doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_as_json(sd_ort: Cli) -> None:
    code, out, _ = sd_ort("doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert findings["providers"]["cpu"] == {"ok": True, "problem": None, "missing_libraries": []}
    assert set(findings["wheels"]) <= set(findings["versions"])


def test_doctor_without_onnxruntime(sd_ort: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise SdOrtError("onnxruntime is not installed")

    monkeypatch.setattr("sd_ort.runtime.providers.runtime", absent)
    code, out, _ = sd_ort("doctor")
    assert code == 3
    assert out.count("onnxruntime is not installed") == len(doctor.PROVIDERS)


# --- Fidelity of the demo model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluate() -> Any:
    """scripts/measure/evaluate_demo.py as a module."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "evaluate_demo.py"
    spec = importlib.util.spec_from_file_location("evaluate_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fidelity_bounds_can_be_broken(evaluate: Any) -> None:
    prompts = scenes.unseen_prompts(20)
    parsed = [scenes.parse(prompt) for prompt in prompts]
    right = np.stack([scenes.render(scene, scenes.layout(scene, random.Random(i))) for i, scene in enumerate(parsed)])
    reference = {**evaluate.row("torch fp32", prompts, right, None), "pictures": right}
    assert reference["share_percent"] == 100
    same = evaluate.row("fused fp32", prompts, right, reference)
    assert (same["passed"], same["lost_points"], same["psnr_db"]["min"]) == (True, 0, metrics.EQUAL_DB)

    one_wrong = right.copy()
    one_wrong[3] = 255 - one_wrong[3]  # 5 points of fidelity, while the median picture is as before
    entry = evaluate.row("fused fp16", prompts, one_wrong, reference)
    assert (entry["passed"], entry["right"], entry["lost_points"]) == (False, 19, pytest.approx(5))
    assert entry["failures"][0]["prompt"] == prompts[3]

    noisy = (right.astype(int) + np.random.default_rng(0).integers(-9, 10, right.shape)).clip(0, 255).astype(np.uint8)
    entry = evaluate.row("fused fp32", prompts, noisy, reference)
    assert entry["psnr_db"]["median"] < 40
    assert entry["passed"] is False
