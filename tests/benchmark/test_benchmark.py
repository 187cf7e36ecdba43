"""A run of the benchmark: rows and ratios, failures as rows, nothing lost on an interrupt."""

from __future__ import annotations

import csv
import io
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import pytest
from cli_type import Cli

from sd_ort.benchmark import engine_builds, engine_selection, report_file, runner
from sd_ort.benchmark.engines import ort
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.benchmark.worker import EngineMeasurements, Worker, is_tuned
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime import device_meters

ORT_COLUMNS = (
    "model_name,directory,engine,version,provider,disable_safety_checker,height,width,steps,batch_size,batch_count,"
    "num_prompts,average_latency,median_latency,first_run_memory_MB,second_run_memory_MB,enable_cuda_graph"
)


@pytest.fixture(scope="module")
def report_folder(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one run of three engines: raw ONNX, the same with a truncated UNet, torch eager."""
    folder = tmp_path_factory.mktemp("benchmark")
    broken = Path(shutil.copytree(small_export, folder / "broken"))
    path = broken / "unet" / MODEL
    path.write_bytes(path.read_bytes()[:1000])
    torch_pipeline("sd15-small", True).save_pretrained(folder / "torch")  # other processes do not know the preset
    engines, notes = engine_selection.find_engines([small_export, broken], torch_model=str(folder / "torch"))
    settings = BenchmarkSettings(steps=2, batches=(1, 2), height=64, width=64, runs=3, threads=1, tuning=True, calls=2)
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
        assert 20 < row["base_memory_MB"] <= row["load_memory_MB"] <= row["peak_memory_MB"] < 10_000
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


def test_engines_generate_the_same_image(report: dict[str, Any], report_folder: Path) -> None:
    assert any("2 batches one after another" in note for note in report["notes"])
    assert report["engines"][2]["psnr_db"] > 50
    assert (report_folder / "raw-ONNX-raw.png").is_file()
    assert (report_folder / "torch-eager.png").is_file()


@pytest.mark.parametrize("height", [64, 72])
def test_each_step_is_timed(small_export: Path, height: int) -> None:
    """Also at sizes that do not halve evenly, for which the UNet has another graph."""
    engine = Engine("ours", "onnxruntime", str(small_export), "demo")
    run = ort.open_pipeline(engine, BenchmarkSettings(steps=3, height=height, width=64, threads=1)).run
    for seed in range(2):
        assert len(run(1, None, seed).steps) == 4  # PNDM runs the UNet once more


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
    notes = runner.notes_on(BenchmarkSettings(provider=provider, tuning=True), device_meters.DeviceMeter())
    assert any(f"--tuning {note}" in line for line in notes)
    assert not any(
        "--tuning" in line
        for line in runner.notes_on(BenchmarkSettings(provider=provider), device_meters.DeviceMeter())
    )
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
    table = report_file.to_table(report)
    assert "raw ONNX broken (batch 2) failed:" in table
    assert "torch eager" in table
    assert "1.00x" in table  # the baseline itself


# --- What goes wrong ------------------------------------------------------------------------------------------------


class FakeWorker(Worker):
    """A worker whose process stays idle, and whose third batch is interrupted."""

    started: ClassVar[list[FakeWorker]] = []

    def __init__(self, engine: Engine, meter: device_meters.DeviceMeter, failure: str | None = None) -> None:
        super().__init__(engine, meter, failure)
        self.batches = 0
        self.started.append(self)

    def call(
        self, function: Callable[..., dict[str, Any]], *arguments: Any
    ) -> tuple[dict[str, Any], device_meters.DeviceUsage]:
        if len(arguments) == 2:
            loaded = {"precision": "fp32", "load_s": 1.0, "base_memory_MB": 1.0, "load_memory_MB": 2.0}
            return loaded, device_meters.DeviceUsage()
        self.batches += 1
        if self.batches == 3:
            raise KeyboardInterrupt
        image = np.zeros((1, 8, 8, 3), np.uint8)
        batch = {"seconds": float(self.batches), "steps": [0.1], "memory_MB": 3.0, "images": image}
        return {**batch, "output": None, "size": (8, 8)}, device_meters.DeviceUsage()


def test_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("raw ONNX", "onnxruntime", "folder", "demo")
    monkeypatch.setattr(runner, "Worker", TooLarge)
    runner.run([engine], BenchmarkSettings(runs=1), tmp_path)
    assert (tmp_path / "raw-ONNX.png").is_file()
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    with pytest.raises(KeyboardInterrupt):
        runner.run([engine], BenchmarkSettings(warmup=1, runs=5), tmp_path)
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["interrupted"] is True
    assert report["finished"] is False
    assert report["engines"][0]["image_s"]["values"] == [2.0]  # the first batch warmed up, the third was interrupted
    assert not (tmp_path / "raw-ONNX.png").exists(), "an image of the earlier run is shown with this one's prompt"
    assert not FakeWorker.started[-1].process.is_running()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_interrupt_does_not_wait_for_an_engine_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine is loaded at once; the interrupt comes while the process of the second loads for a minute."""
    loaded: list[Worker] = []
    first_is_loaded = threading.Event()

    class SlowWorker(Worker):
        def load(self, settings: BenchmarkSettings) -> None:
            if self.engine.label == "second":
                first_is_loaded.wait()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                self.call(time.sleep, 60)  # raises when the process is killed
            loaded.append(self)

    monkeypatch.setattr(runner, "Worker", SlowWorker)
    monkeypatch.setattr(runner.ReportFile, "save", lambda self: first_is_loaded.set())
    engines = [Engine(label, "onnxruntime", "folder", "demo") for label in ("first", "second")]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run(engines, BenchmarkSettings(), tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [worker.engine.label for worker in loaded] == ["first"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "out of memory"), (signal.SIGBUS, "SIGBUS: a file of its folder was truncated")],
    ids=["memory", "file"],
)
def test_engine_killed_by_the_system_is_a_row(tmp_path: Path, number: int, reason: str) -> None:
    worker = Worker(Engine("raw ONNX", "onnxruntime", str(tmp_path), "demo"), device_meters.DeviceMeter())
    worker.measurements = {1: EngineMeasurements(1), 2: EngineMeasurements(2)}
    worker.process.send_signal(number)
    for batch in (1, 2):
        worker.run(batch, timed=True)
    worker.pool.shutdown()
    for measured in worker.measurements.values():
        row = worker.row(measured, None, BenchmarkSettings())
        assert row["status"] == "failed"
        assert reason in row["reason"]


