"""Where each host keeps extensions, and what goes there. None of the hosts is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sd_ort.core.errors import InputError
from sd_ort.hosts.install import install_folder, uninstall_folder

HERE = Path(__file__).parent
# Host -> files that tell its folder from another, where extensions live in it, and what ours is called there.
FOLDERS = {
    "comfyui": (("nodes.py", "comfy", "custom_nodes"), "custom_nodes", "sd_ort_nodes"),
    "webui": (("modules", "extensions", "webui.py"), "extensions", "sd-ort"),
}


def install(host: str, path: Path) -> str:
    """Install into `path`; says what was done. Raises InputError for a folder that is not the host's."""
    if host == "diffusers":
        from sd_ort.hosts.diffusers import install as name_classes

        return f"{path}/model_index.json names sd-ort's {', '.join(name_classes(path))}."
    target = _target(host, path)
    written = install_folder(target, CONTENT[host]())
    return f"Wrote {len(written)} files to {target}. Start the host again to see them."


def uninstall(host: str, path: Path) -> str:
    """Undo `install`; says what was done. Raises InputError where nothing was installed."""
    if host == "diffusers":
        from sd_ort.hosts.diffusers import uninstall as name_others

        name_others(path)
        return f"{path}/model_index.json names what it named before."
    target = _target(host, path)
    uninstall_folder(target)
    return f"Removed {target}."


def _target(host: str, path: Path) -> Path:
    signs, extensions, name = FOLDERS[host]
    if missing := [sign for sign in signs if not (path / sign).exists()]:
        raise InputError(f"{path} is not {host}'s folder: it has no {missing[0]}.")
    return path / extensions / name


def _comfyui() -> dict[str, bytes]:
    lines = ['"""sd-ort\'s nodes, from the installed package."""', "",
             "from sd_ort.hosts.comfyui import comfy_entrypoint", "", '__all__ = ["comfy_entrypoint"]', ""]  # fmt: skip
    files = {"__init__.py": "\n".join(lines).encode()}
    for workflow in sorted((HERE / "comfyui" / "workflows").glob("*.json")):
        files[f"example_workflows/{workflow.name}"] = workflow.read_bytes()
    return files


def _webui() -> dict[str, bytes]:
    lines = ['"""sd-ort\'s UNets, from the installed package."""', "",
             "from sd_ort.hosts.webui.extension import hook", "", "Script = hook()", ""]  # fmt: skip
    return {"scripts/sd_ort_unet.py": "\n".join(lines).encode()}


CONTENT: dict[str, Callable[[], dict[str, bytes]]] = {"comfyui": _comfyui, "webui": _webui}
