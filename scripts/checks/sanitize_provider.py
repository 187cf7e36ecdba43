"""Run the sd-ort provider under AddressSanitizer and UndefinedBehaviorSanitizer: the tests of its simulated device.

    python scripts/checks/sanitize_provider.py --log results/provider_sanitized.txt         # some minutes

Builds libsd_ort_ep_simulated.so with the sanitizers (GCC or clang), in a temporary folder, and runs its tests in a
second process: whole components, captured runs, changing shapes, two sessions and two threads, wrong options, no more
memory, a device that is gone. A failing test or what a sanitizer finds ends the run with 1.
ONNX Runtime itself is not instrumented. On a GPU, memcheck and racecheck of the kernels are
`scripts/checks/check_ops_gpu.py --arch sm_90 --sanitizer memcheck`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sd_ort.runtime import build, machine
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import PROVIDER_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr -fno-omit-frame-pointer -g1 -O1"
# Of tests/custom_ops.
TESTS = ("test_provider.py", "test_provider_faults.py", "test_provider_pipeline.py", "test_provider_weights.py")
# These open the package's own build of the library by the provider's name.
BY_NAME = "not by_the_plain_call and not not_built"


def make(folder: Path, compiler: str) -> Path:
    """The provider's host library with the sanitizers, from a copy of the sources."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "custom_ops", sources, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    listing = sources / "CMakeLists.txt"
    listing.write_text(listing.read_text().replace("-std=c++17 -O3", "-std=c++17"))  # not in place of -O1
    configure = [
        "cmake", "-S", sources, "-B", folder / "build", f"-DORT_INCLUDE_DIR={find_headers()}",
        f"-DPROVIDER_INCLUDE_DIR={find_headers(api=build.PROVIDER_API)}", f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_CXX_FLAGS={FLAGS}",
    ]  # fmt: skip
    for command in (
        configure,
        ["cmake", "--build", folder / "build", "--target", "sd_ort_ep_simulated", "--parallel", "2"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    return folder / "build" / PROVIDER_LIBRARIES["simulated"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="write what was run and its outcome there too")
    parser.add_argument("--work", type=Path, help="a folder to build in, which a later run goes on with")
    options = parser.parse_args()
    compiler = os.environ.get("CXX", "g++")
    preloaded = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")  # the second for exceptions, which the first watches
    ]
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = work / "report"
        for old in work.glob("report.*"):
            old.unlink()
        library = make(work, compiler)
        environment = os.environ | {
            "SD_ORT_TESTED_PROVIDER": str(library),
            "LD_PRELOAD": " ".join(preloaded),
            # Python and ONNX Runtime keep memory to their end; a size that cannot be had is an error like others.
            # Reports go into a file, since pytest catches what is printed.
            "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:log_path={report}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={report}",
        }
        tests = [
            *(ROOT / "tests/custom_ops" / name for name in TESTS),
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-k",
            BY_NAME,
        ]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *map(str, tests)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        reports = "".join(path.read_text() for path in work.glob("report.*"))
    print(done.stdout + reports)
    if done.returncode:
        sys.exit(f"stopped with {done.returncode}: see the report above")
    if options.log:
        first = subprocess.check_output([compiler, "--version"], text=True).splitlines()[0]
        lines = [
            f"commit {machine.commit()}, {first}, {FLAGS}",
            f"{' '.join(TESTS)} -k '{BY_NAME}': no fault, {time.monotonic() - started:.0f} s",
            *[line for line in done.stdout.splitlines() if " passed" in line or "%]" in line],
        ]
        options.log.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
