"""The GPU library compiled for every architecture: registers, spills, and kernels.json."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from math import ceil, prod
from pathlib import Path

import pytest
from emulation import blas_lt_libraries
from hip_library import TARGETS, hip_library

from custom_ops import GPU_OPERATORS, code_objects
from custom_ops.op import load
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build, headers, library
from sd_ort.runtime.wheels import needed_libraries


@pytest.fixture(scope="module")
def listing() -> dict:
    """kernels.json."""
    folder = hip_library().parent
    read: dict = json.loads((folder / "kernels.json").read_text())
    assert Path(read["folder"]) == folder / "code_objects"
    return read


@pytest.fixture(scope="module")
def kernels(listing: dict) -> list[dict]:
    entries: list[dict] = listing["kernels"]
    return entries


def test_no_kernel_spills(kernels: list[dict]) -> None:
    """Neither vector nor scalar registers, and no scratch memory."""
    spills = ("vgpr_spills", "sgpr_spills", "scratch_bytes")
    assert [entry for entry in kernels if any(entry[name] for name in spills)] == []


def test_every_kernel_is_there_for_every_architecture(kernels: list[dict]) -> None:
    named = {name for folder in GPU_OPERATORS for name in load(folder).launches}
    for arch in TARGETS:
        assert {entry["kernel"] for entry in kernels if entry["arch"] == arch} == named


def test_waves_are_known_to_the_compiler_alone(kernels: list[dict]) -> None:
    """The same blocks run in waves of 64 on CDNA and of 32 on RDNA, and are whole waves on both."""
    for entry in kernels:
        assert entry["wave_size"] == (64 if entry["arch"].startswith("gfx9") else 32)
        assert entry["block"][0] % 64 == 0


def test_lanes_exchange_before_any_is_off(listing: dict) -> None:
    """A lane that is off gives no value: clang 19 moves v_permlanex16 into branches unless it is kept from that."""
    for name, code in disassembled(listing, "gfx11"):
        assert masked_exchanges(code) == [], name


def test_lds_is_read_at_whole_words(listing: dict) -> None:
    """clang 19 cuts some copies of 32 bytes into loads of 16 at odd addresses and single bytes."""
    for name, code in disassembled(listing, "gfx"):
        wide = re.findall(r"ds_(?:load|read)_b(?:32|64|96|128) [^\n]*offset:(\d+)", code)
        assert [offset for offset in wide if int(offset) % 4] == [], name


def disassembled(listing: dict, prefix: str) -> list[tuple[str, str]]:
    """(file, assembly) of the code objects of the architectures that begin with `prefix`."""
    objects = sorted({entry["object"] for entry in listing["kernels"] if entry["arch"].startswith(prefix)})
    return [(name, assembly(Path(listing["folder"]) / name)) for name in objects]


@cache
def assembly(code_object: Path) -> str:
    command = ["llvm-objdump-19", "-d", "--no-show-raw-insn", str(code_object)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def masked_exchanges(code: str) -> list[str]:
    """The v_permlanex16 of some assembly (wave32) that stand where lanes may be off."""
    masks: set[str] = set()
    found, saved = [], ""
    for line in code.splitlines():
        instruction = line.split("//")[0].strip()
        if instruction.endswith(">:") or instruction.startswith("s_branch"):
            masks = set()  # what follows is reached by jumps from elsewhere
        elif match := re.match(r"s_and_saveexec_b32 (\w+),", instruction):
            masks.add(match[1])
        elif match := re.match(r"s_mov_b32 (\w+), exec_lo", instruction):
            saved = match[1]
        elif instruction.startswith("v_cmpx"):
            masks.add(saved)
        elif match := re.match(r"s_(?:or_b32 exec_lo, exec_lo|mov_b32 exec_lo), (\w+)", instruction):
            masks.discard(match[1])
        elif instruction.startswith("v_permlanex16") and masks:
            found.append(instruction)
    return found


def test_masked_exchanges_are_found() -> None:
    exchange = "v_permlanex16_b32 v1, v1, s0, s1"
    branch = "s_and_saveexec_b32 s4, s8\n{}\ns_or_b32 exec_lo, exec_lo, s4\n{}"
    assert masked_exchanges(branch.format(exchange, "")) == [exchange]
    assert masked_exchanges(branch.format("", exchange)) == []


def test_kernels_json_is_enough_to_launch(kernels: list[dict]) -> None:
    """The arguments fill the kernel's segment: none is hidden. The object has the symbol."""
    folder = Path(json.loads((library.SOURCES / "kernels.json").read_text())["folder"])
    for entry in kernels:
        end = 0
        for argument in entry["arguments"]:
            assert end <= argument["offset"] < end + 8
            end = argument["offset"] + argument["size"]
            assert argument["meaning"]
        assert end == entry["kernarg_bytes"]
    path = folder / kernels[0]["object"]
    symbols = subprocess.run(["llvm-readelf-19", "-sW", str(path)], capture_output=True, text=True, check=True).stdout
    wanted = {entry["symbol"] for entry in kernels if entry["object"] == path.name}
    assert all(symbol in symbols for symbol in wanted)


