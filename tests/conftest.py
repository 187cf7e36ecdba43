"""Fixtures that several test files share, among them one tiny export for all workers, and the order of the files."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from cli_type import Cli
from small_presets import export_with, mini, smalls

from sd_ort import cli
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.core.cache import cache_folder
from sd_ort.runtime.bound_run import FAILED_CAPTURES
from sd_ort.runtime.build import build
from sd_ort.runtime.library import library_path

# Files that take a minute and more, the longest first: a long one at the end would leave the other worker idle. Before
# them the one that builds the op library, which other files then use.
LONG = (
    "test_custom_ops_cpu.py", "test_wheel.py", "test_custom_ops_compile.py", "test_diffusion_transformers.py",
    "test_export.py", "test_custom_ops_gpu.py", "test_families.py", "test_soak.py", "test_rocm_wheel.py",
    "test_examples.py", "test_optimize.py", "test_pipeline.py", "test_custom_ops_attention.py", "test_hoist_merge.py",
)  # fmt: skip


DOWNLOADS = "compiled-only", "emulated", "hip-tree", "nvidia-headers", "ort-headers", "rocm-headers", "rocm-wheel"


def pytest_configure() -> None:
    """Tests have a cache of their own: the user's may hold builds with GPU halves, and takes no records of tests.

    Downloads and what is compiled for other machines are large, addressed by contents, and linked.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the environment of the first process
    user = cache_folder()
    write_bytecode(user / "tests" / "bytecode")
    os.environ["XDG_CACHE_HOME"] = str(user / "tests")
    own = cache_folder()
    own.mkdir(parents=True, exist_ok=True)
    (own / FAILED_CAPTURES).unlink(missing_ok=True)
    for name in DOWNLOADS:
        if (user / name).is_dir() and not (own / name).exists():
            (own / name).symlink_to(user / name)
    if library_path() is None:
        build(cpu=True)  # seconds with ccache, after scripts/setup


def write_bytecode(folder: Path) -> None:
    """Let this process and its children store bytecode in `folder`, even if PYTHONDONTWRITEBYTECODE is set.

    Python compares bytecode with the time and size of its source. Without it, a process that imports torch and
    diffusers uses 12 s instead of 5, and each worker compiles all tests.
    """
    for earlier in folder.glob(f"{tempfile.gettempdir()}/pytest-of-*".lstrip("/")):
        shutil.rmtree(earlier, ignore_errors=True)  # of modules in folders of earlier runs
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; pytest-xdist hands them out in this order with --no-loadscope-reorder."""
    order = {name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_collection_finish() -> None:
    """Collecting took a tenth of the time: few objects of graphs are in cycles, and what was imported stays."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def idle_threads_sleep() -> Iterator[None]:
    """ONNX Runtime's threads burn time while they wait for work, which graphs this small rarely have for a second."""

    class Options(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", Options)
        yield


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share. Take a lock to make something there."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def shared_exports(run_folder: Path) -> Iterator[None]:
    """Components of presets are exported once a run; see `share_exports`."""
    from shared_exports import share_exports

    from sd_ort.export import exporter

    folder = run_folder / "exports"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "export_component", share_exports(exporter.export_component, folder))
        yield


@pytest.fixture(scope="session")
def small_export(shared_exports: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `sd15-small` pipeline folder with all components, by the faster exporter. Do not change it.

    It draws pictures of the sizes of `sd15-tiny`, which has three times the nodes: its counts are those of
    tests/fusion_passes/test_families.py, from committed graphs.
    """
    return new_export("sd15-small", "torchscript", tmp_path_factory)


@pytest.fixture(scope="session")
def small_fused(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_export` without its VAE encoder, fused for `cpu`. Do not change it."""
    return optimized_small(small_export, tmp_path_factory)


@pytest.fixture(scope="session")
def small_hoisted(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_fused` with a hoisted U-Net. Do not change it."""
    return optimized_small(small_export, tmp_path_factory, hoist=True)


@pytest.fixture(scope="session")
def default_export(shared_exports: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of `sd15-mini` by the default exporter, in a quarter of a minute: for tests of what that one makes."""
    return new_export("sd15-mini", "dynamo", tmp_path_factory)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The diffusers pipeline that `small_export` was exported from."""
    from sd_ort.checkpoints.torch_pipeline import torch_pipeline

    return torch_pipeline("sd15-small", random_weights=True, seed=0)


@pytest.fixture(scope="session")
def controlled(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_export` with a ControlNet. Do not change it."""
    components = ["unet", "controlnet"]
    return export_with(small_export, tmp_path_factory.mktemp("control") / "raw", "sd15-controlnet-small", components)


@pytest.fixture(scope="session")
def demo_folder(run_folder: Path) -> Path:
    """The demo model, optimized for `cpu`. Do not change it."""
    return optimized_demo("demo", run_folder)


@pytest.fixture(scope="session")
def demo_dit_folder(run_folder: Path) -> Path:
    """The demo's diffusion transformer, optimized for `cpu`. Do not change it."""
    return optimized_demo("demo-dit", run_folder)


@pytest.fixture(scope="session", autouse=True)
def small_model_cache() -> None:
    """Each change of the code adds entries to the cache of optimized checkpoints."""
    os.environ.setdefault("SD_ORT_CACHE_GB", "1")


@pytest.fixture(scope="session", autouse=True)
def small_presets() -> None:
    """`sd15-small` and the like, and `sd15-mini`, beside the real presets."""
    PRESETS.update(smalls() | {"sd15-mini": mini(PRESETS["sd15-tiny"])})


def new_export(preset: str, exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a preset into a folder of this process, since calibration puts links to its weights."""
    from sd_ort.export.exporter import export

    out = tmp_path_factory.mktemp(preset) / "raw"
    export(None, out, preset=preset, random_weights=True, exporter=exporter)
    return out


def optimized_small(small_export: Path, tmp_path_factory: pytest.TempPathFactory, *, hoist: bool = False) -> Path:
    """Optimize the components that text to image needs for `cpu`."""
    from sd_ort.stages import optimize

    out = tmp_path_factory.mktemp("optimized") / "cpu"
    optimize(small_export, out, target="cpu", components=["text_encoder", "unet", "vae_decoder"], hoist=hoist)
    return out


def optimized_demo(name: str, run_folder: Path) -> Path:
    """Return the folder that the first worker optimizes for all."""
    from sd_ort.stages import optimize

    out = run_folder / name
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.is_dir():
            optimize(name, out, target="cpu")
    return out


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread: for models this small a second one only waits, for long when the machine is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_copy(small_export: Path, tmp_path: Path) -> Path:
    """A copy of `small_export` without its U-Net, to damage."""
    copy = tmp_path / "copy"
    shutil.copytree(small_export, copy, ignore=shutil.ignore_patterns("unet"))
    return copy


@pytest.fixture
def sd_ort(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `sd-ort ARGS...` as a shell would: (exit code, stdout, stderr)."""

    # No second process for each of a thousand runs: tests/hostile has those that need it.
    monkeypatch.setattr("sd_ort.core.staging.with_watchdog", contextlib.nullcontext)

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sd-ort", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        code = exit_.value.code
        return (code if isinstance(code, int) else int(code is not None)), captured.out, captured.err

    return run
