"""Custom operators of ONNX domain `sd_ort`: a folder of custom_ops/operators each, listed in operators.txt."""

import re
from pathlib import Path


def _folders(*macros: str) -> tuple[str, ...]:
    """Return the folders of operators.txt lines that start with one of these macros, in file order."""
    text = (Path(__file__).resolve().parent / "operators.txt").read_text()
    lines = re.findall(r"^SD_ORT_(\w*)OPERATOR\((\w+), \w+\)$", text, re.MULTILINE)
    return tuple(folder for macro, folder in lines if macro in macros)


# Operators of libsd_ort_ops.so and of the GPU libraries, in the order of the indices in the C interface.
CPU_OPERATORS = _folders("", "CPU_")
GPU_OPERATORS = _folders("", "GPU_", "PROVIDER_")
