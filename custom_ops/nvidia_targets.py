"""NVIDIA targets that the GPU kernels are compiled for: the only list.

All need mma.sync.m16n8k16 and cp.async, which sm_80 introduced; the candidates on warpgroup instructions are sm_90's.
"""

from __future__ import annotations

# Target -> GPUs that have it.
TARGETS = {
    "sm_80": "A100",
    "sm_86": "RTX 30, A10, A40",
    "sm_89": "RTX 40, L4, L40S",
    "sm_90": "H100, H200",
    "sm_100": "B100, B200",
    "sm_120": "RTX 50",
}
MEASURED = ("sm_90",)  # kernels were run and timed there; for the others they are compiled, and were never run


def describe(target: str) -> str:
    """Return the target's GPUs, and whether the kernels were measured there.

    Raises:
        ValueError: the target is not supported. The message lists the targets.
    """
    if target not in TARGETS:
        raise ValueError(f"{target} is not supported: choose from {', '.join(TARGETS)}.")
    return f"{target} ({TARGETS[target]}): {'measured' if target in MEASURED else 'not measured'}"
