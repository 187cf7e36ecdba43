#!/usr/bin/env python3
"""Install sd-ort with the extra `cpu` into an empty environment and run its commands there, without torch.

    python scripts/checks/without_torch.py VENV

VENV is made anew; pip downloads from PyPI. Prints the size of all packages, that of the packages beside ONNX Runtime
and what it requires itself, and the seconds of each command. The exit code is 1 if a package of the extra `export`
was installed, the packages beside ONNX Runtime take more than 250 MB, or a command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from sd_ort.core.errors import EXPORT_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MB = 250
TOOLS = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
ONNX_RUNTIME = ("onnxruntime", "numpy", "protobuf", "google", "packaging", "flatbuffers")  # with what it requires
COMMANDS = (
    "optimize demo out --target cpu",
    "generate circle --model out --steps 2 --out a.png",
    "generate circle --model demo --steps 2 --out b.png",
    "verify demo out",
    "explain out",
    "benchmark out --component unet --steps 2 --out report",
    "doctor",
)


def installed_megabytes(packages: Path, without: tuple[str, ...]) -> int:
    """Return the size of all packages but those whose folders begin with these names."""
    files = (path for each in packages.iterdir() if not each.name.startswith(without)
             for path in (each.rglob("*") if each.is_dir() else [each]))  # fmt: skip
    return sum(path.stat().st_size for path in files if path.is_file()) >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    path: Path = parser.parse_args().venv.absolute()
    venv.create(path, clear=True, with_pip=True)
    start = time.perf_counter()
    subprocess.run([path / "bin/pip", "install", "--quiet", f"{ROOT}[cpu]"], check=True)
    seconds = {"pip install": round(time.perf_counter() - start, 2)}
    packages = next(path.glob("lib/python*/site-packages"))
    failures = [name for name in EXPORT_PACKAGES if (packages / name).exists()]
    size, total = installed_megabytes(packages, (*TOOLS, *ONNX_RUNTIME)), installed_megabytes(packages, TOOLS)
    if size > LIMIT_MB:
        failures.append(f"{size} MB")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": ""}
        for command in COMMANDS:
            start = time.perf_counter()
            done = subprocess.run([path / "bin/sd-ort", *command.split()], cwd=folder, env=environment, check=False)
            seconds[command] = round(time.perf_counter() - start, 2)
            if done.returncode:
                failures.append(command)
        serve = [str(path / "bin/sd-ort"), "serve", "out"]  # needs the extra `ray`, and says so
        refused = subprocess.run(serve, cwd=folder, env=environment, check=False, capture_output=True, text=True)
        if "sd-ort[ray]" not in refused.stderr:
            failures.append("serve")
    print(json.dumps({"MB": total, "MB beside ONNX Runtime": size, "seconds": seconds, "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
