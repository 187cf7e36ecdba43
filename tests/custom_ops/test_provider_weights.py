"""Weights that are read while ONNX Runtime prepares its session, by the provider's own threads, on the host vendor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.runtime import weight_prefetch
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.ort_values import value_at
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session

ROWS = 768  # the data file then takes more than one piece
X = np.random.default_rng(1).normal(size=(2, ROWS)).astype(np.float32)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.setattr(weight_prefetch, "MIN_FILE", 1)
    random = np.random.default_rng(0)
    shapes = {"product": (ROWS, ROWS), "bias": (ROWS,), "scale": (1,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def saved(path: Path, weights: dict[str, np.ndarray], last: str) -> Path:
    """(x product + bias) * scale, of which `last` makes y."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[rows, {ROWS}] x, bool wanted) => (float[rows, {ROWS}] y) {{
            multiplied = MatMul (x, product)
            sum = Add (multiplied, bias)
            scaled = Mul (sum, scale)
            y = {last}
        }}""")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, path / MODEL, save_as_external_data=True, location=DATA, size_threshold=0)
    return path / MODEL


def test_a_session_takes_what_was_read_ahead(provider: str, tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    """Those that are large enough, in the file's place, where they lie; a captured run replays over them."""
    path = saved(tmp_path, weights, "Identity (scaled)")
    opened = create_session(path, provider)
    assert opened.shared.keys() == {"product", "bias"}
    expected = (X @ weights["product"] + weights["bias"]) * weights["scale"]
    captured = GpuGraphModel(
        create_session(path, provider, SessionOptions(capture=True)), provider_named(provider).device
    )
    for model in (OrtModel(opened), captured, captured):
        np.testing.assert_allclose(model(x=X, wanted=True)["y"], expected, rtol=1e-4, atol=1e-3)
    plain = create_session(path, provider, SessionOptions(provider_options={"memory_limit": str(1 << 30)}))
    assert plain.shared == {}
    np.testing.assert_array_equal(OrtModel(plain)(x=X, wanted=True)["y"], OrtModel(opened)(x=X, wanted=True)["y"])
    opened.shared["bias"].update_inplace(0 * weights["bias"])
    unbiased = X @ weights["product"] * weights["scale"]
    np.testing.assert_allclose(OrtModel(opened)(x=X, wanted=True)["y"], unbiased, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "last",
    [
        "PRelu (scaled, bias)",
        f"""If (wanted) <then_branch = then_graph () => (float[rows, {ROWS}] one) {{ one = PRelu (scaled, bias) }},
                         else_branch = else_graph () => (float[rows, {ROWS}] other) {{ other = Neg (scaled) }}>""",
    ],
    ids=["a node", "a branch"],
)
def test_weights_read_by_the_host_stay_with_onnx_runtime(
    provider: str,
    tmp_path: Path,
    weights: dict[str, np.ndarray],
    last: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The CPU's kernel, the provider has none of PRelu, would read device memory.

    ONNX Runtime's error about the first attempt is not shown."""
    caplog.set_level("INFO", "sd_ort")
    path = saved(tmp_path, weights, last)
    opened = create_session(path, provider)
    assert opened.shared == {}
    assert "reads 'bias' on the host" in caplog.text
    assert capfd.readouterr().err == ""
    scaled = (X @ weights["product"] + weights["bias"]) * weights["scale"]
    expected = np.where(scaled > 0, scaled, weights["bias"] * scaled)
    np.testing.assert_allclose(OrtModel(opened)(x=X, wanted=True)["y"], expected, rtol=1e-4, atol=1e-3)


def test_weights_that_onnx_runtime_does_not_take(
    provider: str,
    tmp_path: Path,
    weights: dict[str, np.ndarray],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of another vendor's device: they would lie there beside the file's."""
    monkeypatch.setattr(weight_prefetch, "value_at", lambda device, *rest: value_at("gpu:4318", *rest))
    caplog.set_level("INFO", "sd_ort")
    opened = create_session(saved(tmp_path, weights, "Identity (scaled)"), provider)
    assert opened.shared == {}
    assert "ONNX Runtime copied weight 'product'" in caplog.text
    expected = (X @ weights["product"] + weights["bias"]) * weights["scale"]
    np.testing.assert_allclose(OrtModel(opened)(x=X, wanted=True)["y"], expected, rtol=1e-4, atol=1e-3)


def test_a_file_that_changes_meanwhile(provider: str, tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    path = saved(tmp_path, weights, "Identity (scaled)")
    data = path.with_name(DATA)
    data.write_bytes(data.read_bytes()[: 4 * ROWS * ROWS])
    with pytest.raises(InputError, match=r"model\.onnx\.data changed while it was read"):
        weight_prefetch.start_prefetch(provider, {}, path)