def test_registers_at_start(kernels: list[dict]) -> None:
    """As the ABI of each architecture has it; only gfx90a still gets the address of scratch memory first."""
    for entry in kernels:
        start = entry["registers_at_start"]
        assert start["kernarg_address"] == ("s[4:5]" if entry["arch"] == "gfx90a" else "s[0:1]")
        assert start["block_x"] == {"gfx90a": "s6", "gfx942": "s2"}.get(entry["arch"], start["block_x"])
        assert (start["block_x"] == "ttmp9") == entry["arch"].startswith("gfx12")
        for axis, formula in zip("xyz", entry["grid"], strict=True):
            assert formula == "1" or start[f"block_{axis}"]


def test_every_kernel_is_launched_by_a_case(listing: dict) -> None:
    launched = {launch["symbol"] for call in listing["calls"] for launch in call["launches"]}
    assert [entry["symbol"] for entry in listing["kernels"] if entry["symbol"] not in launched] == []
    assert all(entry["operators"] for entry in listing["kernels"])


def test_formulas_give_what_the_library_launches(listing: dict) -> None:
    """Grid, block, LDS, conditions, alignments, and tensors exactly as large as a call's arguments make them."""
    entries = {entry["symbol"]: entry for entry in listing["kernels"] if entry["arch"] == TARGETS[0]}
    for call in listing["calls"]:
        case = listing["cases"][call["operator"]][call["case"]]
        sizes = tensor_bytes(case, call["dtype"]) | {"workspace": call["workspace_bytes"]}
        ends: dict[str, int] = {}  # of what all launches of the call touch, each perhaps a part of it
        for launch in call["launches"]:
            entry = entries[launch["symbol"]]
            value = formulas(entry, launch)
            assert entry["dtype"] == call["dtype"]
            assert launch["grid"] == [value(formula) for formula in entry["grid"]]
            assert launch["block"] == entry["block"]
            assert launch["dynamic_lds_bytes"] == value(entry["lds_bytes"]["dynamic"])
            assert [condition for condition in entry["requires"] if not value(condition)] == []
            for argument in entry["arguments"]:
                pointer = launch["arguments"][argument["name"]]
                if not argument["type"].endswith("*"):
                    continue
                if pointer is None:
                    assert argument["optional"]
                    continue
                item = {"T": entry["itemsize"], "float": 4, "void": 4}[argument["type"].split()[-1].strip("*")]
                assert pointer[1] % value(argument["alignment"]) == 0
                end = pointer[1] + value(argument["elements"]) * item
                ends[pointer[0]] = max(ends.get(pointer[0], 0), end)
        assert ends == {tensor: sizes[tensor] for tensor in ends}


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_no_cache_is_emptied_and_all_memory_known_to_be_global(listing: dict, arch: str) -> None:
    """What __syncthreads(), and pointers that may be null, would make of the code."""
    for _, text in disassembled(listing, arch):
        alone = (
            "bias",
            "linear",
            "upsample",
            "subpixel",
            "nhwc_conv_kernel",
            "winograd",
        )  # whose threads wait for no others
        assert "s_barrier" in text or any(word in text for word in alone)
        assert sorted(set(re.findall(r"\t(flat_\w+|buffer_gl\w+|global_(?:inv|wb)\w*)", text))) == []


