"""Which engines a benchmark has: folders given, folders made, torch; what cannot be had is a note."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_folders import fake_folder

from sd_ort.benchmark import engine_selection
from sd_ort.core.errors import InputError


def optimized(raw: Path, name: str, dtype: str, target: str = "portable") -> Path:
    source = {"model": "demo", "random_weights": False, "folder": str(raw)}
    options = {"target": target, "dtype": dtype}
    return fake_folder(raw.parent / name, stage="optimize", source=source, options=options)


def test_raw_comes_first_and_torch_last(raw: Path) -> None:
    half, full = optimized(raw, "half", "float16"), optimized(raw, "full", "float32")
    engines, notes = engine_selection.find_engines([half, full, raw])
    assert [e.label for e in engines] == ["raw ONNX", "fused fp16", "fused fp32", "torch eager"]
    assert [e.engine for e in engines] == ["onnxruntime"] * 3 + ["torch"]
    assert engines[-1].model == "demo"
    assert notes == []


def test_the_export_joins_an_optimized_folder(raw: Path) -> None:
    engines, _ = engine_selection.find_engines([optimized(raw, "full", "float32")], "none")
    assert [(e.label, Path(e.directory).name) for e in engines] == [("raw ONNX", "raw"), ("fused fp32", "full")]


def test_optimized_folder_whose_export_is_gone(raw: Path) -> None:
    folder = optimized(raw, "full", "float32")
    shutil.rmtree(raw)
    engines, _ = engine_selection.find_engines([folder], "none")
    assert [e.label for e in engines] == ["fused fp32"]


def test_equal_labels_become_distinct(raw: Path) -> None:
    folders = [optimized(raw, "a", "float32"), optimized(raw, "b", "float32", "cpu"), optimized(raw, "c", "float32")]
    engines, _ = engine_selection.find_engines([raw, *folders], "none")
    assert [e.label for e in engines[1:]] == ["fused fp32 portable a", "fused fp32 cpu", "fused fp32 portable c"]


def test_random_weights_are_equal_in_torch(tmp_path: Path) -> None:
    source = {"model": "sd15-tiny", "random_weights": True}
    folder = fake_folder(tmp_path / "raw", stage="export", source=source, options={"seed": 3})
    torch = engine_selection.find_engines([folder])[0][-1]
    assert (torch.engine, torch.model, torch.random_weights, torch.weights_seed) == ("torch", "sd15-tiny", True, 3)


def test_missing_torch_model_is_a_note(tmp_path: Path) -> None:
    folder = fake_folder(tmp_path / "raw", stage="export", source={"model": "owner/name"}, options={})
    engines, notes = engine_selection.find_engines([folder])
    assert [e.engine for e in engines] == ["onnxruntime"]
    assert "torch was not measured" in notes[0]
    with pytest.raises(InputError, match="not a diffusers folder"):
        engine_selection.find_engines([folder], str(tmp_path / "nowhere"))


def test_folder_of_another_tool_is_named_by_its_folder(tmp_path: Path) -> None:
    engines, _ = engine_selection.find_engines([fake_folder(tmp_path / "optimum-export")])
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
    engines, _ = engine_selection.find_engines([folder], None, names, "cuda")
    assert [(e.label, e.engine, e.build_spec, e.graph, e.variant) for e in engines] == [
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
        engine_selection.find_engines([folder], None, ["tpu"])


def test_a_folder_without_export_is_ours_itself(raw: Path) -> None:
    """As `optimize MODEL OUT` writes it, which exports nothing."""
    folder = optimized(raw, "full", "float32", "cpu")
    shutil.rmtree(raw)
    engines, _ = engine_selection.find_engines([folder], "none", ["ours"])
    assert [Path(e.directory).name for e in engines] == ["full"]
    with pytest.raises(InputError, match=r"no raw export .*sd-ort export demo RAW, and give RAW"):
        engine_selection.find_engines([folder], "none", ["raw"])
    with pytest.raises(InputError, match="no raw export"):
        engine_selection.find_engines([folder], "none", ["ours"], "cuda")
