"""Our extension inside a WebUI's own modules, on the CPU; `webui.py --folder` starts it, one process a checkout.

    python scripts/checks/webui_run.py CHECKOUT FOLDER

FOLDER is the demo model, optimized. The host's modules are imported from its sources: its list of UNets, the function
that it puts in the UNet's place and its script base class; of Forge its model patcher, its model and its sampling
function too. What they import and this machine lacks (gradio, ...) is stubbed, and said: no page is started, and
the sampler, the prompt and the VAE are not the host's. Its UNet is the demo model's in torch. Prints one JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from stubs import Stubs

from sd_ort.demo import MODEL_DIR
from sd_ort.integrations.application_installers import CONTENT
from sd_ort.integrations.managed_folder import install_folder
from sd_ort.integrations.webui.extension import forge_loras

OWN = ("modules", "backend", "modules_forge", "ldm_patched", "packages_3rdparty")  # of the hosts
CPU = {"webui": ["--use-cpu", "all"], "forge": ["--always-cpu"], "reforge": ["--always-cpu"]}
stubs = Stubs()


def loaded(load: Callable[[], Any]) -> Any:
    """What `load` gives, which imports modules of the host. What they import and this machine lacks is stubbed."""
    while True:
        try:
            return load()
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing in {*OWN, *stubs.names, ""}:
                raise
            stubs.names.add(missing)
            for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
                del sys.modules[name]


def named(*names: str) -> list[Any]:
    """Modules."""
    return [importlib.import_module(name) for name in names]


def webui_modules() -> list[Any]:
    """Of AUTOMATIC1111, with its settings as they are before a user changes one."""
    (initial,) = named("modules.shared_init")
    initial.initialize()
    return named("modules.shared", "modules.sd_unet")


def forge_modules() -> list[Any]:
    """Of Forge."""
    parts = named("backend.patcher.unet", "backend.sampling.sampling_function", "backend.sampling.condition")
    named("modules.scripts")
    return parts


def reforge_modules() -> list[Any]:
    """Of reForge, with its settings as they are before a user changes one."""
    (arguments,) = named("ldm_patched.modules.args_parser")
    arguments.args.always_cpu = True
    (initial,) = named("modules.shared_init")
    initial.initialize()
    inner = ("samplers", "model_base", "supported_models", "conds")
    parts = named("modules_forge.unet_patcher", *(f"ldm_patched.modules.{name}" for name in inner))
    named("modules.scripts")
    return parts


class Theirs(torch.nn.Module):
    """The host's UNet: the demo model's, in torch, called as the hosts call theirs."""

    storage_dtype = computation_dtype = dtype = torch.float32
    load_device = offload_device = initial_device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel.from_pretrained(MODEL_DIR / "unet").eval()
        self.calls = 0

    def forward(self, x: Any, timesteps: Any = None, context: Any = None, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return self.unet(x, timesteps, context).sample


def inputs(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents (rows, 4, 16, 16), timesteps (rows,) and a prompt (rows, 77, 128)."""
    generator = torch.Generator().manual_seed(0)
    width = json.loads((MODEL_DIR / "unet" / "config.json").read_text())["cross_attention_dim"]
    x = torch.randn(rows, 4, 16, 16, generator=generator)
    return x, torch.full((rows,), 321.0), torch.randn(rows, 77, width, generator=generator)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float(f"{float((ours - theirs).abs().max() / theirs.abs().max()):.2g}")


def extension(root: Path) -> Any:
    """What the host would import: the script that `sd-ort install-host` writes, run as the host runs it."""
    install_folder(root / "extensions" / "sd-ort", CONTENT["webui"]())
    (script,) = (root / "extensions" / "sd-ort" / "scripts").glob("*.py")
    return named("modules.script_loading")[0].load_module(str(script))


def in_webui(root: Path) -> dict[str, Any]:
    """AUTOMATIC1111 and its AMD fork: listed, chosen, called through the host's own forward, refused, let go."""
    shared, sd_unet = loaded(webui_modules)
    theirs = Theirs()
    own = theirs.forward
    model = SimpleNamespace(
        model=SimpleNamespace(diffusion_model=theirs), lowvram=False,
        sd_checkpoint_info=SimpleNamespace(model_name="demo"),
    )  # fmt: skip
    # Where the host's `shared.sd_model` looks; the real module wants Stability's repository.
    sd_models = ModuleType("modules.sd_models")
    sd_models.__dict__["model_data"] = SimpleNamespace(get_sd_model=lambda: model)
    sys.modules["modules.sd_models"] = sd_models
    sys.modules["modules"].__dict__["sd_models"] = sd_models
    stubs.names.add("modules.sd_models")
    extension(root)
    sd_unet.list_unets()
    labels = [option.label for option in sd_unet.unet_options]
    hooked = type("Hooked", (Theirs,), {"forward": sd_unet.create_unet_forward(Theirs.forward)})
    theirs.__class__ = hooked
    x, t, context = inputs()
    expected = own(x, t, context)
    sd_unet.apply_unet("Automatic")  # the folder and the checkpoint have one name
    before = theirs.calls
    drawn = theirs(x, t, context)
    found: dict[str, Any] = {"listed": labels, "off": off(drawn, expected), "host's UNet called": theirs.calls - before}
    drawn = theirs(x, t, context, unknown=torch.ones(1))
    found |= {"refused, off": off(drawn, expected), "host's UNet called then": theirs.calls - before}
    sd_unet.apply_unet("None")
    found["let go, off"] = off(theirs(x, t, context), expected)
    assert shared.sd_model is model
    return found


