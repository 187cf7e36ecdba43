"""Operators of ONNX Runtime domain `sd_ort`: one folder per op, each with `cases` and `reference` in Python.

`operators.txt` lists them; here are their folders, in its order.
"""

import re
from pathlib import Path


def _folders(*macros: str) -> tuple[str, ...]:
    """The folders of the lines of operators.txt that begin with one of these macros."""
    text = (Path(__file__).resolve().parent / "operators.txt").read_text()
    lines = re.findall(r"^SD_ORT_(\w*)OPERATOR\((\w+), \w+\)$", text, re.MULTILINE)
    return tuple(folder for macro, folder in lines if macro in macros)


# What libsd_ort_ops.so has, and what the GPU libraries have (by number in sd_ort_find_op and the other C functions).
CPU_OPERATORS = _folders("", "CPU_")
GPU_OPERATORS = _folders("", "GPU_", "PROVIDER_")
# Of these, what only our execution provider shows to ONNX Runtime.
PROVIDER_OPERATORS = _folders("PROVIDER_")
