"""What a built libsd_ort_hip.so and its code objects hold: LLVM's "AMDGPU Backend User Guide", code object v5."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from custom_ops.rocm import llvm_tool

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def extract(library: Path, to: Path) -> list[Path]:
    """Writes every code object that has kernels as <architecture>_<n>.co; the paths.

    The section .hip_fatbin holds a bundle a source file: magic, count, then (offset, size, triple's length, triple). A
    triple ends with the target: hipv4-amdgcn-amd-amdhsa--gfx9-4-generic.
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
                path = to / f"{triple[triple.index('-gfx') + 1 :]}_{bundles}.co"
                path.write_bytes(data[start + offset : start + offset + size])
                written.append(path)
        bundles += 1
        start = data.find(_MAGIC, start + len(_MAGIC))
    return written


def metadata_of(path: Path) -> list[dict]:
    """The kernels of a code object's note, as llvm-readelf prints it (YAML of two levels)."""
    notes = subprocess.run(
        [llvm_tool("llvm-readelf"), "--notes", str(path)], capture_output=True, text=True, check=True
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


def demangled(symbols: list[str]) -> list[tuple[str, list[str]]]:
    """Name without namespace, and template arguments, of each symbol."""
    command = [llvm_tool("llvm-cxxfilt"), *symbols]
    texts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = []
    for text in texts:
        match = re.match(r"void sd_ort::(\w+)<(.*?)>\(", text)
        if match is None:
            raise ValueError(f"{text}: a kernel is a template in namespace sd_ort")
        names.append((match[1], [argument.strip().replace("sd_ort::", "") for argument in match[2].split(",")]))
    return names


def descriptors_of(data: bytes) -> Iterator[tuple[str, bytes]]:
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


def registers_at_start(arch: str, descriptor: bytes) -> dict[str, str | None]:
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
