"""The extension, imported by the host: finds out which one it is in, and hooks in where that host lets it.

    AUTOMATIC1111, its AMD fork   each folder is one more choice of Settings > SD Unet (`on_list_unets`)
    Forge and reForge             a checkbox and a choice of folder below the prompt (`process_before_every_sampling`)

What the graph cannot do is drawn by the host's own UNet, and said in a warning.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, explained
from sd_ort.hosts.webui.unet import WebUNet, folders

TITLE = "sd-ort"


def models_root() -> Path:
    """models/sd_ort of the host."""
    return Path(importlib.import_module("modules.paths").models_path) / "sd_ort"


def host() -> str:
    """ "forge" (or reForge) or "webui", by the packages that only one of them has."""
    forge = importlib.util.find_spec("modules_forge") or importlib.util.find_spec("ldm_patched")
    return "forge" if forge else "webui"


def warn(error: Exception) -> None:
    """One line for the console and, where gradio shows them, for the page."""
    line = f"sd-ort: {explained(error)[0]} The host's own UNet draws."
    print(line)
    try:
        importlib.import_module("gradio").Warning(line)
    except Exception:  # outside of a request gradio raises; the console has it
        return


def hook() -> type[Any] | None:
    """Hook into the host; the script class that Forge shows, None in a WebUI whose settings show the choice."""
    if host() == "forge":
        return forge_script()
    importlib.import_module("modules.script_callbacks").on_list_unets(list_unets)
    return None


# --- AUTOMATIC1111 --------------------------------------------------------------------------------------------------


def list_unets(unets: list[Any]) -> None:
    """Add a choice a folder to the host's list."""
    sd_unet = importlib.import_module("modules.sd_unet")

    class Option(sd_unet.SdUnetOption):  # type: ignore[name-defined]
        def __init__(self, name: str) -> None:
            self.model_name, self.label = name, f"[{TITLE}] {name}"

        def create_unet(self) -> Any:
            return webui_unet(models_root() / self.model_name)

    unets.extend(Option(name) for name in folders(models_root()))


def webui_unet(folder: Path) -> Any:
    """The host's SdUnet on a folder."""
    sd_unet = importlib.import_module("modules.sd_unet")

    class Unet(sd_unet.SdUnet):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.ours: WebUNet | None = None

        def activate(self) -> None:
            try:
                self.ours = WebUNet(folder)
            except Exception as error:
                warn(error)

        def deactivate(self) -> None:
            self.ours = None

        def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            if self.ours is not None:
                try:
                    self.ours.use_loras(webui_loras())
                    return self.ours(x, timesteps, context, *args, **kwargs)
                except Exception as error:
                    warn(error)
            return by_host(sd_unet, x, timesteps, context, *args, **kwargs)

    return Unet()


def by_host(sd_unet: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's own UNet for the rest of the request: it comes back from the CPU, where the host has moved it."""
    theirs = importlib.import_module("modules.shared").sd_model.model.diffusion_model
    theirs.to(x.device)
    active, sd_unet.current_unet = sd_unet.current_unet, None
    try:
        return theirs(x, *args, **kwargs)
    finally:
        sd_unet.current_unet = active


def webui_loras() -> list[tuple[str, float]]:
    """Files and strengths of the prompt's <lora:name:0.8> tags, as the host's Lora extension has loaded them."""
    if importlib.util.find_spec("networks") is None:
        return []
    loaded = importlib.import_module("networks").loaded_networks
    return [(net.network_on_disk.filename, net.unet_multiplier) for net in loaded]


# --- Forge ----------------------------------------------------------------------------------------------------------


def forge_script() -> type[Any]:
    """The script that Forge and reForge show and call."""
    scripts, gradio = importlib.import_module("modules.scripts"), importlib.import_module("gradio")
    opened: dict[str, WebUNet] = {}

    class SdOrtScript(scripts.Script):  # type: ignore[name-defined]
        def title(self) -> str:
            return TITLE

        def show(self, is_img2img: bool) -> Any:
            return scripts.AlwaysVisible

        def ui(self, *_: Any) -> list[Any]:
            with gradio.Accordion(TITLE, open=False):
                enabled = gradio.Checkbox(label="Draw with sd-ort", value=False)
                folder = gradio.Dropdown(label="Folder of models/sd_ort", choices=folders(models_root()))
            return [enabled, folder]

        def process_before_every_sampling(self, p: Any, enabled: bool, folder: str, *_: Any, **__: Any) -> None:
            if not enabled or not folder:
                return
            objects = p.sd_model.forge_objects
            try:
                if folder not in opened:
                    opened.clear()
                    opened[folder] = WebUNet(models_root() / folder)
                opened[folder].use_loras(forge_loras(p.sd_model))
            except Exception as error:
                warn(error)
                return
            unet = objects.unet.clone()
            unet.set_model_unet_function_wrapper(forge_wrapper(opened[folder]))
            objects.unet = unet

    return SdOrtScript


def forge_loras(model: Any) -> list[tuple[str, float]]:
    """Files and strengths of the LoRAs of the host's model: Forge's Lora extension keeps them on the UNet's patcher,
    reForge's beside the model, as text. Raises InputError where weights were changed by something else."""
    patcher = model.forge_objects.unet
    if hasattr(patcher, "lora_patches"):
        return [(str(key[0]), float(key[1])) for key in patcher.lora_patches]
    named = ast.literal_eval(getattr(model, "current_lora_hash", None) or "[]")
    if patcher.patches and not named:
        raise InputError("something that is no LoRA tag changes the weights of the host's UNet.")
    return [(str(path), float(strength)) for path, strength, *_ in named]


def forge_wrapper(ours: WebUNet) -> Callable[[Any, dict[str, Any]], Any]:
    """What Forge calls instead of `apply_model`: that, with our UNet in the place of the model's."""

    def wrapper(apply_model: Any, arguments: dict[str, Any]) -> Any:
        model = apply_model.__self__
        theirs = model.diffusion_model
        given = arguments["input"], arguments["timestep"]
        try:
            model.diffusion_model = ours
            return apply_model(*given, **arguments["c"])
        except Exception as error:
            warn(error)
        finally:
            model.diffusion_model = theirs
        return apply_model(*given, **arguments["c"])

    return wrapper
