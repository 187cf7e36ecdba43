"""Cross-compile custom_ops for Windows on Linux.

    pip install ziglang                                                     # clang with Windows' headers, 90 MB
    python -m scripts.checks.windows_sources --log results/windows_sources.txt           # 5 minutes; 2 later

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
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from custom_ops.rocm import library_folders
from scripts.amd.rocm_headers import rocm_headers
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build, machine
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import BuildError, sources_hash

ROOT = Path(__file__).resolve().parents[2]

MINGW = "x86_64-w64-mingw32-g++-posix"
VENDORS = {"hip": ["-D__HIP_PLATFORM_AMD__"], "cuda": []}
EXPORTS = {  # some of those that others ask for
    "libsd_ort_ops.dll": {"RegisterCustomOps", "sd_ort_cpu_run", "sd_ort_gpu_status"}
}
SIMULATED_EXPORTS = {
    "libsd_ort_ep_simulated.dll": {"CreateEpFactories", "ReleaseEpFactory", "sd_ort_run", "sd_ort_StreamCreate"}
}
HIP_EXPORTS = {"libsd_ort_ep_hip.dll": {"CreateEpFactories", "ReleaseEpFactory", "sd_ort_run"}}
SYSTEM = re.compile(r"(?i)(KERNEL32|msvcrt|ntdll|ADVAPI32|api-ms-win-.*|ucrtbase)\.dll")


def command_of(zig: Path | None, mingw: bool = False) -> list[str]:
    """The compiler and what makes it compile for Windows; zig's own files lie in the cache."""
    if mingw:
        if shutil.which(MINGW) is None:
            sys.exit(f"{MINGW} is not on PATH: apt-get install g++-mingw-w64-x86-64-posix")
        return [MINGW]
    package = importlib.util.find_spec("ziglang")
    program = zig or (Path(str(package.origin)).with_name("zig") if package else shutil.which("zig"))
    if program is None:
        sys.exit("no zig: pip install ziglang, or give --zig PATH or --mingw")
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        os.environ[name] = str(cache_folder() / "zig")
    return [str(program), "c++", "-target", "x86_64-windows-gnu"]


def write_report(lines: Sequence[str], log: Path | None) -> None:
    """Print the lines, and write them to `log`."""
    print("\n".join(lines))
    if log:
        log.write_text("\n".join(lines) + "\n")


def run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + f"\n{' '.join(command)}: stopped with {done.returncode}")
    return done.stdout


def hip_host_compiler(compiler: list[str], headers: Path) -> list[str]:
    """Return the command of zig's clang for HIP, which `zig c++` rejects, from the one for C++.

    `headers`: include folder of ROCm.
    """
    zig = compiler[0]
    verbose = run([*compiler, "-x", "c++", "-E", "-v", os.devnull])
    words = shlex.split(next(line for line in verbose.splitlines() if " -cc1 " in line))
    flags = []
    for option, word in pairwise(words):
        if option in ("-isystem", "-D"):  # zig names folders below the working directory from there
            flags += [option, str(Path(word).absolute()) if option == "-isystem" else word]
    return [
        zig,
        "clang",
        "--target=x86_64-w64-windows-gnu",
        "-nogpuinc",
        "-nogpulib",
        "-nostdinc",
        *flags,
        "-isystem",
        str(headers),
    ]


def hip_definitions(compiler: list[str], targets: Sequence[str]) -> list[str]:
    """Return CMake's options for the libraries for AMD. Exits without a HIP compiler or ROCm's headers."""
    try:
        hip = build.find_hip_compiler()
        build.check_compiler(hip, targets)
    except BuildError as error:
        sys.exit(str(error))
    host = hip_host_compiler(compiler, hip_headers())
    return [
        f"-DHIP_ARCHS={';'.join(targets)}", f"-DHIP_COMPILER={hip.path}", f"-DHIP_FLAGS={' '.join(hip.flags)}",
        f"-DHIP_HOST_COMPILER={';'.join(host)}",
    ]  # fmt: skip


def hip_headers() -> Path:
    """Return the include folder of ROCm: the installed one, else Debian's, fetched."""
    installed = [folder.parent / "include" for folder in library_folders()]
    return next((path for path in installed if (path / "hip/hip_runtime_api.h").is_file()), rocm_headers()[-1])


def libraries(
    compiler: list[str], headers: Path, folder: Path, hip: Sequence[str] = (), simulated: bool = True
) -> list[str]:
    """Build the libraries; return a line each: size, number of exports, libraries of Windows that it imports.

    Args:
        hip: AMD targets of libsd_ort_ep_hip.dll, which is not built for none.
        simulated: also build libsd_ort_ep_simulated.dll, which only tests use.
    """
    driver, flags = compiler[: 2 if "c++" in compiler else 1], compiler[2:]
    hip_options = hip_definitions(compiler, hip) if hip else []
    run([
        "cmake", "-S", str(ROOT / "custom_ops"), "-B", str(folder), "-DCMAKE_SYSTEM_NAME=Windows",
        "-DCMAKE_SYSTEM_PROCESSOR=AMD64", f"-DCMAKE_CXX_COMPILER={';'.join(driver)}",
        f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", f"-DORT_INCLUDE_DIR={headers}", f"-DPROVIDER_INCLUDE_DIR={headers}",
        f"-DBUILD_HASH={sources_hash()}", *hip_options,
    ])  # fmt: skip
    exports_of = EXPORTS | (SIMULATED_EXPORTS if simulated else {}) | (HIP_EXPORTS if hip else {})
    targets = [name.removeprefix("lib").removesuffix(".dll") for name in exports_of]
    run(["cmake", "--build", str(folder), "--parallel", "2", "--target", *targets])
    lines = []
    for name, symbols in exports_of.items():
        listing = run([shutil.which("llvm-objdump-19") or "objdump", "-p", str(folder / name)])
        exported, needed = exports(listing), set(re.findall(r"DLL Name: (\S+)", listing))
        if missing := symbols - exported:
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
    code_files = [
        *sources.glob("operators/*/launch_config.cc"),
        *sources.glob("operators/*/candidates.cc"),
        *sources.glob("provider/*.cc"),
    ]
    chosen = sorted(
        {path for path in code_files if path.name != "device.cc" and not path.name.startswith("simulated_")}
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
    compiler, headers = command_of(options.zig, options.mingw), find_headers(api=build.PROVIDER_API)
    version = run([compiler[0], "--version" if options.mingw else "version"]).splitlines()[0]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        lines = libraries(compiler, headers, folder) + plain_sources(compiler, headers, folder)
    name = MINGW if options.mingw else "zig c++ -target x86_64-windows-gnu"
    report = [f"commit {machine.commit()}, sources {sources_hash()}; {name}, {version}", *lines, "nothing was run"]
    write_report(report, options.log)


if __name__ == "__main__":
    main()
