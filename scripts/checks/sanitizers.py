"""Builds of custom_ops with AddressSanitizer and UndefinedBehaviorSanitizer, and the environment that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILER = os.environ.get("CXX", "g++")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr -fno-omit-frame-pointer -g1 -O1"


def build(sources: Path, folder: Path, *definitions: str, target: str = "all") -> Path:
    """Compile a target of a copy of custom_ops, with CMake's `definitions`, and return the folder of its libraries."""
    listing = sources / "CMakeLists.txt"
    listing.write_text(listing.read_text().replace("-std=c++17 -O3", "-std=c++17"))  # not in place of -O1
    configure = [
        "cmake", "-S", str(sources), "-B", str(folder), f"-DCMAKE_CXX_COMPILER={COMPILER}",
        "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_CXX_FLAGS={FLAGS}", *definitions,
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", "2", "--target", target]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    return folder


def environment(report: Path | None = None) -> dict[str, str]:
    """Return the environment of a process that loads a library built with sanitizers.

    `report`: a file for what they find, else they write to stderr. Python and ONNX Runtime keep memory to their end; a
    size that cannot be had is an error like others.
    """
    preloaded = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")  # the second for exceptions, which the first watches
    ]
    to_file = f":log_path={report}" if report else ""
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096{to_file}",
        "UBSAN_OPTIONS": f"print_stacktrace=1{to_file}",
    }
