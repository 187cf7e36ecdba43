"""The provider that `auto` chooses, on simulated machines: GPUs, wheels, builds and free memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_type import Cli

from sd_ort.core.errors import ProviderError
from sd_ort.optimize import targets
from sd_ort.runtime import provider_choice, providers
from sd_ort.runtime.provider_choice import Gpu, choose_provider, likely_provider, provider_for, resolve_device
from sd_ort.runtime.provider_table import PROVIDERS

H200 = Gpu("cuda", "NVIDIA H200", "sm_90")
MI300 = Gpu("hip", "AMD gfx942", "gfx942")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine by its GPUs, the providers of its wheel, the vendors built, and the problems of its providers."""

    def be(gpus: tuple[Gpu, ...] = (), wheel: str = "cpu", built: str = "", **problems: str) -> None:
        eps = [PROVIDERS["cpu"].ep, PROVIDERS[wheel].ep]
        module = SimpleNamespace(get_available_providers=lambda: eps, __version__="1.31.1")
        library = {f"libsd_ort_ep_{built}.so"}
        monkeypatch.setattr(provider_choice, "import_onnxruntime", lambda: module)
        monkeypatch.setattr(provider_choice, "installed_gpus", lambda: list(gpus))
        monkeypatch.setattr(targets, "installed_gpus", lambda: list(gpus))
        monkeypatch.setattr(provider_choice, "library_path", lambda name: Path(name) if name in library else None)
        monkeypatch.setattr(provider_choice, "provider_problem", lambda name, required: problems.get(name))

    return be


def folder_of(path: Path, target: str | None) -> Path:
    path.mkdir(exist_ok=True)
    options = {"target": target} if target else {}
    text = {"format": 1, "stage": "optimize", "source": {"model": "my/model"}, "options": options}
    (path / "sd_ort.json").write_text(json.dumps(text))
    return path


@pytest.mark.parametrize(
    ("gpus", "wheel", "built", "chosen"),
    [((), "cpu", "", "cpu"), ((H200,), "cuda", "", "cuda"), ((H200,), "cuda", "cuda", "sdcuda"),
     ((H200,), "cpu", "cuda", "sdcuda"), ((MI300,), "rocm", "", "rocm"), ((MI300,), "rocm", "hip", "hip"),
     ((H200,), "cpu", "", "cpu"), ((MI300,), "migraphx", "", "migraphx")],
)  # fmt: skip
def test_the_best_that_is_there(machine: Machine, gpus: tuple[Gpu, ...], wheel: str, built: str, chosen: str) -> None:
    machine(gpus, wheel, built)
    assert choose_provider().provider == chosen
    if gpus:
        expected = provider_choice.target_of(chosen)
        assert chosen == "cpu" or targets.default_target()[0] == expected


def test_a_gpu_without_a_build_names_the_command(machine: Machine) -> None:
    machine((H200,))
    line = choose_provider().line
    assert line == (
        "provider cpu: NVIDIA H200 is not used: no provider for it is installed; `sd-ort build-ops --cuda sm_90` "
        "builds sdcuda, the faster provider (--provider or provider= names another)."
    )
    machine((MI300,), "rocm")
    assert "`sd-ort build-ops --hip gfx942` builds hip" in choose_provider().line
    machine((MI300,), "rocm", "hip")
    assert choose_provider().reason == "the fastest that runs here, on AMD gfx942"


def test_a_gpu_that_cannot_be_used_is_never_passed_over_in_silence(machine: Machine) -> None:
    machine((H200,), "cuda", "cuda", sdcuda="4.1 GB of weights do not fit.", cuda="cannot load libcudnn.so.9.")
    choice = choose_provider(required_bytes=1)
    assert choice.provider == "cpu"
    assert "sdcuda: 4.1 GB of weights do not fit; cuda: cannot load libcudnn.so.9" in choice.reason
    machine((), "cuda", cuda="no GPU is visible.")
    assert choose_provider().reason == "no GPU is visible (cuda: no GPU is visible)"
    machine((), "cuda", "hip", hip="libsd_ort_ep_hip.so has no kernels for gfx90a, only for gfx1100.", cuda="none.")
    assert choose_provider().reason.startswith("the GPU is not used (hip: libsd_ort_ep_hip.so has no kernels")


