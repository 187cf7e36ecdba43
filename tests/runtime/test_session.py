"""Sessions: providers are used or refused, broken models are refused, inputs are cast. No GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sd_ort.core.errors import InputError, ProviderError, SdOrtError
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.runtime import ort_wheel, overloads, providers, session

CPU = "CPUExecutionProvider"


def write_model(folder: Path, element: int = TensorProto.FLOAT16, op: str = "Add", domain: str = "") -> Path:
    """<folder>/unet/model.onnx: y = x + w, with the weight w of shape (4,) in external data."""
    path = folder / "unet" / MODEL
    path.parent.mkdir(parents=True)
    weight = numpy_helper.from_array(np.arange(4).astype(helper.tensor_dtype_to_np_dtype(element)), "w")
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], domain=domain)],
        "sum",
        [helper.make_tensor_value_info("x", element, ["batch", 4])],
        [helper.make_tensor_value_info("y", element, ["batch", 4])],
        [weight],
    )
    imports = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location=DATA, size_threshold=0)
    return path


def set_location(path: Path, location: str) -> None:
    """Make the model's weight refer to another data file."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_weights_in_bfloat16_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "unet" / MODEL
    path.parent.mkdir()
    header = '<ir_version: 9, opset_import: ["" : 20]> g (float[4] x) => (float[4] y)'
    model = onnx.parser.parse_model(f"{header} {{ c = Cast <to = 1> (w)  y = Add (x, c) }}")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(4, ml_dtypes.bfloat16), "w"))
    onnx.save(model, path, save_as_external_data=True, location=DATA, size_threshold=0)
    weights = {"w": np.arange(4).astype(ml_dtypes.bfloat16)}
    replaced = session.OrtModel(session.create_session(path, override=session.ModelOverride(weights=weights)))
    assert replaced(x=np.ones(4, np.float32))["y"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("library", [True, False])
def test_shared_weights_are_multiplied_where_they_are(tmp_path: Path, library: bool) -> None:
    """The op library reads them when it runs. ONNX Runtime packs them when it opens the session."""
    path = tmp_path / "unet" / MODEL
    path.parent.mkdir()
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 20, "sd_ort" : 1]>
        g (float[N, 2, 40] x) => (float[N, 2, 48] y, float[N, 2, 48] z)
        { y = sd_ort.LinearAdd (x, w)  z = MatMul (x, v) }
        <domain: "sd_ort", opset_import: ["" : 20]> LinearAdd (x, w) => (y) { y = MatMul (x, w) }"""
    )
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((40, 48), np.float32) for name in "wv"}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, path, save_as_external_data=True, location=DATA, size_threshold=0)
    override = session.ModelOverride(weights, shared=["w", "v"])
    options = session.SessionOptions(library=library)
    opened = session.OrtModel(session.create_session(path, options=options, override=override))
    x = rng.standard_normal((3, 2, 40), np.float32)
    products = {"y": x @ weights["w"], "z": x @ weights["v"]}
    for scale in (1, 2):  # sums of 40 products of about 1: float32 rounds each to 6e-8
        weights["w"] *= scale
        weights["v"] *= scale
        results = opened(x=x)
        np.testing.assert_allclose(results["y"], products["y"] * (scale if library else 1), rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(results["z"], products["z"], rtol=1e-5, atol=2e-5)


def test_floats_are_cast_to_the_declared_dtype(model: Path) -> None:
    loaded = session.load(model.parents[1], "unet")
    result = loaded(x=np.ones((2, 4), np.float64))["y"]
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, np.float16([[1, 2, 3, 4]] * 2))


def test_wrong_input_names_are_refused(model: Path) -> None:
    with pytest.raises(InputError, match="takes x, not z"):
        session.load(model.parents[1], "unet")(z=np.ones((1, 4)))


def test_failure_while_running_is_one_line(model: Path) -> None:
    with pytest.raises(SdOrtError, match=r"failed: .*\(on x \[1, 5\]") as caught:
        session.load(model.parents[1], "unet")(x=np.ones((1, 5)))
    assert "\n" not in str(caught.value)


def test_other_element_types_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, TensorProto.DOUBLE)
    with pytest.raises(InputError, match=r"tensor\(double\)"):
        session.load(tmp_path, "unet")(x=np.ones((1, 4)))


def test_threads_reach_the_session(model: Path) -> None:
    opened = session.create_session(model, options=session.SessionOptions(threads=1))
    assert opened.get_session_options().intra_op_num_threads == 1


def test_profile_is_written(model: Path, tmp_path: Path) -> None:
    opened = session.create_session(model, options=session.SessionOptions(profile=tmp_path / "profile"))
    opened.run(None, {"x": np.ones((1, 4), np.float16)})
    assert Path(opened.end_profiling()).stat().st_size > 0


# --- Broken models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 10, 60])
def test_truncated_model(model: Path, keep: int) -> None:
    model.write_bytes(model.read_bytes()[:keep])
    with pytest.raises(InputError, match="truncated"):
        session.create_session(model)


def test_missing_component(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing"):
        session.create_session(tmp_path / "unet" / MODEL)


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected <folder>/<component>/model\.onnx"):
        session.create_session(tmp_path / "other.bin")


def test_external_data_missing(model: Path) -> None:
    (model.parent / DATA).unlink()
    with pytest.raises(InputError, match=r"model\.onnx\.data is missing"):
        session.create_session(model)


def test_external_data_truncated(model: Path) -> None:
    data = model.parent / DATA
    data.write_bytes(data.read_bytes()[:3])
    with pytest.raises(InputError, match="truncated"):
        session.create_session(model)


@pytest.mark.parametrize("location", ["../secret.data", "/etc/passwd", "..", "sub/../../secret.data"])
def test_external_data_outside_the_folder(model: Path, location: str) -> None:
    shutil.copy(model.parent / DATA, model.parents[1] / "secret.data")
    set_location(model, location)
    with pytest.raises(InputError, match="outside its folder"):
        session.create_session(model)


def test_external_data_through_a_link(model: Path, tmp_path: Path) -> None:
    data = model.parent / DATA
    data.rename(tmp_path / "elsewhere.data")
    data.symlink_to(tmp_path / "elsewhere.data")
    with pytest.raises(InputError, match="outside its folder"):
        session.create_session(model)


def test_unknown_operator_is_one_line(tmp_path: Path) -> None:
    path = write_model(tmp_path, op="NoSuchOp", domain="nowhere")
    with pytest.raises(InputError, match="ONNX Runtime rejects") as caught:
        session.create_session(path)
    assert "\n" not in str(caught.value)
    assert "optimized for" not in str(caught.value)
    (tmp_path / "sd_ort.json").write_text('{"format": 1, "options": {"target": "cuda"}}')
    with pytest.raises(InputError, match="It was optimized for target cuda: optimize it for cpu"):
        session.create_session(path)


def test_onnxruntime_reports_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in ((None, "1"), ("0", "0")):  # who asks for it has it
        monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
        if value:
            monkeypatch.setenv("ORT_DISABLE_TELEMETRY", value)
        ort_wheel.import_onnxruntime.cache_clear()
        ort_wheel.import_onnxruntime()
        assert os.environ["ORT_DISABLE_TELEMETRY"] == expected


def test_overloads_become_functions_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an ONNX Runtime that takes overloads for one another: before 1.27."""
    imports = [helper.make_opsetid("", 20)]
    twice = helper.make_function("own", "F", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], imports)
    negative = helper.make_function(
        "own", "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], imports, overload="negative"
    )
    branch = helper.make_graph(
        [helper.make_node("F", ["x"], ["z"], domain="own", overload="negative")], "branch",
        [], [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2])],
    )  # fmt: skip
    nodes = [
        helper.make_node("F", ["x"], ["y"], domain="own"),
        helper.make_node("If", ["yes"], ["w"], then_branch=branch, else_branch=branch),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xyw"]
    yes = helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [yes])
    opsets = [*imports, helper.make_opsetid("own", 1)]
    path = tmp_path / "component" / "model.onnx"
    path.parent.mkdir()
    model = helper.make_model(graph, functions=[twice, negative], opset_imports=opsets, ir_version=10)
    path.write_bytes(model.SerializeToString())
    renamed = onnx.ModelProto.FromString(overloads.without_overloads(path) or b"")
    assert [(each.name, each.overload) for each in renamed.functions] == [("F", ""), ("F_negative", "")]
    assert overloads.without_overloads(renamed.SerializeToString()) is None
    opened: list[Any] = []
    own = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *a, **k: opened.append(a[0]) or own(*a, **k))
    for version, source in (("1.27.0", str(path)), ("1.26.0", renamed.SerializeToString())):
        monkeypatch.setattr(onnxruntime, "__version__", version)
        run = session.create_session(path, options=session.SessionOptions(library=False)).run(
            None, {"x": np.ones(2, np.float32)}
        )
        assert opened[-1] == source
        np.testing.assert_array_equal(run, [[2, 2], [-1, -1]])
        session.check_opens(path)
        assert opened[-1] == source


