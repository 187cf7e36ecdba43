"""Safetensors files as float32 arrays, without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_float32(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors of a file, converted to float32, and its metadata. Raises whatever the safetensors library
    raises for a file that is missing, damaged or of another format."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        names = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        foreign = {name for name, dtype in names.items() if dtype == "BF16" or dtype.startswith("F8")}
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in names.keys() - foreign}
        metadata = file.metadata() or {}
    if foreign:  # dtypes that NumPy lacks
        import ml_dtypes
        from safetensors import deserialize

        dtypes = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
        for name, entry in deserialize(path.read_bytes()):
            if name in foreign:
                flat = np.frombuffer(entry["data"], dtypes[entry["dtype"]])
                tensors[name] = flat.astype(np.float32).reshape(entry["shape"])
    return {name: tensors[name] for name in names}, metadata