def in_forge(root: Path) -> dict[str, Any]:
    """Forge: our script on its patcher, called by its sampling function; LoRAs as its patcher keeps them."""
    unets, sampling, conditions = loaded(forge_modules)
    theirs = Theirs()
    scheduler = DDIMScheduler.from_pretrained(MODEL_DIR / "scheduler")
    patcher = unets.UnetPatcher.from_model(theirs, scheduler, config=SimpleNamespace())
    x, _, context = inputs(1)
    conditionings = [conditions.compile_conditions(c) for c in (context, context * 0.5)]

    def predicted(unet: Any) -> torch.Tensor:
        return torch.cat(
            sampling.calc_cond_uncond_batch(unet.model, *conditionings, x, torch.tensor([3.0]), unet.model_options)
        )

    model = SimpleNamespace(forge_objects=SimpleNamespace(unet=patcher))
    found = hooked_by_script(root, model, theirs, predicted)
    patcher.add_patches(filename="some.safetensors", patches={}, strength_patch=0.8)
    return found | {"LoRAs": forge_loras(model)}


def in_reforge(root: Path) -> dict[str, Any]:
    """reForge, whose backend is another than Forge's; LoRAs as it keeps them."""
    unets, samplers, bases, supported, conds = loaded(reforge_modules)
    theirs = Theirs()
    described = supported.SD15({"disable_unet_model_creation": True})
    described.unet_config["disable_unet_model_creation"] = True
    described.manual_cast_dtype = None
    base = bases.BaseModel(described)
    base.diffusion_model = theirs
    patcher = unets.UnetPatcher(base, torch.device("cpu"), torch.device("cpu"))
    x, _, context = inputs(1)
    conditionings = [[{"model_conds": {"c_crossattn": conds.CONDCrossAttn(c)}}] for c in (context, context * 0.5)]

    def predicted(unet: Any) -> torch.Tensor:
        return torch.cat(
            samplers.calc_cond_batch(unet.model, conditionings, x, torch.tensor([3.0]), unet.model_options)
        )

    model = SimpleNamespace(forge_objects=SimpleNamespace(unet=patcher), current_lora_hash=str([]))
    found = hooked_by_script(root, model, theirs, predicted)
    model.current_lora_hash = str([["some.safetensors", 0.8, 1.0]])  # as its Lora extension writes it
    return found | {"LoRAs": forge_loras(model)}


def hooked_by_script(
    root: Path, model: Any, theirs: Theirs, predicted: Callable[[Any], torch.Tensor]
) -> dict[str, Any]:
    """Our script on the host's `model` with the checkbox on, with something that is refused, and off again."""
    patcher = model.forge_objects.unet
    expected = predicted(patcher)
    script, request = extension(root).Script(), SimpleNamespace(sd_model=model)
    script.process_before_every_sampling(request, True, "demo")
    unet = model.forge_objects.unet
    before = theirs.calls
    found: dict[str, Any] = {
        "patched": unet is not patcher,
        "off": off(predicted(unet), expected),
        "host's UNet called": theirs.calls - before,
    }
    options = unet.model_options.setdefault("transformer_options", {})
    options["patches"] = {"output_block_patch": [lambda *a: a]}  # as FreeU
    found |= {"refused, off": off(predicted(unet), expected), "host's UNet called then": theirs.calls - before}
    model.forge_objects.unet = patcher
    script.process_before_every_sampling(request, False, "demo")
    return found | {"let go": model.forge_objects.unet is patcher}


@torch.no_grad()
def main(checkout: Path, folder: Path) -> None:
    """Run the extension in the checkout's modules."""
    kind = next(
        (k for k, part in (("forge", "backend"), ("reforge", "ldm_patched")) if (checkout / part).is_dir()), "webui"
    )
    with tempfile.TemporaryDirectory(prefix="sd-ort-webui-") as base:
        root = Path(base)
        (root / "models" / "sd_ort").mkdir(parents=True)
        (root / "models" / "sd_ort" / "demo").symlink_to(folder.absolute(), target_is_directory=True)
        (root / "ldm" / "models" / "diffusion").mkdir(parents=True)
        (root / "ldm" / "models" / "diffusion" / "ddpm.py").touch()  # by which the host knows Stability's repository
        stubs.names.add("ldm")
        os.chdir(root)
        sys.meta_path.insert(0, stubs)
        sys.path.insert(0, str(checkout))
        sys.argv = ["webui.py", "--data-dir", base, *CPU[kind]]
        found = {"forge": in_forge, "reforge": in_reforge, "webui": in_webui}[kind](root)
    modules = [n for n in sys.modules if n.split(".")[0] in OWN and n not in stubs.names]
    print(
        "\n" + json.dumps({"kind": kind, **found, "stubbed": sorted(stubs.names), "modules of the host": len(modules)})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