# --- Providers ------------------------------------------------------------------------------------------------------


def test_unknown_provider() -> None:
    with pytest.raises(ProviderError, match="choose auto or one of cpu, cuda, rocm, migraphx, hip, sdcuda"):
        providers.check_provider("tpu")


@pytest.mark.parametrize("name", ["cuda", "rocm", "migraphx"])
def test_provider_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(ProviderError, match=rf"pip install 'sd-ort\[{name}\]'"):
        providers.check_provider(name)


def pretend(monkeypatch: pytest.MonkeyPatch, needed: list[str]) -> None:
    """An onnxruntime wheel that claims to have ROCm, whose library needs `needed`."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["ROCMExecutionProvider", CPU])
    monkeypatch.setattr(providers, "needed_libraries", lambda path: needed)
    monkeypatch.setattr(providers, "search_folders", lambda path: [])
    monkeypatch.setattr(Path, "is_file", lambda self, old=Path.is_file: "providers_rocm" in self.name or old(self))


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["libc.so.6", "libMIOpen-absent.so.1", "libhip-absent.so.7", "libonnxruntime_providers.so"])
    with pytest.raises(ProviderError, match=r"cannot load libMIOpen-absent\.so\.1, libhip-absent\.so\.7: install ROCm"):
        providers.check_provider("rocm")


def test_dropped_provider_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [])
    with pytest.raises(ProviderError, match="dropped the rocm provider"), pytest.warns(UserWarning, match="ROCM"):
        session.create_session(model, "rocm")  # this ONNX Runtime has no ROCm and goes on with the CPU alone


@pytest.mark.filterwarnings("ignore:Specified provider")  # ONNX Runtime's own
def test_dropped_provider_is_a_warning_when_allowed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, [])
    providers.warnings_logged.clear()
    for _ in range(2):
        opened = session.create_session(
            model, "rocm", session.SessionOptions(allow_fallback=True, library=False)
        )  # no word on the op library
        assert opened.get_providers() == [CPU]
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "ONNX Runtime dropped the rocm provider and would run on the CPU"
    ]


def test_two_wheels_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").touch()
    for name, version in (("onnxruntime", "1.31.1"), ("onnxruntime_rocm", "1.22.2")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.syspath_prepend(tmp_path)
    assert ort_wheel.installed_wheels() == {"onnxruntime": "1.31.1", "onnxruntime-rocm": "1.22.2"}
    ort_wheel.import_onnxruntime.cache_clear()
    with pytest.raises(ProviderError, match="pip uninstall -y onnxruntime onnxruntime-rocm"):
        ort_wheel.import_onnxruntime()


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ort_wheel.import_onnxruntime.cache_clear()
    with pytest.raises(ProviderError, match=r"pip install 'sd-ort\[cpu\]'"):
        ort_wheel.import_onnxruntime()


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_needed_libraries_are_read_from_the_library() -> None:
    library = next(Path(onnxruntime.__file__).parent.glob("capi/*pybind11_state*.so"))
    assert "libc.so.6" in ort_wheel.needed_libraries(library)
    assert ort_wheel.needed_libraries(Path(__file__)) == []


def test_broken_op_library(model: Path, tmp_path: Path) -> None:
    library = tmp_path / "libsd_ort_ops.so"
    library.write_bytes(os.urandom(64))
    with pytest.raises(ProviderError, match="cannot be loaded"):
        session.create_session(model, options=session.SessionOptions(library=library))


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_libraries_are_found_in_the_search_path_of_the_one_that_needs_them(tmp_path: Path) -> None:
    """As the loader finds those of onnxruntime-rocm in /opt/rocm/lib, which no other program looks at."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "empty.c").touch()
    compile_ = ["gcc", "-shared", "-Wl,--no-as-needed", tmp_path / "empty.c"]
    name = f"libsd_ort_needed_{os.getpid()}.so.7"
    subprocess.run([*compile_, f"-Wl,-soname,{name}", "-o", tmp_path / "inner" / name], check=True)
    outer = tmp_path / "libouter.so"
    run_path = "-Wl,-rpath,$ORIGIN/inner:/nowhere"
    for kind in ("--enable-new-dtags", "--disable-new-dtags"):
        subprocess.run([*compile_, tmp_path / "inner" / name, run_path, f"-Wl,{kind}", "-o", outer], check=True)
        assert ort_wheel.search_folders(outer) == [tmp_path / "inner", Path("/nowhere")]
    assert name in ort_wheel.needed_libraries(outer)
    assert not ort_wheel.can_load(name)
    assert ort_wheel.can_load(name, ort_wheel.search_folders(outer))
    assert ort_wheel.search_folders(Path(__file__)) == []


