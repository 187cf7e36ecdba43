"""onnxruntime-rocm 1.22.2, unchanged: what is optimized for it, its CPU provider, and its ROCm provider on a simulated
GPU whose kernels do nothing."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from simulation import ROOT, SIMULATE

from scripts.amd.rocm_wheel import rocm_wheel
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime import build, rocm_kernels
from sd_ort.runtime.library import HIP_LIBRARY, LIBRARY, library_path

pytestmark = pytest.mark.skipif(sys.platform != "linux" or sys.version_info >= (3, 14), reason="no wheel for these")
HERE = Path(__file__).parent
HOT = ("unet_prompt", "unet_time", "unet", "vae_decoder", "vae_encoder")
# What ONNX Runtime computes on the CPU by its own choice, on shapes that lie there.
SHAPE_ARITHMETIC = {"Shape", "Concat", "Gather", "Slice", "Mul", "Add", "Cast", "Unsqueeze", "Squeeze"}


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The folder into which the wheel is unpacked that the extra `rocm` pins."""
    return rocm_wheel()


@pytest.fixture(scope="session")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The op library, with a GPU half for HIP whose kernels do nothing."""
    folder = tmp_path_factory.mktemp("operators")
    shutil.copy(library_path(LIBRARY) or build.build(cpu=True), folder / LIBRARY)
    source = HERE / "idle_operators.c"
    command = ["gcc", "-shared", "-fPIC", f"-I{ROOT / 'custom_ops'}", str(source), "-o", str(folder / HIP_LIBRARY)]
    subprocess.run(command, check=True)
    return folder / LIBRARY


@pytest.fixture(scope="session")
def under_wheel(wheel: Path) -> Callable[..., str]:
    """Run a Python command under the wheel, `simulated` on a GPU with these options; returns what it prints."""

    def run(*arguments: object, simulated: tuple[str, ...] | None = None) -> str:
        command = [sys.executable, *map(str, arguments)]
        if simulated is not None:
            simulation = [sys.executable, str(SIMULATE), "gfx1100", "--kernels", "skip", *simulated, "--"]
            command = simulation + command
        path = os.pathsep.join(map(str, (wheel, ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))))
        result = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run


@pytest.fixture(scope="session")
def call(under_wheel: Callable[..., str]) -> Callable[..., Any]:
    """Call a function of rocm_wheel_client.py under the wheel; returns its result."""

    def run(function: str, *arguments: object, simulated: tuple[str, ...] | None = None) -> Any:
        printed = under_wheel(HERE / "rocm_wheel_client.py", function, *arguments, simulated=simulated)
        return json.loads(printed.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def for_rocm(under_wheel: Callable[..., str], run_folder: Path) -> Path:
    """The demo model, optimized under the wheel for its default target, once for all workers."""
    folder = run_folder / "rocm-wheel"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            printed = under_wheel("-m", "sd_ort", "optimize", "demo", folder, "--float16")
            assert "target rocm" in printed
            assert "0 of 69 values exceed" in printed  # calibration ran
    return folder


def test_the_table_of_kernels_is_that_of_the_library(wheel: Path) -> None:
    symbol = re.compile(rb"\d+kRocmExecutionProvider_(\w+?)_kOnnxDomain_ver(\d+)(_\d+)?(?:_[a-zA-Z]\w*)?E")
    newest: dict[str, int] = {}
    path = wheel / "onnxruntime/capi/libonnxruntime_providers_rocm.so"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        for name, first, last in set(symbol.findall(library)):
            if not last and not name.startswith(b"Memcpy"):
                newest[name.decode()] = max(int(first), newest.get(name.decode(), 0))
    assert newest == rocm_kernels.NEWEST_KERNEL


def test_what_is_written_has_kernels(for_rocm: Path) -> None:
    allowed = {"Equal"}  # of the text encoder, on the CPU with ArgMax of integers
    for name in ("text_encoder", *HOT):
        model = onnx.load(for_rocm / name / MODEL, load_external_data=False)
        graphs = [(model.opset_import, model.graph.node), *((f.opset_import, f.node) for f in model.functions)]
        for imports, nodes in graphs:
            assert rocm_kernels.standard_opset(imports) == rocm_kernels.NEWEST_OPSET
            for node in nodes:
                if not node.domain:
                    assert onnx.defs.get_schema(node.op_type, rocm_kernels.NEWEST_OPSET, "")
        opset = rocm_kernels.NEWEST_OPSET
        reasons = {
            node.op_type: rocm_kernels.unsupported_reason(node.domain, node.op_type, opset)
            for node in model.graph.node
            if node.op_type not in allowed
        }
        assert not any(reasons.values()), reasons
        assert not reasons.keys() & rocm_kernels.WRONG_ON_RDNA


def test_cpu_provider(
    under_wheel: Callable[..., str], call: Callable[..., Any], operators: Path, tmp_path: Path
) -> None:
    """Function bodies in place of overloads, and kernels of nodes that leave an input out."""
    folder = tmp_path / "portable"
    under_wheel("-m", "sd_ort", "optimize", "demo", folder, "--target", "portable")
    differences = call("differences", folder, operators)
    assert differences.keys() == {"text_encoder", "unet"}
    assert max(differences.values()) < 1e-3
    mean, deviation = call("draw", folder, operators)
    assert 0.05 < mean < 0.95
    assert deviation > 0.02


def test_placement(for_rocm: Path, operators: Path, call: Callable[..., Any]) -> None:
    placed = call("placement", for_rocm, operators, "text_encoder", *HOT, simulated=())
    for name in HOT:
        rocm, cpu = (placed[name].get(f"{ep}ExecutionProvider", {}) for ep in ("ROCM", "CPU"))
        assert not [op for op in rocm if op.startswith("Memcpy")], name
        assert cpu.keys() <= SHAPE_ARITHMETIC, name
        assert sum(rocm.values()) > 25
    copies = [placed["text_encoder"]["ROCMExecutionProvider"].get(f"Memcpy{way}", 0) for way in ("ToHost", "FromHost")]
    assert sum(copies) <= 4
    assert sum(placed["text_encoder"]["CPUExecutionProvider"].values()) <= 5
    assert placed["unet"]["ROCMExecutionProvider"]["MultiHeadAttention"] == 32


def test_captures(for_rocm: Path, operators: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--report", str(report))
    assert call("captures", for_rocm, operators, "unet", simulated=options) == {"unet": [2, 2]}
    assert "hipGraphLaunch" in report.read_text()


@pytest.mark.parametrize(("generation", "captures"), [(64, 4), (2, 7)])
def test_staging_memory_of_a_graph_is_its_own(
    for_rocm: Path, operators: Path, call: Callable[..., Any], generation: int, captures: int
) -> None:
    """Concat and Split copy pointers from pinned memory, which runs of other shapes would write their own to."""
    report = call("staging", for_rocm, operators, str(generation), simulated=())
    assert report["copies"] > 0
    assert report["checks"] > 10
    assert report["unchanged"]
    assert report["captured"]
    assert report["captures"] == captures


def test_workspaces_in_a_capture(for_rocm: Path, operators: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    """The arena of ONNX Runtime may grow during a capture. A capture that fails is counted, and runs uncaptured."""
    report = call("workspaces", for_rocm, operators, tmp_path / "cache", simulated=())
    (failure,) = report.pop("failed")
    assert "BFCArena" in failure  # where the allocation was refused
    assert report.pop("outputs") == [[[4, 4, 8, 8]], [[2, 4, 8, 8]]]
    assert report == {"relaxed": True, "global": False, "earlier graph": True}


def test_graphs_in_other_threads(for_rocm: Path, operators: Path, call: Callable[..., Any]) -> None:
    """A graph captured in one thread is launched from others, once a step, and its session runs nothing else: another
    run of the scheduler's step would count twice."""
    report = call("threads", for_rocm, operators, "4", simulated=())
    images, steps, graphs = 8, 3, 2
    launches = {"first launches": 2 * steps * graphs, "launches": images * steps * graphs}
    assert report == {"captures": 4, **launches}


