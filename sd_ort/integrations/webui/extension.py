"""The WebUI extension: detects the WebUI that imports it and registers sd-ort's UNets.

    AUTOMATIC1111, its AMD fork   one entry per folder in Settings > SD Unet (`on_list_unets`)
    Forge and reForge             a checkbox and a list of folders below the prompt (`process_before_every_sampling`)

If the graph does not support a request, the WebUI's own UNet runs and a warning is shown.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, describe_error
from sd_ort.core.pipeline_folder import MANIFEST
from sd_ort.integrations.webui.unet import WebUNet, folders

TITLE = "sd-ort"


def models_root() -> Path:
    """Return models/sd_ort of the WebUI."""
    return Path(importlib.import_module("modules.paths").models_path) / "sd_ort"


def host() -> str:
    """Return "forge" (also for reForge) or "webui", by packages that only Forge has."""
    forge = importlib.util.find_spec("modules_forge") or importlib.util.find_spec("ldm_patched")
    return "forge" if forge else "webui"


def warn(error: Exception) -> None:
    """Print an error in one line, and show it as gradio's warning."""
    line = f"sd-ort: {describe_error(error)[0]} The WebUI's own UNet is used."
    print(line)
    try:
        importlib.import_module("gradio").Warning(line)
    except Exception:  # gradio raises outside of a request
        return


def hook() -> type[Any] | None:
    """Register with the WebUI; return Forge's script class, or None for the other WebUIs."""
    if host() == "forge":
        return forge_script()
    importlib.import_module("modules.script_callbacks").on_list_unets(list_unets)
    return None


# --- AUTOMATIC1111 --------------------------------------------------------------------------------------------------


def list_unets(unets: list[Any]) -> None:
    """Append an option for each folder to the WebUI's list."""
    sd_unet = importlib.import_module("modules.sd_unet")

    class Option(sd_unet.SdUnetOption):  # type: ignore[name-defined]
        def __init__(self, name: str) -> None:
            self.model_name, self.label = name, f"[{TITLE}] {name}"

        def create_unet(self) -> Any:
            return webui_unet(models_root() / self.model_name)

    unets.extend(Option(name) for name in folders(models_root()))


def webui_unet(folder: Path) -> Any:
    """Return a WebUI SdUnet that runs a folder's UNet."""
    sd_unet = importlib.import_module("modules.sd_unet")

    class Unet(sd_unet.SdUnet):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.sd_ort_unet: WebUNet | None = None

        def activate(self) -> None:
            try:
                self.sd_ort_unet = WebUNet(folder)
            except Exception as error:
                warn(error)

        def deactivate(self) -> None:
            self.sd_ort_unet = None

        def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            if self.sd_ort_unet is not None:
                try:
                    self.sd_ort_unet.use_loras(webui_loras())
                    return self.sd_ort_unet(x, timesteps, context, *args, **kwargs)
                except Exception as error:
                    warn(error)
            return run_original_unet(sd_unet, x, timesteps, context, *args, **kwargs)

    return Unet()


def run_original_unet(sd_unet: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the WebUI's own UNet, which the WebUI has moved to the CPU, on the device of x."""
    original = importlib.import_module("modules.shared").sd_model.model.diffusion_model
    original.to(x.device)
    active, sd_unet.current_unet = sd_unet.current_unet, None
    try:
        return original(x, *args, **kwargs)
    finally:
        sd_unet.current_unet = active


def webui_loras() -> list[tuple[str, float]]:
    """Return files and scales of the prompt's <lora:name:0.8> tags, as the WebUI's Lora extension loaded them.

    Raises InputError for a tag with dyn.
    """
    if importlib.util.find_spec("networks") is None:
        return []
    loaded = importlib.import_module("networks").loaded_networks
    if any(getattr(net, "dyn_dim", None) for net in loaded):
        raise InputError("A LoRA tag with dyn cuts the rank, which sd-ort does not.")
    return [(net.network_on_disk.filename, net.unet_multiplier) for net in loaded]


# --- Forge ----------------------------------------------------------------------------------------------------------


def forge_script() -> type[Any]:
    """Return the script class for Forge and reForge."""
    scripts, gradio = importlib.import_module("modules.scripts"), importlib.import_module("gradio")
    opened: dict[tuple[str, int | None], WebUNet] = {}  # by folder and the time of its manifest

    class SdOrtScript(scripts.Script):  # type: ignore[name-defined]
        def title(self) -> str:
            return TITLE

        def show(self, is_img2img: bool) -> Any:
            return scripts.AlwaysVisible

        def ui(self, *_: Any) -> list[Any]:
            with gradio.Accordion(TITLE, open=False):
                enabled = gradio.Checkbox(label="Generate with sd-ort", value=False)
                folder = gradio.Dropdown(label="Folder of models/sd_ort", choices=folders(models_root()))
            return [enabled, folder]

        def process_before_every_sampling(self, p: Any, enabled: bool, folder: str, *_: Any, **__: Any) -> None:
            if not enabled or not folder:
                return
            objects = p.sd_model.forge_objects
            manifest = models_root() / folder / MANIFEST
            key = folder, manifest.stat().st_mtime_ns if manifest.is_file() else None
            try:
                if key not in opened:
                    opened.clear()
                    opened[key] = WebUNet(manifest.parent)
                opened[key].use_loras(forge_loras(p.sd_model))
            except Exception as error:
                warn(error)
                return
            unet = objects.unet.clone()
            unet.set_model_unet_function_wrapper(forge_wrapper(opened[key]))
            objects.unet = unet

    return SdOrtScript


def forge_loras(model: Any) -> list[tuple[str, float]]:
    """Return files and scales of the LoRAs of the WebUI's model.

    Forge's Lora extension stores them in the UNet's patcher, reForge's in the model as text. Raises InputError if
    something else changed the weights.
    """
    patcher = model.forge_objects.unet
    if hasattr(patcher, "lora_patches"):
        return [(str(key[0]), float(key[1])) for key in patcher.lora_patches]
    named = ast.literal_eval(getattr(model, "current_lora_hash", None) or "[]")
    if patcher.patches and not named:
        raise InputError("something that is no LoRA tag changes the weights of the WebUI's UNet.")
    return [(str(path), float(strength)) for path, strength, *_ in named]


def forge_wrapper(unet: WebUNet) -> Callable[[Any, dict[str, Any]], Any]:
    """Return Forge's UNet function wrapper: it calls `apply_model` with `unet` as the diffusion model."""

    def wrapper(apply_model: Any, arguments: dict[str, Any]) -> Any:
        model = apply_model.__self__
        original = model.diffusion_model
        inputs = arguments["input"], arguments["timestep"]
        try:
            model.diffusion_model = unet
            return apply_model(*inputs, **arguments["c"])
        except Exception as error:
            warn(error)
        finally:
            model.diffusion_model = original
        return apply_model(*inputs, **arguments["c"])

    return wrapper
