"""The real onnxruntime-rocm and onnxruntime-migraphx wheels, each in an environment of its own, on this machine.

Where ROCm is missing, a session on such a provider must fail and name the libraries that are missing; where it is
there, the session must really use the provider. ONNX Runtime itself would go on with the CPU and say nothing. Writes
results/provider_wheels.json. Needs the network once: 150 MB, kept in ~/.cache/sd-ort/wheels.

    python scripts/checks/check_provider_wheels.py [--out results/provider_wheels.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "sd-ort" / "wheels"
# What sd_ort.runtime.session imports, beside the wheel under test.
NEEDS = ("numpy", "onnx", "ml-dtypes")
PROBE = """
import json, sys
from pathlib import Path
import numpy as np, onnx, onnxruntime
from onnx import TensorProto, helper
from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import provider_records, providers, session, wheels

path = Path(sys.argv[1]) / "unet" / "model.onnx"
path.parent.mkdir(parents=True)
value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "sum", [value("x")], [value("y")])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
name = sys.argv[2]
found = {"wheels": wheels.installed_wheels(), "providers": onnxruntime.get_available_providers()}
try:
    opened = session.create_session(path, name)
    found |= {"ok": True, "used": opened.get_providers(), "error": None}
except SdOrtError as error:
    found |= {"ok": False, "error": str(error), "exit_code": error.exit_code, "kind": type(error).__name__}
found["missing_libraries"] = providers.missing_libraries(name)
raw = onnxruntime.InferenceSession(str(path), providers=[provider_records.PROVIDERS[name].ep, "CPUExecutionProvider"])
found["onnxruntime_alone_uses"] = raw.get_providers()
print(json.dumps(found))
"""


def environment(extra: str) -> Path:
    """The Python of a virtual environment with the wheel of an extra, made once."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirement = extras[extra][0].partition(";")[0].strip()
    folder = CACHE / f"{extra}-{platform.python_version()}"
    done, python = folder / "requirement", folder / "bin" / "python"
    if not done.is_file() or done.read_text() != requirement:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", requirement, *NEEDS], check=True)
        done.write_text(requirement)
    return python


def check(extra: str) -> dict[str, Any]:
    """Return the results of a session on the provider with the real wheel, by the keys of PROBE."""
    python = environment(extra)
    with tempfile.TemporaryDirectory() as work:
        result = subprocess.run(
            [str(python), "-W", "ignore", "-c", PROBE, work, extra],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise RuntimeError(f"the probe of {extra} failed:\n{result.stderr}")
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def is_right(report: dict[str, Any], ep: str) -> bool:
    """Whether the provider is used, or the error names each library that is missing."""
    if report["ok"]:
        return ep in report["used"]
    return bool(report["missing_libraries"]) and all(
        library in report["error"] for library in report["missing_libraries"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "provider_wheels.json")
    out = parser.parse_args().out
    from sd_ort.runtime.provider_table import PROVIDERS

    results = {extra: check(extra) for extra in ("rocm", "migraphx")}
    verdicts = {extra: is_right(report, PROVIDERS[extra].ep) for extra, report in results.items()}
    for extra, report in results.items():
        wheel = ", ".join(f"{name} {version}" for name, version in report["wheels"].items())
        outcome = report["error"] or f"used {', '.join(report['used'])}"
        print(f"{wheel}: {'right' if verdicts[extra] else 'WRONG'}: {outcome}")
        print(f"    onnxruntime alone: {', '.join(report['onnxruntime_alone_uses'])}")
    machine = {"system": platform.platform(), "python": platform.python_version()}
    out.write_text(json.dumps({"machine": machine, "wheels": results, "right": verdicts}, indent=1) + "\n")
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
