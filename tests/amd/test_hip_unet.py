"""Our execution provider for AMD on the simulated GPU: the demo's U-Net, captured and replayed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hip_library import TARGETS, hip_library
from simulation import simulate

from sd_ort.core.metrics import relative_l2_error
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session
from sd_ort.stages import optimize

pytestmark = pytest.mark.usefixtures("tinygrad")
OUTPUT = "out_sample"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's U-Net in float16 for our provider, inputs of one call, and the output in float32."""
    folder = tmp_path_factory.mktemp("demo")
    optimize("demo", folder / "hip", target="hip", dtype="float16", components=["unet"], hoist=False)
    optimize("demo", folder / "cpu", target="cpu", components=["unet"], hoist=False)
    rng = np.random.default_rng(0)
    inputs = {
        "sample": rng.standard_normal((1, 4, 8, 8), np.float32),
        "timestep": np.array([500], np.int64),
        "encoder_hidden_states": rng.standard_normal((1, 77, 128), np.float32),
    }
    expected = OrtModel(create_session(folder / "cpu/unet" / MODEL, options=SessionOptions(library=False)))(**inputs)[
        OUTPUT
    ]
    np.savez(folder / "inputs.npz", **inputs)
    np.save(folder / "expected.npy", expected)
    return folder


@pytest.mark.parametrize(("target", "options"), [("gfx1100", ()), ("gfx942", ("--only-hip",))])
def test_unet(target: str, options: tuple[str, ...], demo: Path) -> None:
    """RDNA with hipBLASLt, CDNA without: the CPU's output within float16, and the same when the graph is replayed."""
    assert target in TARGETS
    library = hip_library().parent / PROVIDER_LIBRARIES["hip"]
    outputs, report = demo / f"{target}.npz", demo / f"{target}.json"
    client = Path(__file__).with_name("hip_unet_client.py")
    command = [
        sys.executable,
        str(client),
        *map(str, (library, demo / "hip/unet" / MODEL, demo / "inputs.npz", outputs)),
    ]
    result = simulate(target, command, "--report", str(report), *options)
    assert result.returncode == 0, result.stderr[-3000:]
    actual = np.load(outputs)
    expected = np.load(demo / "expected.npy")
    assert relative_l2_error(actual["first"], expected) < 2e-3
    np.testing.assert_array_equal(actual["first"], actual["replayed"])
    calls = json.loads(report.read_text())["calls"]
    assert calls["hipGraphInstantiateWithFlags"] == 1
    assert calls["hipGraphLaunch"] == 3  # once when it is captured, and for each call
