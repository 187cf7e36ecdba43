"""The GPU library and the execution provider compiled for AMD: one build for all tests of a run.

SD_ORT_HIP_WHEEL names a wheel of scripts/build_wheels --hip whose libraries are tested instead.
"""

from __future__ import annotations

import fcntl
import os
import zipfile
from pathlib import Path

from custom_ops.amd_targets import WHEEL_TARGETS
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build
from sd_ort.runtime.library import HIP_LIBRARY, PROVIDER_LIBRARIES

HIP_WHEEL = os.environ.get("SD_ORT_HIP_WHEEL")

# One of each kind of matrix instruction, and RDNA2, which has none; scripts/checks/all_architectures sets the variable,
# for all.
TARGETS = (
    WHEEL_TARGETS
    if HIP_WHEEL
    else ("gfx90a", "gfx942", "gfx10-3-generic", "gfx1030", "gfx1100", "gfx1200", "gfx1201")
    if "SD_ORT_ALL_ARCHITECTURES" in os.environ
    else ("gfx942", "gfx1030", "gfx1100", "gfx1201")
)


def hip_library() -> Path:
    """The GPU library for TARGETS, the provider beside it. Another process that builds it is waited for."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    if HIP_WHEEL:
        with zipfile.ZipFile(HIP_WHEEL) as archive:
            for name in (HIP_LIBRARY, PROVIDER_LIBRARIES["hip"]):
                archive.extract(f"custom_ops/{name}", cache_folder() / "wheel")
        return cache_folder() / "wheel/custom_ops" / HIP_LIBRARY
    with (cache_folder() / "hip_library_of_tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(cpu=False, hip=TARGETS, provider=True)


# In the compiler's place: libraries are copies of those in $BUILT, objects are empty.
_COPYING_COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
case "$output" in
  *.so) cp "$BUILT/${output##*/}" "$output" ;;
  ?*) : > "$output" ;;
esac
"""


def copying_compiler(folder: Path) -> Path:
    """Create a compiler, for $HIPCXX, that copies the libraries in the folder $BUILT."""
    compiler = folder / "clang++"
    compiler.write_text(_COPYING_COMPILER)
    compiler.chmod(0o755)
    return compiler
