"""Does installing sd-ort change what a host has? pip's own answer, for a host's Python; nothing is installed.

    python scripts/checks/host_install.py --python PYTHON [--extra cpu] [--wheel WHEEL] [--out results/hosts/x.json]

What PYTHON has is frozen and given to `pip install --dry-run` as constraints, as the hosts' pages say. pip then says
what it would add, or which of the host's versions sd-ort cannot live with. The exit status is 1 if pip would change a
version that the host has.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name

from scripts.checks.check_report import report

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "diffusers", "transformers", "onnxruntime", "numpy", "protobuf", "pillow")


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pip of PYTHON."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def frozen(python: Path) -> dict[str, str]:
    """Name -> version of what PYTHON has, but sd-ort."""
    lines = [line.split("==") for line in pip(python, "list", "--format=freeze").stdout.splitlines() if "==" in line]
    return {name: version for each, version in lines if (name := canonicalize_name(each)) != "sd-ort"}


def asked(python: Path, wanted: str, had: dict[str, str]) -> dict[str, Any]:
    """What pip would install, or why it would not."""
    with tempfile.TemporaryDirectory(prefix="sd-ort-install-") as folder:
        constraints, answer = Path(folder) / "host.txt", Path(folder) / "answer.json"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in had.items()))
        done = pip(python, "install", "--dry-run", "--report", str(answer), "-c", str(constraints), wanted)
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() + done.stdout.splitlines()]
            return {"refused": [line for line in said if "requires" in line or "depends on" in line or "ERROR" in line]}
        installed = json.loads(answer.read_text())["install"]
    found = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}
    return {
        "would add": {name: version for name, version in found.items() if name not in had and name != "sd-ort"},
        "would change": {name: f"{had[name]} to {v}" for name, v in found.items() if had.get(name, v) != v},
    }


@click.command()
@click.option("--python", type=click.Path(path_type=Path, exists=True), required=True, help="The host's.")
@click.option("--wheel", type=click.Path(path_type=Path, exists=True), default=ROOT, help="sd-ort [default: sources].")
@click.option("--extra", help="Of sd-ort: cpu, cuda, rocm [default: none].")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here, .json and .md.")
def main(python: Path, wheel: Path, extra: str | None, out: Path | None) -> None:
    """Ask pip what installing sd-ort would do in a host's environment."""
    had = frozen(python)
    found = asked(python, f"{wheel.absolute()}[{extra}]" if extra else str(wheel.absolute()), had)
    has = {name: had.get(name, "none") for name in SHOWN}
    report(
        "sd-ort in a host's environment", "scripts/checks/host_install.py --python PYTHON", {"has": has, **found}, out
    )
    if found.get("would change"):
        raise click.ClickException("pip would change versions that the host has")


if __name__ == "__main__":
    main()
