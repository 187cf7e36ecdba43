"""Cross-compile custom_ops for Windows: what a system without Windows can say of the sources.

    pip install ziglang                                                     # clang with Windows' headers, 90 MB
    python scripts/checks/windows_sources.py --log results/windows_sources.txt           # 5 minutes; 2 later

Makes, by CMake, the two libraries that need no vendor's compiler, libsd_ort_ops.dll (every instruction set) and
libsd_ort_ep_simulated.dll, and looks at what they export and which libraries they need. Then compiles the plain
C++ of the libraries for AMD and NVIDIA (launch configurations, candidates and the provider), which is the same with a
vendor's compiler. Kernels, common/tuner.cc and provider/device.cc need that one and are not compiled; nothing is run.

Compilers: `--zig`, else the package ziglang, else zig on PATH; `--mingw` is GCC instead (g++-mingw-w64-x86-64-posix).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build, machine
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import sources_hash

ROOT = Path(__file__).resolve().parents[2]

MINGW = "x86_64-w64-mingw32-g++-posix"
VENDORS = {"hip": ["-D__HIP_PLATFORM_AMD__"], "cuda": []}
EXPORTS = {  # some of those that others ask for
    "libsd_ort_ops.dll": {"RegisterCustomOps", "sd_ort_cpu_run", "sd_ort_gpu_status"},
    "libsd_ort_ep_simulated.dll": {"CreateEpFactories", "ReleaseEpFactory", "sd_ort_run", "sd_ort_StreamCreate"},
}
SYSTEM = re.compile(r"(?i)(KERNEL32|msvcrt|ntdll|ADVAPI32|api-ms-win-.*|ucrtbase)\.dll")


def command_of(options: argparse.Namespace) -> list[str]:
    """The compiler and what makes it compile for Windows."""
    if options.mingw:
        if shutil.which(MINGW) is None:
            sys.exit(f"{MINGW} is not on PATH: apt-get install g++-mingw-w64-x86-64-posix")
        return [MINGW]
    package = importlib.util.find_spec("ziglang")
    zig = options.zig or (Path(str(package.origin)).with_name("zig") if package else shutil.which("zig"))
    if zig is None:
        sys.exit("no zig: pip install ziglang, or give --zig PATH or --mingw")
    return [str(zig), "c++", "-target", "x86_64-windows-gnu"]


def run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + f"\n{' '.join(command)}: stopped with {done.returncode}")
    return done.stdout


def libraries(compiler: list[str], headers: Path, folder: Path) -> list[str]:
    """Build both; a line each: size, how much is exported, the libraries of Windows that it needs."""
    driver, flags = compiler[: 2 if "c++" in compiler else 1], compiler[2:]
    run([
        "cmake", "-S", str(ROOT / "custom_ops"), "-B", str(folder), "-DCMAKE_SYSTEM_NAME=Windows",
        "-DCMAKE_SYSTEM_PROCESSOR=AMD64", f"-DCMAKE_CXX_COMPILER={';'.join(driver)}",
        f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", f"-DORT_INCLUDE_DIR={headers}", f"-DPROVIDER_INCLUDE_DIR={headers}",
    ])  # fmt: skip
    run(["cmake", "--build", str(folder), "--parallel", "2"])
    lines = []
    for name, wanted in EXPORTS.items():
        listing = run([shutil.which("llvm-objdump-19") or "objdump", "-p", str(folder / name)])
        exported, needed = exports(listing), set(re.findall(r"DLL Name: (\S+)", listing))
        if missing := wanted - exported:
            sys.exit(f"{name} does not export {', '.join(sorted(missing))}")
        if foreign := {library for library in needed if not SYSTEM.fullmatch(library)}:
            sys.exit(f"{name} needs {', '.join(sorted(foreign))}, which Windows does not have")
        size = (folder / name).stat().st_size
        lines.append(f"{name}: {size:,} bytes, {len(exported)} exports; needs {', '.join(sorted(needed))}")
    return lines


def exports(listing: str) -> set[str]:
    """Exported names in the output of LLVM's or binutils' objdump -p."""
    table = re.split(r"Export Table:|\[Ordinal/Name Pointer\] Table", listing)[-1]
    return set(re.findall(r"^\s+(?:\d+\s+0x\w+|\[\s*\d+\](?:\s\+base\[\s*\d+\]\s+\w+)?)\s+(\w+)$", table, re.MULTILINE))


def plain_sources(compiler: list[str], headers: Path, bindings: Path) -> list[str]:
    """Compile what the GPU libraries have in plain C++, for each vendor; a line each."""
    sources = ROOT / "custom_ops"
    found = [
        *sources.glob("operators/*/launch_config.cc"),
        *sources.glob("operators/*/candidates.cc"),
        *sources.glob("provider/*.cc"),
    ]
    chosen = sorted(
        {path for path in found if path.name != "device.cc" and not path.name.startswith("simulated_")}
        | {sources / "gpu_library.cc"}
    )
    lines = []
    for vendor, flags in VENDORS.items():
        for path in chosen:
            run([
                *compiler, *flags, "-std=c++17", "-DSD_ORT_PROVIDER", '-DSD_ORT_BUILD_HASH="none"', f"-I{sources}",
                f"-I{headers}", f"-I{bindings}", "-c", str(path), "-o", str(bindings / "plain.obj"),
            ])  # fmt: skip
        lines.append(f"{vendor}: {len(chosen)} sources in plain C++ compile")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, help="the program of this name")
    parser.add_argument("--mingw", action="store_true", help=f"{MINGW} in its place")
    parser.add_argument("--log", type=Path, help="write what was compiled there too")
    options = parser.parse_args()
    compiler, headers = command_of(options), find_headers(api=build.PROVIDER_API)
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        os.environ[name] = str(cache_folder() / "zig")
    version = run([compiler[0], "--version" if options.mingw else "version"]).splitlines()[0]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        lines = libraries(compiler, headers, folder) + plain_sources(compiler, headers, folder)
    name = MINGW if options.mingw else "zig c++ -target x86_64-windows-gnu"
    report = [f"commit {machine.commit()}, sources {sources_hash()}; {name}, {version}", *lines, "nothing was run"]
    print("\n".join(report))
    if options.log:
        options.log.write_text("\n".join(report) + "\n")


if __name__ == "__main__":
    main()
