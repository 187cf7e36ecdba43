"""The benchmark: which engines, rows and ratios, failures as rows, nothing lost on an interrupt. Doctor beside it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import pytest

from sd_ort import benchmark, doctor, measure
from sd_ort.demo import scenes
from sd_ort.engines import Engine, Settings
from sd_ort.errors import InputError, SdOrtError
from sd_ort.folder import MODEL, write_manifest

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
    engines, notes = benchmark.find_engines([half, full, raw])
    assert [e.label for e in engines] == ["raw ONNX", "fused fp16", "fused fp32", "torch eager"]
    assert [e.engine for e in engines] == ["onnxruntime"] * 3 + ["torch"]
    assert engines[-1].model == "demo"
    assert notes == []


def test_the_export_joins_an_optimized_folder(raw: Path) -> None:
    engines, _ = benchmark.find_engines([optimized(raw, "full", "float32")], "none")
    assert [(e.label, Path(e.directory).name) for e in engines] == [("raw ONNX", "raw"), ("fused fp32", "full")]


def test_optimized_folder_whose_export_is_gone(raw: Path) -> None:
    folder = optimized(raw, "full", "float32")
    shutil.rmtree(raw)
    engines, _ = benchmark.find_engines([folder], "none")
    assert [e.label for e in engines] == ["fused fp32"]


def test_equal_labels_are_told_apart(raw: Path) -> None:
    folders = [optimized(raw, "a", "float32"), optimized(raw, "b", "float32", "cpu"), optimized(raw, "c", "float32")]
    engines, _ = benchmark.find_engines([raw, *folders], "none")
    assert [e.label for e in engines[1:]] == ["fused fp32 portable a", "fused fp32 cpu", "fused fp32 portable c"]


def test_random_weights_are_made_again_for_torch(tmp_path: Path) -> None:
    source = {"model": "sd15-tiny", "random_weights": True}
    folder = fake_folder(tmp_path / "raw", stage="export", source=source, options={"seed": 3})
    torch = benchmark.find_engines([folder])[0][-1]
    assert (torch.engine, torch.model, torch.random_weights, torch.weights_seed) == ("torch", "sd15-tiny", True, 3)


def test_torch_model_that_cannot_be_found_is_a_note(tmp_path: Path) -> None:
    folder = fake_folder(tmp_path / "raw", stage="export", source={"model": "owner/name"}, options={})
    engines, notes = benchmark.find_engines([folder])
    assert [e.engine for e in engines] == ["onnxruntime"]
    assert "torch eager was not measured" in notes[0]
    with pytest.raises(InputError, match="not a diffusers folder"):
        benchmark.find_engines([folder], str(tmp_path / "nowhere"))


def test_folder_of_another_tool_is_named_by_its_folder(tmp_path: Path) -> None:
    engines, _ = benchmark.find_engines([fake_folder(tmp_path / "optimum-export")])
    assert engines[0].label == "optimum-export"


# --- A run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report_folder(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one run of three engines: raw ONNX, the same with a truncated UNet, torch eager."""
    folder = tmp_path_factory.mktemp("benchmark")
    broken = Path(shutil.copytree(tiny_export, folder / "broken"))
    path = broken / "unet" / MODEL
    path.write_bytes(path.read_bytes()[:1000])
    engines, notes = benchmark.find_engines([tiny_export, broken])
    settings = Settings(steps=2, batch=2, height=64, width=64, runs=3, threads=1, tuning=True)
    benchmark.run(engines, settings, folder / "out", notes=notes)
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
    assert [(r["label"], r["status"]) for r in report["engines"]] == [
        ("raw ONNX raw", "ok"),
        ("raw ONNX broken", "failed"),
        ("torch eager", "ok"),
    ]
    assert "truncated" in report["engines"][1]["reason"]
    assert "image_s" not in report["engines"][1]


def test_numbers_of_an_engine(report: dict[str, Any]) -> None:
    first, _, torch = report["engines"]
    for row in (first, torch):
        assert len(row["image_s"]["values"]) == len(row["unet_step_ms"]["values"]) == 3
        assert row["image_s"]["median"] == median(row["image_s"]["values"])
        # Two images a batch: the UNet's steps are part of the batch's time.
        assert 2 * row["unet_step_ms"]["min"] / 1e3 < 2 * row["image_s"]["max"]
        assert 50 < row["base_memory_MB"] <= row["load_memory_MB"] <= row["peak_memory_MB"] < 10_000
        assert row["load_s"] > 0
        assert (row["height"], row["width"], row["precision"]) == (64, 64, "fp32")


def test_ratios_are_taken_round_by_round(report: dict[str, Any]) -> None:
    first, _, torch = report["engines"]
    for times, ratios in (("image_s", "image_speedup"), ("unet_step_ms", "unet_step_speedup")):
        expected = [a / b for a, b in zip(first[times]["values"], torch[times]["values"], strict=True)]
        assert torch[ratios]["values"] == pytest.approx(expected)
        assert torch[ratios]["median"] == pytest.approx(median(expected))
        assert first[ratios]["values"] == [1, 1, 1]


def test_engines_draw_the_same_image(report: dict[str, Any], report_folder: Path) -> None:
    assert report["engines"][2]["psnr_db"] > 50
    assert (report_folder / "raw-ONNX-raw.png").is_file()
    assert (report_folder / "torch-eager.png").is_file()


def test_tuning_without_tunable_operators_is_said(report: dict[str, Any]) -> None:
    assert any("--tuning changed nothing" in note for note in report["notes"])


