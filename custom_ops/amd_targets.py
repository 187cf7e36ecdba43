"""AMD targets that the GPU kernels support. common/vendors/hip.h has their families."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Simd:
    """Vector registers for each lane of a SIMD, their allocation granularity, and the largest number of waves.

    LLVM, AMDGPUBaseInfo: getTotalNumVGPRs, getVGPRAllocGranule, getMaxWavesPerEU; waves of 64 on gfx9, 32 elsewhere.
    """

    registers: int
    granularity: int
    waves: int


_CDNA = Simd(512, 8, 8)
_RDNA = Simd(1024, 16, 16)
_LARGE_RDNA = Simd(1536, 24, 16)

_RDNA2 = ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036")

# Not supported: targets with neither matrix instructions nor v_dot2c_f32_f16 with DPP (gfx1010, gfx906, gfx9-generic).
TARGETS = {
    "gfx908": Simd(256, 4, 10),  # with as many AGPRs beside them
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950", "gfx9-4-generic"), _CDNA),
    **dict.fromkeys((*_RDNA2, "gfx10-3-generic"), _RDNA),
    **dict.fromkeys(("gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx11-generic"), _RDNA),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201", "gfx12-generic"), _LARGE_RDNA),
}

# Targets whose code objects run on several GPUs, from ROCm 6.4 on.
GENERIC = {
    "gfx9-4-generic": ("gfx942", "gfx950"),
    "gfx10-3-generic": _RDNA2,
    "gfx11-generic": ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}

# Targets that ROCm's hipBLASLt has no kernels for.
WITHOUT_HIPBLASLT = _RDNA2

# Targets whose matrix units multiply float8, as quantized_linear_units() of the QuantizedLinear operator.
FLOAT8 = ("gfx942", "gfx950", "gfx9-4-generic", "gfx1200", "gfx1201", "gfx12-generic")

# Of the wheel that scripts/build_wheels --hip makes. An object for gfx9-4-generic could not multiply float8, which
# gfx942 reads as FNUZ and gfx950 as OCP. gfx950 takes clang 20 or newer.
WHEEL_TARGETS = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx10-3-generic", "gfx11-generic", "gfx12-generic")

# Of the wheel for Windows, which has no data center GPUs. Its ROCm loads gfx12-generic only since May 2026.
WINDOWS_TARGETS = ("gfx10-3-generic", "gfx11-generic", "gfx1200", "gfx1201")


def covers(targets: Collection[str], device: str) -> bool:
    """Return whether a library with kernels for `targets` has kernels that run on a device: gfx1151."""
    return device in targets or any(device in GENERIC.get(target, ()) for target in targets)


def kernel_targets(library: Path) -> list[str]:
    """Return the targets that a library has kernels for; [] if they are unknown, as in compressed bundles."""
    targets = set(re.findall(rb"hipv4-amdgcn-amd-amdhsa-(?:unknown)?-(gfx[0-9a-z-]+)", library.read_bytes()))
    return sorted(target.decode() for target in targets)


def simd(target: str) -> Simd:
    """Return the SIMD of a target; features (`gfx90a:xnack-`) do not count.

    Raises:
        ValueError: the target is not supported. The message lists the targets.
    """
    name = target.partition(":")[0]
    if name not in TARGETS:
        raise ValueError(f"{target} is not a supported AMD target: choose from {', '.join(TARGETS)}.")
    return TARGETS[name]