def tensor_bytes(case: dict, dtype: str) -> dict[str, int]:
    wide = {name for name in case["inputs"] if dtype == "float32" or name in case["float32_tensors"]}
    inputs = {name: prod(shape) * (4 if name in wide else 2) for name, shape in case["inputs"].items()}
    return inputs | {name: prod(shape) * (4 if dtype == "float32" else 2) for name, shape in case["outputs"].items()}


def formulas(entry: dict, launch: dict) -> Callable[[str], int]:
    """What evaluates an entry's formulas for a launch; sizes that are no argument are read off the grid."""
    names = entry["template"] | launch["arguments"] | {"itemsize": entry["itemsize"], "ceil": ceil}
    names |= {name: launch["grid"][entry["grid"].index(name)] for name in entry["sizes"]}
    return lambda formula: eval(formula, {}, names)  #


def test_resources_table_is_current(kernels: list[dict]) -> None:
    """results/ops_amd_resources.md is what this compiler makes of these sources (scripts/amd/amd_resources.py)."""
    committed = (Path(__file__).parents[2] / "results/ops_amd_resources.md").read_text()
    assert kernel_names(committed) == kernel_names(code_objects.table(kernels))


def kernel_names(table: str) -> set[str]:
    return {line.split(" |")[0] for line in table.splitlines() if line.startswith("| ") and "<" in line}


def test_the_provider_links_for_amd(listing: dict) -> None:
    """To the HIP runtime alone: no MIOpen, and hipBLASLt is looked for when it runs."""
    provider = Path(listing["folder"]).with_name(library.PROVIDER_LIBRARIES["hip"])
    needed = [name for name in needed_libraries(provider) if not name.startswith(("libc.", "libm.", "libgcc", "ld-"))]
    assert {name.split(".so")[0] for name in needed} <= {"libamdhip64", "libstdc++"}
    assert provider.stat().st_size < 30_000_000


