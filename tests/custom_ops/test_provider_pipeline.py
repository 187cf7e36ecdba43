"""Our execution provider on the host vendor, as the package uses it: tuning files, weights in place, a pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from sd_ort import StableDiffusionPipeline
from sd_ort.core.errors import ProviderError
from sd_ort.core.folder import MODEL, read_manifest
from sd_ort.runtime import provider_records, providers, tuning
from sd_ort.runtime.captured import UNCAPTURED, GraphModel
from sd_ort.runtime.held import HeldWeights
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import create_session


def test_its_tuning_file_is_its_own(provider: str, tmp_path: Path) -> None:
    """The op library's GPU half is of the same build, and has other candidates: results of one mean nothing to it."""
    own = Path(provider.removeprefix("plugin:"))
    other = shutil.copy(own, tmp_path / "libsd_ort_cuda.so")
    files = [tuning.path_for(tuning.validators_of(tuning.GpuOps(path), "1.31")) for path in (own, Path(other))]
    assert files[0] != files[1]


def test_held_weights_are_taken_where_they_lie(provider: str) -> None:
    """A session refuses a weight that owns its memory on a device, and takes its view, which sees what is written."""
    ones = np.ones((8, 8), np.float32)
    held = HeldWeights({"weight": ones}, provider_named(provider).device)
    settings = ort.SessionOptions()
    with pytest.raises(RuntimeError, match="owned by the user"):
        settings.add_initializer("weight", held.values["weight"])
    settings.add_initializer("weight", held.shared["weight"])
    held.write("weight", 3 * ones)
    assert held.shared["weight"].data_ptr() == held.values["weight"].data_ptr()
    np.testing.assert_array_equal(held.values["weight"].numpy(), 3 * ones)


@pytest.fixture
def by_name(provider: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`sdcuda`, whose devices are the host's here."""
    monkeypatch.setitem(provider_records.PROVIDERS, "sdcuda", provider_records.OURS["SdOrtHost"])
    return "sdcuda"


def test_a_whole_pipeline_by_the_plain_call(
    by_name: str,
    small_export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sd_ort: Callable[..., tuple[int, str, str]],
) -> None:
    """Captured and queued, nothing warned of, the CPU's picture; what was tuned is kept and found again."""
    monkeypatch.setenv("SD_ORT_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuning, "Finalize", lambda *_, **__: None)  # at the process's end the variable is gone
    assert sd_ort("optimize", small_export, tmp_path / "ours", "--target", "gpu", "--hoist")[0] == 0
    assert read_manifest(tmp_path / "ours")["components"]["unet"]["counts"]["LinearSplitGelu"] == 4
    size = {"height": 64, "width": 64}
    arguments = {**size, "num_inference_steps": 3, "generator": 0, "progress": False}
    expected = StableDiffusionPipeline.from_pretrained(small_export)("a cat", **arguments).images[0]
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "ours", by_name)
    for _ in range(2):
        image = pipeline("a cat", **arguments).images[0]
        assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).max() <= 1
    assert isinstance(pipeline.unet, GraphModel)
    (buffers,) = pipeline.loop.kept.values()
    assert pipeline.models.stream is not None
    assert buffers.steps[1].between.number != UNCAPTURED
    assert [record for record in caplog.records if record.levelname == "WARNING" and record.name == "sd_ort"] == []

    code, out, err = sd_ort(
        "tune", tmp_path / "ours", "--provider", by_name, "--component", "vae_decoder", "--height", 64
    )
    assert code == 0, err
    found = tuning.read(Path(out.splitlines()[-1]))["operators"]
    assert {"NhwcConv", "SkipGroupNorm"} <= found.keys()  # every norm of it adds a bias first
    caplog.set_level("INFO", "sd_ort")
    create_session(tmp_path / "ours" / "vae_decoder" / MODEL, by_name)
    assert "tuning results of" in caplog.text


def test_a_provider_that_is_not_built(
    monkeypatch: pytest.MonkeyPatch, sd_ort: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setitem(PROVIDER_LIBRARIES, "hip", "no_such.so")
    with pytest.raises(ProviderError, match=r"the hip provider is not built .* sd-ort build-ops --hip gfx1100"):
        providers.check_provider("hip")
    assert json.loads(sd_ort("doctor", "--json")[1])["providers"]["hip"]["ok"] is False
