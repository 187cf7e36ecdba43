"""Extension folders and files of each application. No application is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sd_ort.core.errors import InputError
from sd_ort.core.ownership import format_names
from sd_ort.integrations.managed_folder import install_folder, uninstall_folder

PACKAGE_FOLDER = Path(__file__).parent
# Application -> files that identify its folder, its folder of extensions, and the name of sd-ort's extension.
FOLDERS = {
    "comfyui": (("nodes.py", "comfy", "custom_nodes"), "custom_nodes", "sd_ort_nodes"),
    "webui": (("modules", "extensions", "webui.py"), "extensions", "sd-ort"),
}


def install(host: str, path: Path, *, overwrite: bool = False) -> str:
    """Install into `path` and return a message. `overwrite`: replace files that were changed since sd-ort wrote them.

    Raises InputError if `path` is not the application's folder, OutputError if something would be lost.
    """
    if host == "diffusers":
        from sd_ort.integrations.diffusers_classes import install as name_classes

        return f"{path}/model_index.json names sd-ort's classes for {', '.join(name_classes(path))}."
    target = _target(host, path)
    written = install_folder(target, CONTENT[host](), overwrite=overwrite)
    return f"Wrote {len(written)} files to {target}. Restart the application to use them."


def uninstall(host: str, path: Path) -> str:
    """Undo `install` and return a message. Raises InputError if nothing was installed."""
    if host == "diffusers":
        from sd_ort.integrations.diffusers_classes import uninstall as restore_classes

        restore_classes(path)
        return f"Restored {path}/model_index.json."
    target = _target(host, path)
    remaining = uninstall_folder(target)
    return (
        f"Removed sd-ort's files from {target}; kept: {format_names(remaining)}." if remaining else f"Removed {target}."
    )


def _target(host: str, path: Path) -> Path:
    identifying, extensions, name = FOLDERS[host]
    if missing := [file for file in identifying if not (path / file).exists()]:
        raise InputError(f"{path} is not {host}'s folder: it has no {missing[0]}.")
    return path / extensions / name


def _comfyui() -> dict[str, bytes]:
    lines = ['"""sd-ort\'s nodes, from the installed package."""', "",
             "from sd_ort.integrations.comfyui import comfy_entrypoint", "",
             '__all__ = ["comfy_entrypoint"]', ""]  # fmt: skip
    files = {"__init__.py": "\n".join(lines).encode()}
    for workflow in sorted((PACKAGE_FOLDER / "comfyui" / "workflows").glob("*.json")):
        files[f"example_workflows/{workflow.name}"] = workflow.read_bytes()
    return files


def _webui() -> dict[str, bytes]:
    lines = ['"""sd-ort\'s UNets, from the installed package."""', "",
             "from sd_ort.integrations.webui.extension import hook", "", "Script = hook()", ""]  # fmt: skip
    return {"scripts/sd_ort_unet.py": "\n".join(lines).encode()}


CONTENT: dict[str, Callable[[], dict[str, bytes]]] = {"comfyui": _comfyui, "webui": _webui}
