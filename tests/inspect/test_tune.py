"""Tuning files without a GPU: a stand-in for the op library measures, the files must keep its results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from cli_type import Cli, success

from sd_ort.checkpoints.signatures import default_latents
from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent
from sd_ort.core.errors import InputError, OutputError, ProviderError
from sd_ort.inspect import tune
from sd_ort.runtime import tuning

VERSION = "1.31.1"
ROCM = {"ep": "ROCMExecutionProvider", "validators": {"ORT_VERSION": VERSION}, "results": {"Gemm": {"a": 3}}}


class FakeOps:
    """An op library with one operator of two candidates, on a GPU of its own."""

    def __init__(self, arch: str = "gfx942", library: str = "abc", results: tuning.Operators | None = None) -> None:
        self.arch, self.library, self.measured = arch, library, results or {}
        self.applied: dict[tuple[str, str], str] = {}
        self.enabled = False

    def validators(self) -> dict[str, str]:
        return {"arch": self.arch, "driver": "driver 7 runtime 7", "library": self.library}

    def results(self) -> tuning.Operators:
        return self.measured

    def apply_result(self, operator: str, signature: str, candidate: str) -> bool:
        is_known = operator == "GroupNorm" and candidate in ("default", "wide")
        if is_known:
            self.applied[operator, signature] = candidate
        return is_known

    def enable(self, enabled: bool) -> None:
        self.enabled = enabled


class FakeSession:
    """Keeps ONNX Runtime's own results."""

    def __init__(self, results: list[tuning.Record] | None = None) -> None:
        self.own = results or []

    def get_tuning_results(self) -> list[tuning.Record]:
        return self.own

    def set_tuning_results(self, results: list[tuning.Record], error_on_invalid: bool) -> None:
        self.own = results


def results_of(signature: str, candidate: str = "wide") -> tuning.Operators:
    return {"GroupNorm": {signature: {"candidate": candidate, "microseconds": 2.0, "default_microseconds": 3.0}}}


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SD_ORT_TUNING", str(tmp_path / "tuning"))
    return tmp_path / "tuning"


def save(ops: FakeOps, *sessions: FakeSession) -> Path:
    path = tuning.save(sessions, ops, VERSION)
    assert path is not None
    return path


def test_a_later_session_takes_what_was_measured() -> None:
    path = save(FakeOps(results=results_of("float16_2x64x64_g32")), FakeSession([ROCM]))
    later, session = FakeOps(), FakeSession()
    assert tuning.load(session, later, VERSION) == path
    assert later.applied == {("GroupNorm", "float16_2x64x64_g32"): "wide"}
    assert session.own == [ROCM]
    record = json.loads(path.read_text())
    assert record["format"] == tuning.FORMAT
    assert record["validators"] == {**later.validators(), "onnxruntime": VERSION}


