"""The GPU library compiled for every architecture: registers, spills, and kernels.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from custom_ops import OPERATORS, code_objects
from custom_ops.op import load
from sd_ort import ops

ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")


@pytest.fixture(scope="module")
def kernels() -> list[dict]:
    library = ops.build(cpu=False, hip=ARCHS)
    listing = json.loads((library.parent / "kernels.json").read_text())
    assert Path(listing["folder"]) == library.parent / "code_objects"
    entries: list[dict] = listing["kernels"]
    return entries


def test_no_kernel_spills(kernels: list[dict]) -> None:
    """Neither vector nor scalar registers, and no scratch memory."""
    spills = ("vgpr_spills", "sgpr_spills", "scratch_bytes")
    assert [entry for entry in kernels if any(entry[name] for name in spills)] == []


def test_every_kernel_is_there_for_every_architecture(kernels: list[dict]) -> None:
    named = {name for folder in OPERATORS for name in load(folder).launches}
    for arch in ARCHS:
        assert {entry["kernel"] for entry in kernels if entry["arch"] == arch} == named


def test_waves_are_known_to_the_compiler_alone(kernels: list[dict]) -> None:
    """The same blocks run in waves of 64 on CDNA and of 32 on RDNA, and are whole waves on both."""
    for entry in kernels:
        assert entry["wave_size"] == (64 if entry["arch"].startswith("gfx9") else 32)
        assert entry["block"][0] % 64 == 0


def test_kernels_json_is_enough_to_launch(kernels: list[dict]) -> None:
    """Arguments lie behind one another, fit the kernel's argument segment, and the object has the symbol."""
    folder = Path(json.loads((ops.SOURCES / "kernels.json").read_text())["folder"])
    for entry in kernels:
        end = 0
        for argument in entry["arguments"]:
            assert argument["offset"] >= end
            end = argument["offset"] + argument["size"]
        assert end <= entry["kernarg_bytes"]
        assert len(entry["grid"]) == 3
    path = folder / kernels[0]["object"]
    symbols = subprocess.run(["llvm-readelf-19", "-sW", str(path)], capture_output=True, text=True, check=True).stdout
    wanted = {entry["symbol"] for entry in kernels if entry["object"] == path.name}
    assert all(symbol in symbols for symbol in wanted)


def test_resources_table_is_current(kernels: list[dict]) -> None:
    """results/ops_amd_resources.md is what this compiler makes of these sources; scripts/amd_resources.py writes it."""
    committed = (Path(__file__).parent.parent / "results/ops_amd_resources.md").read_text()
    assert kernel_names(committed) == kernel_names(code_objects.table(kernels))


def kernel_names(table: str) -> set[str]:
    return {line.split(" |")[0] for line in table.splitlines() if line.startswith("| ") and "<" in line}


def test_cuda_compiles() -> None:
    library = ops.build(cpu=False, cuda=["sm_90"])
    assert library.is_file()


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ops.BuildError, match="cmake is not on PATH"):
        ops.build(cuda=["sm_90"])


def test_given_headers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ops.BuildError, match=r"has no onnxruntime_c_api\.h"):
        ops.find_headers(tmp_path)
