"""The AMD code objects of a built libsd_ort_hip.so: taken out, described kernel by kernel, ready to be run alone.

    python -m custom_ops.code_objects build/libsd_ort_hip.so build <library's hash>

writes build/code_objects/*.co and build/kernels.json, and a copy of the latter as custom_ops/kernels.json; CMake calls
it. What the compiler knows comes from the object's metadata and kernel descriptors (LLVM's "AMDGPU Backend User Guide",
code object v5), what it does not from the operators' LAUNCHES, and both must agree; the calls come from the library's
own host code (custom_ops.recorded_launches). custom_ops/README.md describes the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from custom_ops import GPU_OPERATORS
from custom_ops.op import Argument, Launch, Struct, load
from custom_ops.recorded_launches import case_entries, record

COPY = Path(__file__).resolve().parent / "kernels.json"

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"

# C type of an argument -> bytes; pointers are 8.
_SIZES = {"int32": 4, "uint32": 4, "int64": 8, "float": 4}

# Element types as the demangler writes them.
_DTYPES = {"float": "float32", "_Float16": "float16", "bf16_t": "bfloat16"}


@dataclass(frozen=True)
class _Registers:
    """What a SIMD of an architecture has: vector registers per lane, in allocation units of `unit`, waves at most."""

    total: int
    unit: int
    waves: int


# LLVM, AMDGPUBaseInfo: getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU; waves of 64 on gfx9, of 32 on the rest.
_REGISTERS = {"gfx90a": _Registers(512, 8, 8), "gfx94": _Registers(512, 8, 8), "gfx11": _Registers(1536, 24, 16)}
_REGISTERS["gfx12"] = _REGISTERS["gfx11"]


def write(library: Path, folder: Path, build_hash: str) -> None:
    """Writes folder/code_objects/*.co and folder/kernels.json. Raises what `describe` and `record` raise.

    Only for a process that ends with it: see `record`.
    """
    objects = folder / "code_objects"
    objects.mkdir(exist_ok=True)
    for old in objects.glob("*.co"):
        old.unlink()
    kernels = describe(extract(library, objects))
    calls = record(library, {entry["symbol"]: entry["arguments"] for entry in kernels})
    for entry in kernels:
        entry["operators"] = sorted({call["operator"] for call in calls if launches(call, entry["symbol"])})
    listing = {
        "library": build_hash,
        "described_by": _described_by(),
        "folder": str(objects.resolve()),
        "kernels": kernels,
        "cases": case_entries(),
        "calls": calls,
    }
    unfinished = folder / f"kernels.{os.getpid()}.json"
    unfinished.write_text(json.dumps(listing, indent=1) + "\n")
    unfinished.replace(folder / "kernels.json")


def launches(call: dict, symbol: str) -> bool:
    """Whether a call launches the kernel."""
    return any(launch["symbol"] == symbol for launch in call["launches"])


def publish(folder: Path) -> None:
    """Copies folder/kernels.json to custom_ops/kernels.json, where that can be written (not in an installed wheel).

    Writes it anew before when the Python files that describe the kernels have changed since.
    """
    listing = json.loads((folder / "kernels.json").read_text())
    if listing.get("described_by") != _described_by():
        command = [sys.executable, "-m", "custom_ops.code_objects", str(folder / "libsd_ort_hip.so"), str(folder)]
        environment = os.environ | {"PYTHONPATH": str(COPY.parent.parent)}
        subprocess.run([*command, listing["library"]], check=True, env=environment)
    if os.access(COPY.parent, os.W_OK):
        shutil.copyfile(folder / "kernels.json", COPY)


def _described_by() -> str:
    """Hash of the Python files that kernels.json is made of, beside the library."""
    files = [COPY.parent / name for name in ("operators.txt", "code_objects.py", "op.py", "recorded_launches.py")]
    files += [path for name in ("cases.py", "launches.py") for path in COPY.parent.glob(f"*/{name}")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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
    known = {name: launch for folder in GPU_OPERATORS for name, launch in load(folder).launches.items()}
    entries = []
    for path in objects:
        kernels = _metadata(path)
        names = _demangled([metadata["name"] for metadata in kernels]) if kernels else []
        descriptors = dict(_descriptors(path.read_bytes()))
        for metadata, (name, arguments) in zip(kernels, names, strict=True):
            if name not in known:
                raise ValueError(f"{path}: kernel {name} is in no operator's LAUNCHES")
            descriptor = descriptors[metadata["name"]]
            entries.append(_entry(path, metadata, descriptor, name, arguments, known[name]))
    return entries


def table(entries: list[dict]) -> str:
    """Markdown: registers, LDS, spills and occupancy; a row per kernel instance, a column per architecture."""
    archs = sorted({entry["arch"] for entry in entries})
    rows: dict[str, dict[str, str]] = {}
    for e in entries:
        spills = e["vgpr_spills"] + e["sgpr_spills"]
        cell = f"{e['vgprs']} / {e['sgprs']} / {e['lds_bytes']['static']} / {spills} / {e['occupancy']}"
        template = ", ".join(json.dumps(value).strip('"') for value in e["template"].values())
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


