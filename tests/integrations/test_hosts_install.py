"""install-host writes one folder, and uninstall-host removes only what install-host wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_type import Cli

from sd_ort.core.errors import InputError
from sd_ort.integrations.application_installers import PACKAGE_FOLDER, install
from sd_ort.integrations.managed_folder import MARKER, uninstall_folder


@pytest.fixture(params=["comfyui", "webui"])
def installation(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """An application, a stub of its folder, and the folder of the extension."""
    host: str = request.param
    root = tmp_path / "host"
    for name in ("comfy", "custom_nodes", "modules", "extensions"):
        (root / name).mkdir(parents=True)
    for name in ("nodes.py", "webui.py"):
        (root / name).touch()
    return host, root, root / ("custom_nodes/sd_ort_nodes" if host == "comfyui" else "extensions/sd-ort")


def test_install_and_uninstall(sd_ort: Cli, installation: tuple[str, Path, Path]) -> None:
    host, root, target = installation
    for _ in range(2):  # an update
        code, out, _ = sd_ort("install-host", host, root)
        assert (code, str(target) in out) == (0, True)
    written = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert written == {MARKER, *json.loads((target / MARKER).read_text())["files"]}
    for path in target.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "x.pyc").touch()
    assert sd_ort("uninstall-host", host, root)[0] == 0
    assert not target.exists()
    assert target.parent.is_dir()
    code, _, error = sd_ort("uninstall-host", host, root)
    assert (code, error.count("\n")) == (2, 1)


def test_other_files_are_not_touched(sd_ort: Cli, installation: tuple[str, Path, Path]) -> None:
    host, root, target = installation
    target.mkdir()
    (target / "__init__.py").write_text("theirs")
    code, _, error = sd_ort("install-host", host, root)
    assert (code, "is not sd-ort's" in error) == (5, True)
    assert [path.name for path in target.iterdir()] == ["__init__.py"]
    (target / "__init__.py").unlink()
    target.rmdir()
    install(host, root)
    (target / "notes.txt").write_text("theirs")
    uninstall_folder(target)
    assert [path.name for path in target.rglob("*")] == ["notes.txt"]


def test_wrong_folder(sd_ort: Cli, tmp_path: Path) -> None:
    code, _, error = sd_ort("install-host", "comfyui", tmp_path)
    assert (code, "is not comfyui's folder: it has no nodes.py" in error) == (2, True)
    code, _, error = sd_ort("install-host", "diffusers", tmp_path)
    assert (code, error.count("\n")) == (2, 1)


def test_marker_with_a_path_outside_of_the_folder(installation: tuple[str, Path, Path]) -> None:
    host, root, target = installation
    install(host, root)
    (target / MARKER).write_text(json.dumps({"files": ["../../nodes.py"]}))
    with pytest.raises(InputError, match="is damaged"):
        uninstall_folder(target)
    assert (root / "nodes.py").exists()


@pytest.mark.parametrize(
    "path", sorted((PACKAGE_FOLDER / "comfyui" / "workflows").glob("*.json")), ids=lambda path: path.stem
)
def test_workflows_are_valid(path: Path) -> None:
    """Every link connects an output and an input of its type; every sd-ort node exists."""
    workflow = json.loads(path.read_text())
    nodes = {node["id"]: node for node in workflow["nodes"]}
    node_source = (PACKAGE_FOLDER / "comfyui" / "nodes.py").read_text()
    for link_id, source, output_index, target, input_index, link_type in workflow["links"]:
        output, socket = nodes[source]["outputs"][output_index], nodes[target]["inputs"][input_index]
        assert (output["type"], socket["type"], socket["link"]) == (link_type, link_type, link_id)
        assert link_id in output["links"]
    for node in nodes.values():
        assert not node["type"].startswith("SdOrt") or f'node_id="{node["type"]}"' in node_source
        missing = [socket["name"] for socket in node["inputs"] if socket["link"] is None and "widget" not in socket]
        assert missing in ([], ["vae"]), "only ControlNetApplyAdvanced's VAE may be unconnected"