def test_results_beside_the_model_and_in_the_cache_are_found(
    tmp_path: Path, results_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was tuned elsewhere brings its file; what was saved here is found from any working directory."""
    path = save(FakeOps(results=results_of("a")))
    model = tmp_path / "folder" / "unet" / "model.onnx"
    file = tmp_path / "folder" / "tuning" / path.name
    file.parent.mkdir(parents=True)
    path.rename(file)
    ops = FakeOps()
    assert tuning.load(FakeSession(), ops, VERSION) is None
    assert (tuning.load(FakeSession(), ops, VERSION, model), len(ops.applied)) == (file, 1)
    monkeypatch.delenv("SD_ORT_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(FakeOps(results=results_of("b")))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tuning.load(FakeSession(), FakeOps(), VERSION) == tmp_path / "cache" / "sd-ort" / "tuning" / path.name


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (FakeOps(arch="gfx90a"), "GPU architecture 'gfx942' there, 'gfx90a' here"),
        (FakeOps(library="def"), "op library 'abc' there, 'def' here"),
    ],
)
def test_a_file_from_elsewhere_is_refused_with_the_reason(
    here: FakeOps, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(FakeOps(results=results_of("a")))
    with pytest.raises(tuning.TuningError, match=rf"{reason}\. Tune again"):
        tuning.check(path, tuning.read(path), tuning.validators_of(here, VERSION))
    with caplog.at_level("INFO", "sd_ort"):
        assert tuning.load(FakeSession(), here, VERSION) is None
    assert reason in caplog.text
    assert here.applied == {}


def test_another_onnxruntime_is_refused() -> None:
    path = save(FakeOps(results=results_of("a")))
    with pytest.raises(tuning.TuningError, match=r"ONNX Runtime '1\.31\.1' there, '1\.32\.0' here"):
        tuning.check(path, tuning.read(path), tuning.validators_of(FakeOps(), "1.32.0"))


def test_results_are_merged_and_replaced() -> None:
    more = {**ROCM, "results": {"Gemm": {"b": 1}, "Softmax": {"c": 2}}}
    save(FakeOps(results=results_of("a", "default")), FakeSession([ROCM]))
    save(FakeOps(results=results_of("b")), FakeSession([more]))
    path = save(FakeOps(results=results_of("a", "wide")))
    record = tuning.read(path)
    assert {s: r["candidate"] for s, r in record["operators"]["GroupNorm"].items()} == {"a": "wide", "b": "wide"}
    assert record["onnxruntime"][0]["results"] == {"Gemm": {"a": 3, "b": 1}, "Softmax": {"c": 2}}


def test_onnxruntime_results_of_another_version_are_replaced() -> None:
    new = {**ROCM, "validators": {"ORT_VERSION": "2"}, "results": {"Gemm": {"z": 9}}}
    assert tuning.merge_onnxruntime([dict(ROCM)], [new]) == [new]


def write_one(number: int) -> str:
    return str(tuning.save([], FakeOps(results=results_of(f"signature{number}")), VERSION))


def test_concurrent_writers_lose_nothing() -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        (path,) = set(pool.map(write_one, range(40)))
    record = tuning.read(Path(path))
    assert len(record["operators"]["GroupNorm"]) == 40
    assert [p.name for p in Path(path).parent.glob("*.json")] == [Path(path).name]


def test_a_crash_while_writing_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(FakeOps(results=results_of("a")))
    before = path.read_text()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        save(FakeOps(results=results_of("b")))
    assert path.read_text() == before


def drop_operators(record: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in record.items() if key != "operators"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: "{", "cannot be read"),
        (lambda record: json.dumps({**record, "format": 0}), "has format 0, this version reads 1"),
        (lambda record: "[]", "cannot be read"),
        (drop_operators, "is no tuning file"),
        (lambda record: json.dumps({**record, "operators": {"GroupNorm": {"a": 1}}}), "is no tuning file"),
    ],
)
def test_damaged_files_are_named(damage: Callable[[dict[str, Any]], str], message: str) -> None:
    path = save(FakeOps(results=results_of("a")))
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(tuning.TuningError, match=f"{message}.*: delete it"):
        tuning.load(FakeSession(), FakeOps(), VERSION)


def test_another_gpu_s_results_under_this_gpu_s_name_are_to_be_deleted() -> None:
    """Tuning again would read that file first."""
    path, here = save(FakeOps(results=results_of("a"))), FakeOps(arch="gfx90a")
    named = tuning.path_for(tuning.validators_of(here, VERSION))
    path.rename(named)
    with pytest.raises(tuning.TuningError, match=r"'gfx90a' here\. Delete it and tune again with sd-ort tune\.$"):
        tuning.load(FakeSession(), here, VERSION)


def test_an_unknown_candidate_is_refused() -> None:
    save(FakeOps(results=results_of("a", "no_such")))
    with pytest.raises(tuning.TuningError, match="no candidate 'no_such' of GroupNorm"):
        tuning.load(FakeSession(), FakeOps(), VERSION)


def test_nothing_measured_writes_nothing(results_folder: Path) -> None:
    assert tuning.save([FakeSession()], FakeOps(), VERSION) is None
    assert not results_folder.exists()


def test_a_session_with_tuning_on_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ops = FakeOps()
    monkeypatch.setattr(tuning, "gpu_ops", lambda ep, path: ops)
    later: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tuning, "Finalize", lambda owner, function, arguments, exitpriority: later.append(arguments))
    session = FakeSession()
    tuning.setup_tuning(session, "CUDAExecutionProvider", tmp_path / "ops.so", False, VERSION)
    assert not ops.enabled
    tuning.setup_tuning(session, "CUDAExecutionProvider", tmp_path / "ops.so", True, VERSION)
    assert ops.enabled
    ops.measured = results_of("a")
    tuning.save_at_exit(*later[0])
    assert tuning.load(session, FakeOps(), VERSION) is not None


def test_rejected_candidates_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Saving and showing results report a faster candidate that gave wrong results."""
    results = results_of("a")
    results["GroupNorm"]["a"]["rejected"] = "default: wrong results"
    path = save(FakeOps(results=results))
    assert "GroupNorm a: candidates that may be faster were rejected: default: wrong results." in caplog.text
    assert "rejected, though perhaps faster: default: wrong results" in "\n".join(tuning.table(tuning.read(path)))
    caplog.clear()
    save(FakeOps(results=results_of("b")))
    assert caplog.text == ""


def test_show(sd_ort: Cli) -> None:
    path = save(FakeOps(results=results_of("float16_2x64x64_g32")), FakeSession([ROCM]))
    for arguments in (["tune", "--show"], ["tune", "--show", str(path)]):
        out = success(sd_ort, *arguments)
        assert "GPU architecture: gfx942" in out
        assert "1.50x of the default" in out
        assert "ROCMExecutionProvider: 1 results of 1 operators" in out
    code, _, err = sd_ort("tune", "--show", "--height", 64, "--no-guidance", "--batch", 1)
    assert (code, err) == (2, "sd-ort: --show only prints results: leave out --height, --batch, --guidance.\n")


def test_the_cpu_has_nothing_to_tune(small_export: Path, sd_ort: Cli) -> None:
    code, _, err = sd_ort("tune", small_export, "--provider", "cpu")
    assert code == ProviderError.exit_code
    assert "the cpu provider has nothing to tune" in err


def test_a_gpu_without_an_op_library_has_nothing_to_tune(tmp_path: Path) -> None:
    """CUDA's own kernels are not tunable: what there is to tune is in libsd_ort_cuda.so, which is not there."""
    with pytest.raises(ProviderError, match="no op library for cuda"):
        tune.tune(tmp_path, "cuda", library=tmp_path / "libsd_ort_ops.so")


def test_tuned_sizes_are_no_error(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose sizes are in a file has nothing left to measure; one that was never tuned has nothing at all."""
    monkeypatch.setattr(tuning, "gpu_ops", lambda provider, library: FakeOps())
    monkeypatch.setattr(tune, "create_session", lambda *_: FakeSession())
    monkeypatch.setattr(tune, "OrtModel", lambda session: session)
    monkeypatch.setattr(tune, "run_shapes", lambda *_: None)
    lines: list[str] = []

    def run(**options: Any) -> Path:
        return tune.tune(small_export, "cuda", library=small_export / "ops.so", on_progress=lines.append, **options)

    with pytest.raises(InputError, match="has no component unets"):
        run(components=["unets"])
    with pytest.raises(InputError, match="no operator that the cuda provider could tune"):
        run()
    path = tuning.save([], FakeOps(results=results_of("a")), onnxruntime.__version__)
    assert run() == path
    assert lines[-1].startswith("nothing new was measured: these sizes were tuned before")


def test_an_interrupt_saves_what_was_measured(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        ops.measured = results_of("a")
        raise KeyboardInterrupt

    ops, lines = FakeOps(), list[str]()
    monkeypatch.setattr(tuning, "gpu_ops", lambda provider, library: ops)
    monkeypatch.setattr(tune, "create_session", lambda *_: FakeSession())
    monkeypatch.setattr(tune, "OrtModel", lambda session: session)
    monkeypatch.setattr(tune, "run_shapes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(small_export, "cuda", library=small_export / "ops.so", on_progress=lines.append)
    path = tuning.find(tuning.validators_of(ops, onnxruntime.__version__))
    assert path is not None
    assert lines == [f"{path} has what was measured: the same command measures the rest."]


def test_sizes(small_export: Path) -> None:
    """Pixels become latents; guidance doubles the UNet's batch; a text encoder runs once a batch."""
    step = pixels_per_latent(small_export)
    sizes = tune.image_sizes(small_export, [8 * step, 16 * step], [8 * step, 8 * step])
    unet = tune.latent_sizes(small_export, "unet", sizes, (1, 2), guidance=True)
    assert [(s["batch"], s["height"], s["width"]) for s in unet] == [(2, 8, 8), (4, 8, 8), (2, 16, 8), (4, 16, 8)]
    text = tune.latent_sizes(small_export, "text_encoder", sizes, (1, 2), guidance=True)
    assert [s["batch"] for s in text] == [1, 2]
    assert len(tune.image_sizes(small_export, [], [])) == 1
    assert (default_latents({}), default_latents({"sample_size": 96}), default_latents({"sample_size": [32, 48]})) == (
        64, 96, 32,
    )  # fmt: skip
    with pytest.raises(InputError, match="2 heights and 1 widths"):
        tune.image_sizes(small_export, [8, 16], [8])
    with pytest.raises(InputError, match="is no size of an image"):
        tune.image_sizes(small_export, [3], [8])


def test_every_component_runs_at_its_shapes(small_export: Path) -> None:
    """The runs that tuning consists of, on the CPU."""
    from sd_ort.runtime.session import load

    step = pixels_per_latent(small_export)
    lines: list[str] = []
    for name in ("text_encoder", "unet", "vae_decoder"):
        sizes = tune.latent_sizes(small_export, name, [(8 * step, 8 * step)], (1,), guidance=True)
        tune.run_shapes(load(small_export, name), small_export, name, sizes, lines.append)
    assert [line.split(":")[0] for line in lines] == ["text_encoder", "unet", "vae_decoder"]
