"""The AMD code objects of a built libsd_ort_hip.so: taken out, described kernel by kernel, ready to be run alone.

    python -m custom_ops.code_objects build/libsd_ort_hip.so build <library's hash>

writes build/code_objects/*.co and build/kernels.json, and a copy of the latter as custom_ops/kernels.json; CMake calls
it. `kernels.json` lists every kernel instance of every architecture: the symbol in its code object, the arguments in
order with types and offsets, the block, the grid's formula, the LDS bytes and the registers. What the compiler knows
comes from the object's metadata (AMDGPU code object v5, "AMDGPU Backend User Guide" of LLVM); names of arguments and
the grid's formula come from the operator's LAUNCHES, and both must agree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from custom_ops import OPERATORS
from custom_ops.op import Launch, load

COPY = Path(__file__).resolve().parent / "kernels.json"

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"

# C type of an argument -> bytes; pointers are 8.
_SIZES = {"int32": 4, "uint32": 4, "int64": 8, "float": 4}


@dataclass(frozen=True)
class _Registers:
    """What a SIMD of an architecture has: vector registers a lane, in allocation units of `unit`, waves at most."""

    total: int
    unit: int
    waves: int


# LLVM, AMDGPUBaseInfo: getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU; waves of 64 on gfx9, of 32 on the rest.
_REGISTERS = {"gfx90a": _Registers(512, 8, 8), "gfx94": _Registers(512, 8, 8), "gfx11": _Registers(1536, 24, 16)}
_REGISTERS["gfx12"] = _REGISTERS["gfx11"]


def write(library: Path, folder: Path, build_hash: str) -> None:
    """Writes folder/code_objects/*.co, folder/kernels.json and its copy. Raises what `describe` raises."""
    objects = folder / "code_objects"
    objects.mkdir(exist_ok=True)
    for old in objects.glob("*.co"):
        old.unlink()
    listing = {"library": build_hash, "folder": str(objects.resolve()), "kernels": describe(extract(library, objects))}
    (folder / "kernels.json").write_text(json.dumps(listing, indent=1) + "\n")
    publish(folder)


def publish(folder: Path) -> None:
    """Copies folder/kernels.json to custom_ops/kernels.json, where that can be written (not in an installed wheel)."""
    if os.access(COPY.parent, os.W_OK):
        shutil.copyfile(folder / "kernels.json", COPY)


def extract(library: Path, to: Path) -> list[Path]:
    """Writes every code object that has kernels as <architecture>_<n>.co; the paths.

    The section .hip_fatbin holds a bundle a source file: magic, count, then (offset, size, triple's length, triple).
    """
    data = library.read_bytes()
    written = []
    start, bundles = data.find(_MAGIC), 0
    while start >= 0:
        (count,) = struct.unpack_from("<Q", data, start + len(_MAGIC))
        position = start + len(_MAGIC) + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, position)
            triple = data[position + 24 : position + 24 + length].decode()
            position += 24 + length
            if triple.startswith("hip") and size:
                path = to / f"{triple.rsplit('-', 1)[1]}_{bundles}.co"
                path.write_bytes(data[start + offset : start + offset + size])
                written.append(path)
        bundles += 1
        start = data.find(_MAGIC, start + len(_MAGIC))
    return written


def describe(objects: list[Path]) -> list[dict]:
    """The entries of kernels.json.

    Raises FileNotFoundError without LLVM's tools, ValueError when an object and the operators' LAUNCHES disagree.
    """
    launches = {name: launch for folder in OPERATORS for name, launch in load(folder).launches.items()}
    entries = []
    for path in objects:
        kernels = _metadata(path)
        names = _demangled([metadata["name"] for metadata in kernels]) if kernels else []
        for metadata, (name, arguments) in zip(kernels, names, strict=True):
            if name not in launches:
                raise ValueError(f"{path}: kernel {name} is in no operator's LAUNCHES")
            entries.append(_entry(path, metadata, name, arguments, launches[name]))
    return entries


def table(entries: list[dict]) -> str:
    """Markdown: registers, LDS, spills and occupancy; a row a kernel instance, a column an architecture."""
    archs = sorted({entry["arch"] for entry in entries})
    rows: dict[str, dict[str, str]] = {}
    for e in entries:
        spills = e["vgpr_spills"] + e["sgpr_spills"]
        cell = f"{e['vgprs']} / {e['sgprs']} / {e['lds_bytes']['static']} / {spills} / {e['occupancy']}"
        template = ", ".join(str(value) for value in e["template"].values())
        rows.setdefault(f"{e['kernel']}<{template}>", {})[e["arch"]] = cell
    lines = [
        "# Kernels of the AMD code objects",
        "",
        "A cell: VGPRs (CDNA: with AGPRs) / SGPRs / static LDS bytes / registers spilled, of both kinds / waves a SIMD",
        "(of 8 on CDNA, 16 on RDNA).",
        "",
        f"| kernel | {' | '.join(archs)} |",
        "|---|" + "---|" * len(archs),
    ]
    lines += [
        f"| {kernel} | {' | '.join(cells.get(arch, '-') for arch in archs)} |" for kernel, cells in sorted(rows.items())
    ]
    return "\n".join(lines) + "\n"


def _tool(name: str) -> str:
    for candidate in (f"{name}-19", name, f"/opt/rocm/llvm/bin/{name}"):
        if path := shutil.which(candidate):
            return path
    raise FileNotFoundError(f"{name} is not here: install llvm-19, or ROCm")


def _metadata(path: Path) -> list[dict]:
    """The kernels of a code object's note, as llvm-readelf prints it (YAML of two levels)."""
    notes = subprocess.run(
        [_tool("llvm-readelf"), "--notes", str(path)], capture_output=True, text=True, check=True
    ).stdout
    kernels: list[dict] = []
    for line in notes.splitlines():
        if re.match(r"  - \.", line):
            kernels.append({"args": []})
            line = "    " + line[4:]
        if not kernels:
            continue
        if line.startswith("amdhsa.") or re.match(r"\S", line):
            if line.startswith("amdhsa.target"):
                break
            continue
        if match := re.match(r"      - \.(\w+): +(.+)", line):
            kernels[-1]["args"].append({match[1]: match[2]})
        elif match := re.match(r"        \.(\w+): +(.+)", line):
            kernels[-1]["args"][-1][match[1]] = match[2]
        elif match := re.match(r"    \.(\w+): +(.+)", line):
            kernels[-1][match[1]] = match[2]
    return kernels


def _demangled(symbols: list[str]) -> list[tuple[str, list[str]]]:
    """Name without namespace, and template arguments, of each symbol."""
    command = [_tool("llvm-cxxfilt"), *symbols]
    texts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = []
    for text in texts:
        match = re.match(r"void sd_ort::(\w+)<(.*?)>\(", text)
        if match is None:
            raise ValueError(f"{text}: a kernel is a template in namespace sd_ort")
        names.append((match[1], [argument.strip().replace("sd_ort::", "") for argument in match[2].split(",")]))
    return names


def _entry(path: Path, metadata: dict, name: str, template: list[str], launch: Launch) -> dict:
    arch = path.name.split("_")[0]
    explicit = [argument for argument in metadata["args"] if not argument["value_kind"].startswith("hidden_")]
    if len(explicit) != len(launch.arguments) or len(template) != len(launch.template):
        raise ValueError(f"{path}: {name} takes {len(explicit)} arguments, its Launch names {len(launch.arguments)}")
    values = dict(zip(launch.template, template, strict=True))
    arguments = []
    for argument, (label, kind) in zip(explicit, launch.arguments, strict=True):
        pointer = kind.endswith("*")
        if int(argument["size"]) != (8 if pointer else _SIZES[kind]) or pointer != (
            argument["value_kind"] == "global_buffer"
        ):
            raise ValueError(f"{path}: argument {label} of {name} is no {kind}")
        arguments.append(
            {"name": label, "type": kind, "offset": int(argument["offset"]), "size": int(argument["size"])}
        )
    block = eval(launch.block, {}, {key: int(value) for key, value in values.items() if value.isdigit()})
    if block != int(metadata["max_flat_workgroup_size"]):
        raise ValueError(f"{path}: {name} is compiled for {metadata['max_flat_workgroup_size']} threads, not {block}")
    return {
        "symbol": metadata["name"],
        "kernel": name,
        "arch": arch,
        "object": path.name,
        "template": values,
        "arguments": arguments,
        "kernarg_bytes": int(metadata["kernarg_segment_size"]),
        "block": [block, 1, 1],
        "grid": list(launch.grid),
        "lds_bytes": {"static": int(metadata["group_segment_fixed_size"]), "dynamic": launch.lds_bytes},
        "wave_size": int(metadata["wavefront_size"]),
        "vgprs": int(metadata["vgpr_count"]),
        "sgprs": int(metadata["sgpr_count"]),
        "vgpr_spills": int(metadata["vgpr_spill_count"]),
        "sgpr_spills": int(metadata["sgpr_spill_count"]),
        "scratch_bytes": int(metadata["private_segment_fixed_size"]),
        "occupancy": _occupancy(arch, int(metadata["vgpr_count"])),
    }


def _occupancy(arch: str, vgprs: int) -> int:
    """Waves a SIMD as the vector registers allow; LDS and the block size may allow fewer."""
    device = next(value for prefix, value in _REGISTERS.items() if arch.startswith(prefix))
    used = max(-(-vgprs // device.unit) * device.unit, device.unit)
    return min(device.waves, device.total // used)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
