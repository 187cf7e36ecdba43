"""The execution providers that sd-ort drives: one record each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CPU_EP = "CPUExecutionProvider"


@dataclass(frozen=True)
class ProviderSpec:
    """Entry of a `--provider` name: its ONNX Runtime name, the extra that installs it, and its options.

    `wheel` is the one of ONNX Runtime that is installed for it; "" for one that needs no wheel of its own.
    `tuning` holds the options that make it search for the fastest kernels; empty when it has no such search.
    `graph` holds those that make it capture runs as GPU graphs: none if sd-ort captures them. None: no captures.
    `device` is ONNX Runtime's name for its memory, "cuda" on AMD too.
    `library` is the shared library inside the wheel whose own dependencies must be on the machine; our own provider
    has none there, but one that `build-ops` with the flags `build` makes for `vendor`.
    `target` is what `optimize` lowers graphs to for it, where that has another name.
    """

    ep: str
    extra: str
    wheel: str = ""
    options: dict[str, str] = field(default_factory=dict)
    tuning: dict[str, str] = field(default_factory=dict)
    graph: dict[str, str] | None = None
    device: str = "cpu"
    library: str | None = None
    needs: str = ""
    vendor: str | None = None
    build: str = ""
    target: str | None = None


def _ours(vendor: str, ep: str, pci: int, **more: Any) -> ProviderSpec:
    """Our own provider (custom_ops/provider); a PCI vendor id tells its memory."""
    return ProviderSpec(
        ep, "hip", tuning={"tuning": "1"}, graph={"graph": "1"}, device=f"gpu:{pci}", vendor=vendor, **more
    )


PROVIDERS = {
    "cpu": ProviderSpec(CPU_EP, "cpu", "onnxruntime"),
    "cuda": ProviderSpec(
        "CUDAExecutionProvider",
        "cuda",
        "onnxruntime-gpu",
        # Trying all of cuDNN's algorithms takes up to a second of a first image, and made no step of SD 1.5 faster
        # (tried by hand on an H200, no script of ours repeats it).
        options={
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_use_max_workspace": "1",
            "cudnn_conv_algo_search": "HEURISTIC",
        },
        graph={},
        device="cuda",
        library="libonnxruntime_providers_cuda.so",
        needs="CUDA and cuDNN",
    ),
    "rocm": ProviderSpec(
        "ROCMExecutionProvider",
        "rocm",
        "onnxruntime-rocm",
        # tunable_op_enable: without it ONNX Runtime does not use the tuning results of an earlier session.
        options={"tunable_op_enable": "1", "miopen_conv_use_max_workspace": "1"},
        tuning={"tunable_op_tuning_enable": "1", "miopen_conv_exhaustive_search": "1"},
        graph={},
        device="cuda",
        library="libonnxruntime_providers_rocm.so",
        needs="ROCm 7 with MIOpen and hipBLAS",
    ),
    "migraphx": ProviderSpec(
        "MIGraphXExecutionProvider",
        "migraphx",
        "onnxruntime-migraphx",
        tuning={"migraphx_exhaustive_tune": "1"},
        library="libonnxruntime_providers_migraphx.so",
        needs="ROCm with MIGraphX",
    ),
    "hip": _ours("hip", "SdOrtHip", 0x1002, needs="ROCm 6 or later", build="--hip gfx1100"),
    "sdcuda": _ours("cuda", "SdOrtCuda", 0x10DE, needs="the CUDA driver", build="--cuda sm_90", target="gpu"),
}

# Our own by the name of its devices; the last stands in for them on the CPU, in tests.
OURS = {each.ep: each for each in PROVIDERS.values() if each.vendor} | {
    "SdOrtSimulated": _ours("simulated", "SdOrtSimulated", 0x1D05, needs="nothing", target="gpu")
}

# The provider that each wheel is installed for, by name; None for one that sd-ort does not drive. All of them install
# the same package `onnxruntime` and overwrite each other's files.
WHEELS: dict[str, str | None] = {"onnxruntime-directml": None, "onnxruntime-openvino": None} | {
    each.wheel: name for name, each in PROVIDERS.items() if each.wheel
}