def test_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream answers for plugins too; a CPU has none."""
    monkeypatch.setattr(provider_choice, "check_provider", lambda name: None)
    monkeypatch.setattr(provider_choice, "library_path", lambda: None)
    stream = SimpleNamespace(free_bytes=lambda: 2 << 30)
    monkeypatch.setattr(provider_choice, "open_stream", lambda name: None if name == "cpu" else stream)
    for name in ("cuda", "sdcuda", "plugin:/lib/libsd_ort_ep_hip.so"):
        assert provider_choice.provider_problem(name, 1 << 30) is None
        problem = provider_choice.provider_problem(name, 3 << 30)
        assert problem == "3.2 GB of weights do not fit into 2.1 GB of free device memory."
    assert provider_choice.provider_problem("cpu", 1 << 60) is None


def test_providers_are_tried_once_for_a_folder(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((H200,), "cuda", "cuda")
    tried: list[str] = []
    monkeypatch.setattr(provider_choice, "provider_problem", lambda name, required: tried.append(name))
    for target, expected in (("cpu", "sdcuda"), ("cuda", "cuda"), ("gpu", "sdcuda")):
        tried.clear()
        provider_for(folder_of(tmp_path / target, target))
        assert tried == [expected]


def test_a_folder_runs_on_its_target(machine: Machine, tmp_path: Path) -> None:
    machine((H200,), "cuda", "cuda")
    chosen = {target: provider_for(folder_of(tmp_path / str(target), target)).provider
              for target in ("cpu", "cuda", "gpu", "hip", "portable", None)}  # fmt: skip
    assert chosen == {"cpu": "cpu", "cuda": "cuda", "gpu": "sdcuda", "hip": "sdcuda", "portable": "cuda", None: "cuda"}
    reason = provider_for(tmp_path / "cpu").reason
    assert "sdcuda runs here: `sd-ort optimize my/model OUT --target gpu --float16` makes one for it" in reason


def test_the_likely_provider_is_known_without_opening_a_device(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((H200,), "cuda", "cuda")
    monkeypatch.setattr(provider_choice, "provider_problem", lambda name, required: pytest.fail(name))
    likely = {target: likely_provider(folder_of(tmp_path / str(target), target)) for target in ("cpu", "cuda", "gpu")}
    assert likely == {"cpu": None, "cuda": None, "gpu": "sdcuda"}
    assert likely_provider(Path("demo")) == likely_provider(tmp_path / "model.safetensors") == "sdcuda"
    (tmp_path / "gpu/sd_ort.json").write_text("{")
    assert likely_provider(tmp_path / "gpu") is None
    machine((MI300,), "rocm", "cuda")  # a library for other GPUs
    assert likely_provider(Path("demo")) is None


def test_a_folder_that_nothing_here_runs(machine: Machine, tmp_path: Path) -> None:
    machine()
    with pytest.raises(ProviderError, match=r"made for target rocm.*`sd-ort optimize my/model OUT --target cpu`"):
        provider_for(folder_of(tmp_path, "rocm"))


def test_a_provider_named_for_another_target_is_answered(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine((H200,), "cuda", "cuda")
    assert provider_for(folder_of(tmp_path, "cuda"), "sdcuda").provider == "sdcuda"
    assert "is made for target cuda, not for provider sdcuda: `sd-ort optimize my/model OUT --target gpu" in caplog.text
    provider_for(folder_of(tmp_path / "raw", None), "sdcuda")
    assert "raw is an export, not made for provider sdcuda: `sd-ort optimize" in caplog.text


def test_the_name_of_a_device_is_enough(machine: Machine) -> None:
    machine((MI300,), "cpu", "hip")
    choice = resolve_device("rocm")
    assert choice.provider == "hip"
    assert "has no rocm provider" in choice.reason
    machine((MI300,), "rocm", "hip")
    assert resolve_device("rocm") == provider_choice.ProviderChoice("rocm")
    machine((H200,), "cpu")
    assert resolve_device("cuda").provider == "cuda"  # opening it says what to install


def test_names_of_the_other_table_are_answered(sd_ort: Cli, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"gpu is a target of .* not a provider: its provider is sdcuda\."):
        providers.provider_named("gpu")
    with pytest.raises(ProviderError, match="every provider runs its graphs"):
        providers.provider_named("portable")
    code, _, error = sd_ort("optimize", "demo", tmp_path / "out", "--target", "sdcuda")
    assert (code, error) == (2, "sd-ort: sdcuda is a provider, not a target: its target is gpu.\n")


def test_gpus_by_the_drivers_files(tmp_path: Path) -> None:
    nvidia = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for path, text in [
        (nvidia, "Model: \t\t NVIDIA H200\nIRQ: 1\n"),
        (nodes / "0/properties", "cpu_cores_count 8\ngfx_target_version 0\n"),
        (nodes / "1/properties", "cpu_cores_count 0\ngfx_target_version 90402\n"),
        (nodes / "2/properties", "cpu_cores_count 0\ngfx_target_version 90010\n"),
    ]:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    gpus = [(gpu.vendor, gpu.name, gpu.architecture) for gpu in provider_choice.installed_gpus(tmp_path)]
    assert gpus == [("cuda", "NVIDIA H200", ""), ("hip", "AMD gfx942", "gfx942"), ("hip", "AMD gfx90a", "gfx90a")]