def test_more_threads_than_cores_do_not_spin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 that spin take minutes for an image of seconds."""
    monkeypatch.setattr(onnxruntime, "SessionOptions", onnxruntime.capi._pybind_state.SessionOptions)  # not conftest's
    key = "session.intra_op.allow_spinning"
    many, one = (
        session.create_session(model, "cpu", session.SessionOptions(threads=threads)).get_session_options()
        for threads in ((os.cpu_count() or 1) + 1, 1)
    )
    assert many.get_session_config_entry(key) == "0"
    with pytest.raises(RuntimeError, match=key):
        one.get_session_config_entry(key)


@pytest.mark.parametrize(
    ("architecture", "warns", "multiplies"),
    [
        ("gfx1100", True, False),
        ("gfx942", False, True),
        ("gfx942", False, False),
        ("sm_86", True, False),
        ("sm_90", False, True),
    ],
)
def test_a_float8_folder_on_a_gpu_without_float8_is_reported(
    architecture: str,
    warns: bool,
    multiplies: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """QuantizedLinear's generic kernel runs there. A library for gfx9-4-generic has none for float8 of its own."""

    class Library:
        def __init__(self, path: Path) -> None:
            self.c = SimpleNamespace(sd_ort_gpu_arch=architecture.encode, sd_ort_multiplies_float8=lambda: multiplies)

    monkeypatch.setattr(session, "GpuLibrary", Library)
    monkeypatch.setattr(session, "plugin_library", lambda provider: tmp_path)
    options: dict[str, Any] = {"eight_bits": "float8", "target": "hip"}
    monkeypatch.setattr(session, "manifest_options", lambda folder: options)
    monkeypatch.setattr(providers, "warnings_logged", set())
    session.warn_of_missing_units(tmp_path / "unet" / MODEL, "hip")
    assert ("has no matrix units for float8" in caplog.text) == warns
    assert "without --convolutions" not in caplog.text
    options |= {"convolutions": True}
    session.warn_of_missing_units(tmp_path / "unet" / MODEL, "hip")
    assert ("without --convolutions" in caplog.text) == (not warns and not multiplies)
