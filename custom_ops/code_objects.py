"""Resources of the kernels in a built libsd_ort_hip.so: registers, spills, LDS and occupancy.

The format of code objects is in LLVM's "AMDGPU Backend User Guide", code object v5.
"""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from custom_ops.amd_targets import simd
from custom_ops.rocm import llvm_tool

_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object, as its metadata describes it.

    `name` has the template arguments, but no namespace. `lds_bytes` is static LDS.
    """

    symbol: str
    name: str
    target: str
    code_object: Path
    block_size: int
    wave_size: int
    lds_bytes: int
    vgprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    has_hidden_arguments: bool

    @property
    def occupancy(self) -> int:
        """Waves per SIMD that the vector registers allow; LDS and the block size may allow fewer."""
        device = simd(self.target)
        allocated = max(-(-self.vgprs // device.granularity) * device.granularity, device.granularity)
        return min(device.waves, device.registers // allocated)


def extract(library: Path, folder: Path) -> list[Path]:
    """Write the code objects with kernels as <target>_<index>.co; returns their paths.

    The section .hip_fatbin holds one bundle per source file: magic, count, then (offset, size, triple's length, triple)
    per code object. A triple ends with the target: hipv4-amdgcn-amd-amdhsa--gfx9-4-generic.
    """
    data = library.read_bytes()
    paths = []
    for index, match in enumerate(re.finditer(_BUNDLE_MAGIC, data)):
        (count,) = struct.unpack_from("<Q", data, match.end())
        position = match.end() + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, position)
            triple = data[position + 24 : position + 24 + length].decode()
            position += 24 + length
            if triple.startswith("hip") and size:
                path = folder / f"{triple[triple.index('-gfx') + 1 :]}_{index}.co"
                path.write_bytes(data[match.start() + offset : match.start() + offset + size])
                paths.append(path)
    return paths


def read_kernels(code_objects: list[Path]) -> list[Kernel]:
    """Return the kernels of code objects that `extract` wrote.

    Raises:
        FileNotFoundError: llvm-readelf or llvm-cxxfilt is missing.
        ValueError: a kernel is not a template in namespace sd_ort.
    """
    kernels = []
    for path in code_objects:
        notes = _metadata(path)
        names = _demangle([values["name"] for values, _ in notes])
        for (values, argument_kinds), name in zip(notes, names, strict=True):
            kernels.append(
                Kernel(
                    symbol=values["name"],
                    name=name,
                    target=path.name.split("_")[0],
                    code_object=path,
                    block_size=int(values["max_flat_workgroup_size"]),
                    wave_size=int(values["wavefront_size"]),
                    lds_bytes=int(values["group_segment_fixed_size"]),
                    vgprs=int(values["vgpr_count"]),
                    sgprs=int(values["sgpr_count"]),
                    spills=int(values["vgpr_spill_count"]) + int(values["sgpr_spill_count"]),
                    scratch_bytes=int(values["private_segment_fixed_size"]),
                    has_hidden_arguments=any(kind.startswith("hidden_") for kind in argument_kinds),
                )
            )
    return kernels


def _metadata(code_object: Path) -> list[tuple[dict[str, str], list[str]]]:
    """Return the values and the kinds of arguments of each kernel, from the YAML that llvm-readelf prints."""
    command = [llvm_tool("llvm-readelf"), "--notes", str(code_object)]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = re.search(r"^amdhsa\.kernels:$(.*?)^amdhsa\.", notes, re.MULTILINE | re.DOTALL)
    entries = re.split(r"^  - ", kernels[1], flags=re.MULTILINE)[1:] if kernels else []
    return [
        (
            dict(re.findall(r"^    \.(\w+): +(\S.*)$", f"    {entry}", re.MULTILINE)),
            re.findall(r"\.value_kind: +(\w+)", entry),
        )
        for entry in entries
    ]


def _demangle(symbols: list[str]) -> list[str]:
    """Return the name and template arguments of each symbol, without namespace and parameters."""
    if not symbols:
        return []
    command = [llvm_tool("llvm-cxxfilt"), *symbols]
    texts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = []
    for text in texts:
        text = text.replace("(anonymous namespace)::", "")
        match = re.match(r"void sd_ort::(\w+<.*?>)\(", text)
        if match is None:
            raise ValueError(f"{text}: a kernel must be a template in namespace sd_ort.")
        names.append(match[1].replace("sd_ort::", ""))
    return names


def table(kernels: list[Kernel]) -> str:
    """Return a Markdown table of resources: a row per kernel, a column per target."""
    targets = sorted({kernel.target for kernel in kernels})
    rows: dict[str, dict[str, str]] = {}
    for kernel in kernels:
        values = (kernel.vgprs, kernel.sgprs, kernel.lds_bytes, kernel.spills, kernel.occupancy)
        rows.setdefault(kernel.name, {})[kernel.target] = " / ".join(map(str, values))
    lines = [
        "# Kernels of the AMD code objects",
        "",
        "A cell: VGPRs (CDNA: with AGPRs) / SGPRs / static LDS bytes / registers spilled, of both kinds / waves a SIMD",
        "(of 8 on CDNA, 16 on RDNA).",
        "",
        f"| kernel | {' | '.join(targets)} |",
        "|---|" + "---|" * len(targets),
    ]
    for name, cells in sorted(rows.items()):
        lines.append(f"| {name} | {' | '.join(cells.get(target, '-') for target in targets)} |")
    return "\n".join(lines) + "\n"