def _descriptors(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each kernel's symbol and 64-byte descriptor, out of the ELF's symbol table."""
    (section_headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_headers + i * size) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", data, at)
        text = data[names + name : data.index(b"\0", names + name)].decode()
        if text.endswith(".kd"):
            offset = value - sections[index][3] + sections[index][4]
            yield text.removesuffix(".kd"), data[offset : offset + 64]


# Bits of kernel_code_properties in their order, and the SGPRs that each puts before what follows.
_USER_SGPRS = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2}


def _registers_at_start(arch: str, descriptor: bytes) -> dict[str, str | None]:
    """Where a wave finds the address of its arguments, its block's indices and its threads' when it starts."""
    _, rsrc2, properties = struct.unpack_from("<IIH", descriptor, 48)
    kernarg = 0
    for bit, (name, size) in enumerate(_USER_SGPRS.items()):
        if name == "kernarg_segment_ptr":
            break
        kernarg += size if properties >> bit & 1 else 0
    blocks: dict[str, str | None] = {}
    sgpr = rsrc2 >> 1 & 31  # the first after the user SGPRs
    for axis, bit in (("x", 7), ("y", 8), ("z", 9)):
        enabled = rsrc2 >> bit & 1
        blocks[f"block_{axis}"] = f"s{sgpr}" if enabled else None
        sgpr += enabled
    if arch.startswith("gfx12"):
        blocks = {"block_x": "ttmp9", "block_y": "ttmp7[15:0]", "block_z": "ttmp7[31:16]"}
    return {"kernarg_address": f"s[{kernarg}:{kernarg + 1}]", **blocks, "thread_x": "v0[9:0]"}


def _entry(
    path: Path, metadata: dict, descriptor: bytes, name: str, template: list[str], launch: Launch
) -> dict[str, object]:
    arch = path.name.split("_")[0]
    if len(metadata["args"]) != len(launch.arguments) or len(template) != len(launch.template):
        raise ValueError(
            f"{path}: {name} takes {len(metadata['args'])} arguments, its Launch names {len(launch.arguments)} "
            "(the compiler's own hidden ones count: a kernel that asks for the grid's size has such)"
        )
    values = dict(zip(launch.template, map(_template_value, template), strict=True))
    block = eval(launch.block, {}, values)
    if block != int(metadata["max_flat_workgroup_size"]):
        raise ValueError(f"{path}: {name} is compiled for {metadata['max_flat_workgroup_size']} threads, not {block}")
    dtype = _DTYPES[template[launch.template.index("T")]]
    return {
        "symbol": metadata["name"],
        "kernel": name,
        "arch": arch,
        "object": path.name,
        "dtype": dtype,
        "computes": launch.computes,
        "template": values,
        "arguments": [
            field
            for place, (compiled, argument) in enumerate(zip(metadata["args"], launch.arguments, strict=True))
            for field in _fields(f"{path}: {name}", place, compiled, argument)
        ],
        "kernarg_bytes": int(metadata["kernarg_segment_size"]),
        "sizes": dict(launch.sizes),
        "requires": list(launch.requires),
        "itemsize": 4 if dtype == "float32" else 2,
        "block": [block, 1, 1],
        "grid": list(launch.grid),
        "lds_bytes": {"static": int(metadata["group_segment_fixed_size"]), "dynamic": launch.lds_bytes},
        "registers_at_start": _registers_at_start(arch, descriptor),
        "wave_size": int(metadata["wavefront_size"]),
        "vgprs": int(metadata["vgpr_count"]),
        "sgprs": int(metadata["sgpr_count"]),
        "vgpr_spills": int(metadata["vgpr_spill_count"]),
        "sgpr_spills": int(metadata["sgpr_spill_count"]),
        "scratch_bytes": int(metadata["private_segment_fixed_size"]),
        "occupancy": _occupancy(arch, int(metadata["vgpr_count"])),
    }


def _template_value(text: str) -> str | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


def _fields(where: str, place: int, compiled: dict, argument: Argument | Struct) -> Iterator[dict[str, object]]:
    """The entries of the kernel's argument number `place`: one, or a struct's fields.

    `compiled` is what the compiler knows of it. Raises ValueError when it and the Launch disagree.
    """
    offset, size = int(compiled["offset"]), int(compiled["size"])
    if isinstance(argument, Argument):
        pointer = argument.type.endswith("*")
        if size != _size(argument) or pointer != (compiled["value_kind"] == "global_buffer"):
            raise ValueError(f"{where}: argument {argument.name} is no {argument.type}")
        yield _entry_of(argument, place, offset)
        return
    end, largest = offset, 1
    for field in argument.fields:
        largest = max(largest, _size(field))
        end += -end % _size(field)
        yield _entry_of(field, place, end)
        end += _size(field)
    if size != end - offset + -end % largest:
        raise ValueError(f"{where}: {argument.name} has {size} bytes, its fields {end - offset}")


def _size(argument: Argument) -> int:
    return 8 if argument.type.endswith("*") else _SIZES[argument.type]


def _entry_of(argument: Argument, place: int, offset: int) -> dict[str, object]:
    entry = {
        "name": argument.name,
        "type": argument.type,
        "parameter": place,
        "offset": offset,
        "size": _size(argument),
        "meaning": argument.meaning,
    }
    if not argument.type.endswith("*"):
        return entry
    return entry | {
        "access": "read" if argument.type.startswith("const") else "write",
        "elements": argument.elements,
        "alignment": argument.alignment,
        "optional": argument.optional,
    }


def _occupancy(arch: str, vgprs: int) -> int:
    """Waves a SIMD as the vector registers allow; LDS and the block size may allow fewer."""
    device = next(value for prefix, value in _REGISTERS.items() if arch.startswith(prefix))
    used = max(-(-vgprs // device.unit) * device.unit, device.unit)
    return min(device.waves, device.total // used)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    publish(Path(sys.argv[2]))
