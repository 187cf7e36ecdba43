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
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.checks import sanitizers
from sd_ort.runtime import build, machine
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import PROVIDER_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]

# Of tests/custom_ops.
TESTS = ("test_provider.py", "test_provider_faults.py", "test_provider_pipeline.py", "test_provider_weights.py")
# These open the package's own build of the library by the provider's name.
BY_NAME = "not by_the_plain_call and not not_built"


def make(folder: Path) -> Path:
    """The provider's host library with the sanitizers, from a copy of the sources."""
    sources = folder / "sources"
    shutil.copytree(ROOT / "custom_ops", sources, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    built = sanitizers.build(
        sources, folder / "build", f"-DORT_INCLUDE_DIR={find_headers()}",
        f"-DPROVIDER_INCLUDE_DIR={find_headers(api=build.PROVIDER_API)}", target="sd_ort_ep_simulated",
    )  # fmt: skip
    return built / PROVIDER_LIBRARIES["simulated"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="write what was run and its outcome there too")
    parser.add_argument("--work", type=Path, help="a folder to build in, which a later run goes on with")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = work / "report"
        for old in work.glob("report.*"):
            old.unlink()
        # Reports go into a file, since pytest catches what is printed.
        environment = sanitizers.environment(report) | {"SD_ORT_TESTED_PROVIDER": str(make(work))}
        tests = [str(ROOT / "tests/custom_ops" / name) for name in TESTS]
        options_of_pytest = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", BY_NAME]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *tests, *options_of_pytest],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        reports = "".join(path.read_text() for path in work.glob("report.*"))
    print(done.stdout + reports)
    if done.returncode:
        sys.exit(f"stopped with {done.returncode}: see the report above")
    if options.log:
        first = subprocess.check_output([sanitizers.COMPILER, "--version"], text=True).splitlines()[0]
        lines = [
            f"commit {machine.commit()}, {first}, {sanitizers.FLAGS}",
            f"{' '.join(TESTS)} -k '{BY_NAME}': no fault, {time.monotonic() - started:.0f} s",
            *[line for line in done.stdout.splitlines() if " passed" in line or "%]" in line],
        ]
        options.log.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
