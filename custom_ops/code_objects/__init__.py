"""The AMD code objects of a built libsd_ort_hip.so: taken out, described kernel by kernel, ready to be run alone.

    python -m custom_ops.code_objects build/libsd_ort_hip.so build <library's hash>

writes build/code_objects/*.co and build/kernels.json, and a copy of the latter as custom_ops/kernels.json; CMake calls
it. What the compiler knows comes from the object's metadata and kernel descriptors (LLVM's "AMDGPU Backend User Guide",
code object v5), what it does not from the operators' LAUNCHES, and both must agree; the calls come from the library's
own host code (recorded.py). custom_ops/README.md describes the file.
"""

from custom_ops.code_objects.listing import publish, table, write

__all__ = ["publish", "table", "write"]