class TooLarge(FakeWorker):
    """A worker that has no room for a batch of 4."""

    def call(
        self, function: Callable[..., dict[str, Any]], *arguments: Any
    ) -> tuple[dict[str, Any], device_meters.DeviceUsage]:
        if arguments == (4,):
            raise SdOrtError("Failed to allocate memory")
        self.batches = 0
        return super().call(function, *arguments)


def test_batch_without_room_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Worker", TooLarge)
    engine = Engine("raw ONNX", "onnxruntime", "folder", "demo")
    report = runner.run([engine], BenchmarkSettings(batches=(1, 4, 8), runs=2), tmp_path)
    assert [(row["batch"], row["status"], "step_ms" in row) for row in report["engines"]] == [
        (1, "ok", True),
        (4, "failed", False),
        (8, "ok", True),
    ]
    assert report["engines"][1]["reason"] == "Failed to allocate memory"
    assert report["finished"] is True


def test_failed_build_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise SdOrtError("unet: ValueError: no such pattern")

    monkeypatch.setattr(runner, "Worker", TooLarge)
    monkeypatch.setattr(engine_builds, "build_folder", fail)
    engines = [
        Engine("raw ONNX", "onnxruntime", "folder", "demo"),
        Engine(
            "ORT optimizer", "onnxruntime", "folder", "demo", build_spec=("ort", "cpu", "float32"), raw_export="folder"
        ),
    ]
    report = runner.run(engines, BenchmarkSettings(component="unet", runs=1), tmp_path)
    assert [row["status"] for row in report["engines"]] == ["ok", "failed"]
    assert report["engines"][1]["reason"] == "unet: ValueError: no such pattern"


def test_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def record(group: Any, *_: Any) -> None:
        order.append([item.engine.label for item in group])

    monkeypatch.setattr(runner, "measure", record)
    engines = [Engine(label, "onnxruntime", "folder", "demo") for label in "ab"]
    report = runner.run(engines, BenchmarkSettings(sequential=True), tmp_path)
    assert order == [["a"], ["b"]]
    assert any("different moments" in note for note in report["notes"])


def test_command_refuses_bad_input(sd_ort: Cli, tmp_path: Path, raw: Path) -> None:
    code, _, error = sd_ort("benchmark", tmp_path / "nowhere")
    assert (code, len(error.strip().splitlines())) == (2, 1)
    assert "no such file" in error
    code, _, error = sd_ort("benchmark", raw, "--component", "unet", "--calls", 2)
    assert (code, error) == (2, "sd-ort: --calls goes with whole images: leave out --component.\n")
    code, _, error = sd_ort("benchmark", raw, "--provider", "tpu")
    assert (code, error) == (
        3,
        "sd-ort: unknown provider 'tpu': choose auto or one of cpu, cuda, rocm, migraphx, hip, sdcuda.\n",
    )
    code, _, error = sd_ort("benchmark", raw, "--provider", "cpu", "--torch", "none", "--out", "/dev/null/out")
    assert (code, error) == (5, "sd-ort: cannot write /dev/null/out/benchmark.json: /dev/null is no folder.\n")


def test_command_says_where_an_interrupted_run_is(
    sd_ort: Cli, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Worker", FakeWorker)
    arguments = "benchmark", raw, "--torch", "none", "--batch", "1,2", "--out", tmp_path / "out"
    report, page = tmp_path / "out" / "benchmark.json", tmp_path / "out" / "report.html"
    code, _, error = sd_ort(*arguments)
    assert code == 130
    assert f"what was measured is in {report} and {page}.\n" in error
    before = report.read_bytes(), page.read_bytes()
    assert [row.get("reason") for row in json.loads(before[0])["engines"]] == [
        None,
        "the run was interrupted before it was timed",
    ]
    monkeypatch.setattr(FakeWorker, "load", interrupt)
    code, _, error = sd_ort(*arguments)
    assert (code, error.splitlines()[-1]) == (130, f"sd-ort: interrupted; {report_file.NOTHING_MEASURED}")
    assert (report.read_bytes(), page.read_bytes()) == before