def test_a_session_is_opened_during_a_capture(for_rocm: Path, operators: Path, call: Callable[..., Any]) -> None:
    """Its copies would end the capture, and would be refused: it waits until the capture has ended."""
    assert call("opening", for_rocm, operators, simulated=()) == {"capture": [], "opening": ["None"]}


def test_lora(for_rocm: Path, operators: Path, call: Callable[..., Any]) -> None:
    report = call("lora", for_rocm, operators, ROOT / "sd_ort/demo/loras/gold.safetensors", simulated=())
    assert report["in place"]
    assert report["same session"]
    assert report["weights"] > 20


def test_shared_memory(call: Callable[..., Any]) -> None:
    assert call("shared_memory", simulated=())


def test_refusals(call: Callable[..., Any], tmp_path: Path) -> None:
    errors = call("refusals", tmp_path, simulated=())
    assert re.match("ProviderError: .*has Softmax, for which onnxruntime-rocm gives wrong values", errors["softmax"])
    assert "sd-ort build-ops --hip" in errors["softmax"]
    assert re.match("ProviderError: .*has LayerNormalization, for which", errors["norm"])
    assert re.match("InputError: .*has ONNX Runtime's MultiHeadAttention.*target rocm", errors["attention"])
    assert re.search(
        r"opset 23, and ONNX Runtime 1\.22\.2 has opsets up to 22: .*--target portable", errors["new opset"]
    )
    assert re.search("opset 21, at which onnxruntime-rocm runs Reshape, Shape, Transpose on the CPU", errors["opset"])


def test_op_library_without_gpu_kernels_is_not_registered(
    for_rocm: Path, operators: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    """Its CPU kernels would take the fused nodes off the GPU; function bodies have norms, which are refused."""
    shutil.copy(operators, tmp_path / LIBRARY)
    message = call("without_gpu_half", for_rocm, tmp_path / LIBRARY, simulated=())
    assert "has LayerNormalization, Softmax" in message
    assert "on this GPU: build the op library: sd-ort build-ops --hip gfx1100" in message  # the folder is for rocm
    (tmp_path / HIP_LIBRARY).write_bytes(b"no library")
    message = call("without_gpu_half", for_rocm, tmp_path / LIBRARY, simulated=())
    assert re.match(rf"ProviderError: .*{HIP_LIBRARY} cannot be loaded", message)


@pytest.mark.parametrize(
    ("devices", "expected"), [(0, "no GPU is visible"), (1, "ok, but its Softmax and LayerNormalization give wrong")]
)
def test_doctor(devices: int, expected: str, under_wheel: Callable[..., str]) -> None:
    printed = under_wheel("-m", "sd_ort", "doctor", simulated=("--devices", str(devices)))
    assert re.search(f"^rocm +{expected}", printed, re.MULTILINE)