def test_csv_has_onnxruntimes_columns(report: dict[str, Any], report_folder: Path) -> None:
    text = (report_folder / "benchmark.csv").read_text()
    assert text.splitlines()[0] == ORT_COLUMNS
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["engine"] for row in rows] == ["onnxruntime", "torch"]
    assert float(rows[0]["median_latency"]) == pytest.approx(2 * report["engines"][0]["image_s"]["median"])
    assert float(rows[0]["first_run_memory_MB"]) > 0
    assert (rows[0]["batch_size"], rows[0]["batch_count"], rows[0]["steps"]) == ("2", "3", "2")


def test_table_shows_every_engine(report: dict[str, Any]) -> None:
    table = benchmark.to_table(report)
    assert "raw ONNX broken failed:" in table
    assert "torch eager" in table
    assert "1.00x (1.00-1.00)" in table


# --- What goes wrong ------------------------------------------------------------------------------------------------


class FakeWorker(benchmark.Worker):
    """A worker whose process stays idle, and whose third batch is interrupted."""

    started: ClassVar[list[FakeWorker]] = []

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches = 0
        self.started.append(self)

    def _call(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | None:
        if arguments:
            return {"precision": "fp32", "load_s": 1.0, "base_memory_MB": 1.0, "load_memory_MB": 2.0}
        self.batches += 1
        if self.batches == 3:
            raise KeyboardInterrupt
        image = np.zeros((1, 8, 8, 3), np.uint8)
        return {"seconds": float(self.batches), "steps": [0.1], "memory_MB": 3.0, "images": image}


def test_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    engine = Engine("raw ONNX", "onnxruntime", "folder", "demo")
    with pytest.raises(KeyboardInterrupt):
        benchmark.run([engine], Settings(warmup=1, runs=5), tmp_path)
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["interrupted"] is True
    assert report["finished"] is False
    assert report["engines"][0]["image_s"]["values"] == [2.0]  # the first batch warmed up, the third was interrupted
    assert not FakeWorker.started[-1].process.is_running()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_engine_killed_by_the_system_is_a_row(tmp_path: Path) -> None:
    worker = benchmark.Worker(Engine("raw ONNX", "onnxruntime", str(tmp_path), "demo"))
    worker.kill()
    worker.draw(counted=True)
    worker.pool.shutdown()
    row = worker.row(None)
    assert row["status"] == "failed"
    assert "out of memory" in row["reason"]


def test_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def record(group: Any, *_: Any) -> None:
        order.append([engine.label for engine in group])

    monkeypatch.setattr(benchmark, "_measure", record)
    engines = [Engine(label, "onnxruntime", "folder", "demo") for label in "ab"]
    report = benchmark.run(engines, Settings(sequential=True), tmp_path)
    assert order == [["a"], ["b"]]
    assert any("different moments" in note for note in report["notes"])


def test_command_refuses_bad_input(sd_ort: Cli, tmp_path: Path, raw: Path) -> None:
    code, _, error = sd_ort("benchmark", tmp_path / "nowhere")
    assert (code, len(error.strip().splitlines())) == (2, 1)
    assert "is not a folder" in error
    code, _, error = sd_ort("benchmark", raw, "--provider", "tpu")
    assert (code, error) == (3, "sd-ort: unknown provider 'tpu': choose one of cpu, cuda, rocm, migraphx.\n")


def test_command_says_where_an_interrupted_run_is(
    sd_ort: Cli, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "run", interrupted)
    code, _, error = sd_ort("benchmark", raw, "--out", tmp_path / "out")
    assert code == 130
    assert f"what was measured is in {tmp_path / 'out' / 'benchmark.json'}" in error


# --- Measuring ------------------------------------------------------------------------------------------------------


def test_psnr() -> None:
    black, grey = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 51, np.uint8)
    assert measure.psnr(grey, black) == pytest.approx(20 * np.log10(5))
    assert measure.psnr(black, black) == measure.EQUAL_DB
    with pytest.raises(ValueError, match="cannot be compared"):
        measure.psnr(black, black[:2])


def test_peak_memory_counts_from_its_reset() -> None:
    if not measure.reset_peak_memory():
        pytest.skip("this system does not let a process reset its peak")
    before = measure.peak_memory_MB()
    block = np.ones(64 * measure.MEGABYTE, np.uint8)
    assert measure.peak_memory_MB() - before == pytest.approx(64, abs=8)
    del block
    measure.reset_peak_memory()
    assert measure.peak_memory_MB() - before == pytest.approx(0, abs=8)


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

    monkeypatch.setattr("sd_ort.session.runtime", absent)
    code, out, _ = sd_ort("doctor")
    assert code == 3
    assert out.count("onnxruntime is not installed") == len(doctor.PROVIDERS)


# --- Fidelity of the demo model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluate() -> Any:
    """scripts/evaluate_demo.py as a module."""
    path = Path(__file__).resolve().parents[1] / "scripts" / "evaluate_demo.py"
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
    assert (same["passed"], same["lost_points"], same["psnr_db"]["min"]) == (True, 0, measure.EQUAL_DB)

    one_wrong = right.copy()
    one_wrong[3] = 255 - one_wrong[3]  # 5 points of fidelity, while the median picture is as before
    entry = evaluate.row("fused fp16", prompts, one_wrong, reference)
    assert (entry["passed"], entry["right"], entry["lost_points"]) == (False, 19, pytest.approx(5))
    assert entry["failures"][0]["prompt"] == prompts[3]

    noisy = (right.astype(int) + np.random.default_rng(0).integers(-9, 10, right.shape)).clip(0, 255).astype(np.uint8)
    entry = evaluate.row("fused fp32", prompts, noisy, reference)
    assert entry["psnr_db"]["median"] < 40
    assert entry["passed"] is False