@pytest.mark.parametrize("name", [library.HIP_LIBRARY, library.PROVIDER_LIBRARIES["hip"]])
def test_no_thread_ends_another_ones_capture(listing: dict, name: str) -> None:
    """With HIP, each of these functions invalidates the captures of all threads (common/capture.h)."""
    path = Path(listing["folder"]).with_name(name)
    symbols = subprocess.run(["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True)
    functions = set(re.findall(r" U (hip\w+)", symbols.stdout))
    assert "hipLaunchKernel" in functions
    assert functions & {"hipDeviceSynchronize", "hipMemcpy", "hipMemcpyWithStream", "hipMemset"} == set()


def test_recording_asks_no_blas_library(listing: dict, run_folder: Path, tmp_path: Path) -> None:
    """Where hipBLASLt is installed, it would multiply at the addresses that name the tensors."""
    (blas,) = (path for path in blas_lt_libraries(run_folder) if "hipblaslt" in path.name)
    write = "import sys, pathlib, custom_ops.code_objects as c; c.write(*map(pathlib.Path, sys.argv[1:]), '')"
    command = [sys.executable, "-c", write, str(Path(listing["folder"]).with_name(library.HIP_LIBRARY)), str(tmp_path)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(blas.parent), "PYTHONPATH": str(library.SOURCES.parent)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "kernels.json").read_text())["calls"] == listing["calls"]


def test_libraries_find_rocm_in_its_folders(tmp_path: Path) -> None:
    """By their RUNPATH. The folder is as pip's ROCm has it: libamdhip64 by its version alone."""
    runtime = tmp_path / "core/lib/libamdhip64.so.97"
    runtime.parent.mkdir(parents=True)
    empty, linked = tmp_path / "empty.o", tmp_path / "linked.so"
    subprocess.run(["gcc", "-c", "-x", "c", "/dev/null", "-o", str(empty)], check=True)
    subprocess.run(["gcc", "-shared", "-Wl,-soname,libamdhip64.so.97", "-o", str(runtime), str(empty)], check=True)
    folders = [str(runtime.parent), str(tmp_path / "libraries/lib")]
    compiler = build.find_hip_compiler()
    definitions = {
        "BUILD_ORT_LIBRARY": "OFF",
        "KERNELS_JSON": "OFF",
        "HIP_ARCHS": "gfx1100",
        "HIP_COMPILER": compiler.path,
        "HIP_FLAGS": " ".join(compiler.flags),
        "HIP_LIBRARY_DIR": ";".join(folders),
    }
    configure = ["cmake", "-G", "Ninja", "-S", str(library.SOURCES), "-B", str(tmp_path / "build")]
    subprocess.run([*configure, *(f"-D{name}={value}" for name, value in definitions.items())], check=True)
    asked = ["ninja", "-C", str(tmp_path / "build"), "-t", "commands", library.HIP_LIBRARY]
    commands = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [word for word in commands[-1].partition("&& ")[2].split() if not word.endswith(".o")]
    words[words.index("-o") + 1] = str(linked)
    subprocess.run([*words, "-Wl,--no-as-needed", str(empty)], check=True)
    dynamic = subprocess.run(["readelf", "-d", str(linked)], capture_output=True, text=True, check=True).stdout
    assert f"runpath: [{':'.join(folders)}]" in dynamic
    assert "[libamdhip64.so.97]" in dynamic


@pytest.mark.parametrize("target", ["gfx1030", "gfx1010"])
def test_unknown_targets_do_not_compile(target: str) -> None:
    """To kernels that multiply nothing."""
    compiler = build.find_hip_compiler()
    flags = ["-x", "hip", f"--offload-arch={target}", "--cuda-device-only", "-fsyntax-only", "-D__HIP_PLATFORM_AMD__"]
    source = library.SOURCES / "common/vendors/hip.h"
    command = [compiler.path, *compiler.flags, *flags, f"-I{library.SOURCES}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "no kernel is written for this AMD target" in run.stderr


def test_cuda_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, to machine code of sm_90a, in half the time that fast ones take: kept where no session finds it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "compiled-only"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-Ofc=max" if "-Ofc" in nvcc_options() else "")
    assert build.build(cpu=False, cuda=["sm_90"]).is_file()


def nvcc_options() -> str:
    return subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(library.BuildError, match="cmake is not on PATH"):
        build.build(cuda=["sm_90"])


def test_given_headers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(library.BuildError, match=r"has no onnxruntime_c_api\.h"):
        headers.find_headers(tmp_path)


@pytest.mark.parametrize("words", ["--hip gfx90a gfx942 --cuda sm_90", "--hip gfx90a --cuda sm_90 --hip gfx942"])
def test_command_takes_several_architectures(
    words: str, sd_ort: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict = {}
    monkeypatch.setattr(build, "build", lambda **options: asked.update(options))
    assert sd_ort("build-ops", *words.split(), "--no-cpu")[0] == 0
    assert (asked["hip"], asked["cuda"], asked["cpu"]) == (("gfx90a", "gfx942"), ("sm_90",), False)


def test_command_refuses_other_words(sd_ort: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = sd_ort("build-ops", "gfx90a")
    assert code == 2
    assert "gfx90a" in error
