"""Our nodes in the real ComfyUI, headless: its own executor runs the example workflows, the pictures are compared.

    python scripts/checks/comfyui.py --comfyui CHECKOUT [--out results/hosts/comfyui.json]

CHECKOUT is ComfyUI's source, 0.33.0 or later, of which nothing is changed: models, nodes and pictures lie in a
temporary folder. Its requirements must be installed beside sd-ort (einops, torchsde, comfy-aimdo, comfy-kitchen,
aiohttp, av, ...; torchvision and torchaudio may be missing, they are stubbed). The demo model is optimized for the CPU,
with a ControlNet and two LoRAs of made-up weights, and every workflow of sd_ort/hosts/comfyui/workflows is run. Text to
image, image to image, ControlNet and two LoRAs must draw what our own pipelines draw from the same noise (PSNR of the
8-bit pictures at least 40 dB); inpainting must keep what its mask leaves; a latent is enlarged and drawn over. Then
steps are timed inside ComfyUI's sampler and in our own loop, in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import diffusers
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from sd_ort import StableDiffusionPipeline, demo
from sd_ort.export.exporter import export
from sd_ort.hosts.diffusers import accelerate
from sd_ort.hosts.install import install_folder
from sd_ort.hosts.installers import CONTENT, HERE
from sd_ort.hosts.models import HostModels
from sd_ort.optimize.optimizer import optimize
from sd_ort.runtime import machine

WORKFLOWS = HERE / "comfyui" / "workflows"
PROMPT, SEED, STEPS, GUIDANCE, SIDE = "a red circle on a blue background", 7, 10, 3.0, 128
MIN_PSNR = 40.0
MODEL = Path(demo.__file__).parent / "model"


# --- ComfyUI without its server -------------------------------------------------------------------------------------


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision and torchaudio where they are missing: modules of which every name is an empty class."""

    NAMES = ("torchvision", "torchaudio")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        class Stub(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0"


class Server:
    """What the executor would tell a browser."""

    client_id = None
    last_node_id = None
    last_prompt_id = None
    sockets_metadata: dict[str, Any] = {}  # noqa: RUF012 (ComfyUI reads it)

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        """Nobody listens."""


def start(checkout: Path, base: Path) -> Any:
    """Import ComfyUI from its checkout, on the CPU, with models, custom nodes and pictures below `base`."""
    if not (checkout / "execution.py").is_file():
        raise click.ClickException(f"{checkout} is no checkout of ComfyUI: it has no execution.py.")
    if missing := [name for name in Stubs.NAMES if importlib.util.find_spec(name) is None]:
        click.echo(f"stubbed: {', '.join(missing)}")
        sys.meta_path.insert(0, Stubs())
    sys.path.insert(0, str(checkout))
    sys.argv = sys.argv[:1]
    cli_args = importlib.import_module("comfy.cli_args")
    cli_args.args.cpu, cli_args.args.base_directory = True, str(base)
    try:
        nodes, execution = importlib.import_module("nodes"), importlib.import_module("execution")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"ComfyUI needs {error.name}: pip install -r {checkout}/requirements.txt."
        ) from error
    asyncio.run(nodes.load_custom_node(str(base / "custom_nodes" / "sd_ort_nodes")))
    if "SdOrtLoadModel" not in nodes.NODE_CLASS_MAPPINGS:
        raise click.ClickException("ComfyUI did not load our nodes: see its log above.")
    return nodes, execution


def as_prompt(workflow: dict[str, Any]) -> dict[str, Any]:
    """A workflow of the editor as what its server is sent: node -> class and inputs."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        values, inputs = iter(node["widgets_values"]), {}
        for given in node["inputs"]:
            if "widget" in given:
                inputs[given["name"]] = next(values)
                if given["name"] == "seed":
                    next(values)  # what happens to it after a run
            elif given["link"] is not None:
                inputs[given["name"]] = links[given["link"]]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def run(execution: Any, prompt: dict[str, Any], output: Path) -> np.ndarray:
    """The picture (H, W, 3), uint8, that a prompt saves, by ComfyUI's own check and executor."""
    before = set(output.rglob("*.png"))
    name, server = str(uuid.uuid4()), Server()
    valid, error, outputs, why = asyncio.run(execution.validate_prompt(name, prompt, None))
    if not valid:
        raise click.ClickException(f"ComfyUI refuses the workflow: {error} {why}")
    arguments = {"lru": 0, "ram": 0, "ram_inactive": 0}
    executor = execution.PromptExecutor(server, cache_type=execution.CacheType.CLASSIC, cache_args=arguments)
    executor.execute(prompt, name, {}, outputs)
    if not executor.success:
        failed = [data for event, data in executor.status_messages if event == "execution_error"]
        reasons = "; ".join(f"{data['node_type']}: {data['exception_message'].strip()}" for data in failed)
        raise click.ClickException(f"ComfyUI's executor failed: {reasons}")
    (made,) = set(output.rglob("*.png")) - before
    return np.asarray(Image.open(made).convert("RGB"))


# --- What it works on -----------------------------------------------------------------------------------------------


def prepare(base: Path) -> None:
    """Folders of the demo model with and without a ControlNet, two LoRAs, pictures, and our nodes, below `base`."""
    generator = torch.Generator().manual_seed(0)
    unet = diffusers.UNet2DConditionModel.from_pretrained(MODEL / "unet")
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_channels=3)
    for parameter in net.parameters():
        if not parameter.any():  # its last layers begin at zero: a ControlNet that does nothing proves nothing
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    net.save_pretrained(base / "net")
    for name, controlnet in (("demo", None), ("demo-controlnet", str(base / "net"))):
        source = str(MODEL) if controlnet else "demo"
        export(source, base / "raw" / name, exporter="torchscript", controlnet=controlnet)
        optimize(base / "raw" / name, base / "models" / "sd_ort" / name, target="cpu")
    (base / "models" / "loras").mkdir()
    weights = {"unet": unet.state_dict()}
    block = "down_blocks.1.attentions.0.transformer_blocks.0"
    for name in ("one", "two"):
        lora = {}
        for module in (
            f"{block}.attn1.to_q",
            f"{block}.attn2.to_v",
            f"{block}.ff.net.0.proj",
            "down_blocks.0.resnets.0.conv1",
        ):
            out, *into = weights["unet"][f"{module}.weight"].shape
            key = f"lora_unet_{module.replace('.', '_')}"
            lora[f"{key}.lora_down.weight"] = torch.randn(4, *into, generator=generator) * 0.2
            lora[f"{key}.lora_up.weight"] = torch.randn(out, 4, *([1] * (len(into) - 1)), generator=generator) * 0.2
            lora[f"{key}.alpha"] = torch.tensor(2.0)
        key = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
        lora[f"{key}.lora_down.weight"] = torch.randn(4, 128, generator=generator) * 0.1
        lora[f"{key}.lora_up.weight"] = torch.randn(128, 4, generator=generator) * 0.1
        save_file(lora, base / "models" / "loras" / f"{name}.safetensors")
    y, x = np.mgrid[:SIDE, :SIDE]
    pixels = np.stack([2 * x, 2 * y, 255 - x - y], -1).clip(0, 255).astype(np.uint8)
    (base / "input").mkdir()
    Image.fromarray(pixels).save(base / "input" / "picture.png")
    alpha = np.full((SIDE, SIDE), 255, np.uint8)
    alpha[: SIDE // 2] = 0  # ComfyUI draws where a picture is transparent
    Image.fromarray(np.dstack([pixels, alpha])).save(base / "input" / "masked.png")
    install_folder(base / "custom_nodes" / "sd_ort_nodes", CONTENT["comfyui"]())


# --- The same pictures from our own pipelines -----------------------------------------------------------------------


def euler(folder: Path) -> Any:
    """diffusers' scheduler of ComfyUI's sampler `euler` with its scheduler `normal`."""
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    return diffusers.EulerDiscreteScheduler.from_config(config, timestep_spacing="linspace")


def ours(folder: Path, **more: Any) -> np.ndarray:
    """Text to image by `StableDiffusionPipeline`, from the noise that ComfyUI begins with; uint8."""
    loras = more.pop("loras", {})
    scheduler = euler(folder)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, scheduler=scheduler)
    for path in loras:
        pipeline.load_lora_weights(path, path.stem)
    if loras:
        pipeline.set_adapters([path.stem for path in loras], list(loras.values()))
    scheduler.set_timesteps(STEPS)
    top = float(scheduler.sigmas[0])
    noise = torch.randn((1, 4, SIDE // 8, SIDE // 8), generator=torch.Generator().manual_seed(SEED))
    # ComfyUI begins with sqrt(1 + sigma^2) of the noise, diffusers' euler at these timesteps with sigma of it.
    arguments = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE}
    start = noise * (1 + top**2) ** 0.5 / top
    drawn = pipeline(PROMPT, latents=start, output_type="np", progress=False, **arguments, **more).images
    return eight_bits(drawn[0])


def ours_from_picture(folder: Path, picture: Image.Image) -> np.ndarray:
    """Image to image on the same components, from the mean of the picture's latents, as ComfyUI encodes; uint8."""
    torchs = diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(
        MODEL, safety_checker=None, requires_safety_checker=False, feature_extractor=None
    )
    pipeline = accelerate(torchs, folder, provider="cpu")
    pipeline.scheduler = euler(folder)
    pixels = torch.from_numpy(np.asarray(picture, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    moments = HostModels(folder, "cpu").run("vae_encoder", sample=pixels)["latent_parameters"]
    latents = moments.chunk(2, 1)[0] * pipeline.vae.config.scaling_factor
    generator = torch.Generator().manual_seed(SEED)
    drawn = pipeline(
        PROMPT, image=latents, strength=0.5, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generator,
        output_type="np",
    ).images  # fmt: skip
    return eight_bits(drawn[0])


def there_and_back(folder: Path, picture: Image.Image) -> np.ndarray:
    """The picture through the VAE and back; uint8."""
    models = HostModels(folder, "cpu")
    pixels = torch.from_numpy(np.asarray(picture, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    latents = models.run("vae_encoder", sample=pixels)["latent_parameters"].chunk(2, 1)[0]
    decoded = models.run("vae_decoder", latent_sample=latents)["sample"][0].permute(1, 2, 0).numpy()
    return eight_bits((decoded / 2 + 0.5).clip(0, 1))


def eight_bits(picture: np.ndarray) -> np.ndarray:
    """As ComfyUI saves pictures."""
    return (255.0 * picture).clip(0, 255).astype(np.uint8)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """dB between two 8-bit pictures, of which the second must not be flat."""
    assert a.shape == b.shape, f"{a.shape} and {b.shape}"
    assert b.std() > 10, "a flat picture proves nothing"
    return float(10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-6)))


# --- Time a step ----------------------------------------------------------------------------------------------------


def step_times(nodes: Any, folder: Path, side: int, rounds: int, steps: int = 12) -> dict[str, Any]:
    """Median ms between two steps of ComfyUI's sampler and of our own loop, in turn; the first steps are left out."""
    from sd_ort.hosts.comfyui.clip import open_clip
    from sd_ort.hosts.comfyui.model import open_model

    loaded, clip = open_model(HostModels(folder, "cpu")), open_clip(HostModels(folder, "cpu"))
    told = [nodes.CLIPTextEncode().encode(clip, text)[0] for text in (PROMPT, "")]
    latent = {"samples": torch.zeros(1, 4, side // 8, side // 8)}
    pipeline = StableDiffusionPipeline.from_pretrained(folder, scheduler=euler(folder))
    sample = importlib.import_module("comfy.sample")
    noise = sample.prepare_noise(latent["samples"], SEED)

    def theirs(at: list[float]) -> None:
        def callback(*_: Any) -> None:
            at.append(time.perf_counter())

        with torch.inference_mode():
            sample.sample(
                loaded, noise, steps, GUIDANCE, "euler", "normal", *told, latent["samples"], callback=callback,
                disable_pbar=True, seed=SEED,
            )  # fmt: skip

    def own(at: list[float]) -> None:
        def callback(*_: Any) -> None:
            at.append(time.perf_counter())

        pipeline(
            PROMPT, num_inference_steps=steps, guidance_scale=GUIDANCE, height=side, width=side, generator=SEED,
            callback_on_step_end=callback, progress=False, output_type="latent",
        )  # fmt: skip

    found: dict[str, list[float]] = {"ComfyUI": [], "own loop": []}
    ratios = []
    for _ in range(rounds):
        medians = {}
        for name, draw in (("ComfyUI", theirs), ("own loop", own)):
            at: list[float] = []
            draw(at)
            medians[name] = statistics.median(np.diff(at)[2:]) * 1e3
            found[name].append(medians[name])
        ratios.append(medians["ComfyUI"] / medians["own loop"])
    return {
        "pixels": side,
        "rounds": rounds,
        "ms a step": {name: round(statistics.median(values), 2) for name, values in found.items()},
        "ComfyUI of own loop": round(statistics.median(ratios), 3),
    }


# --- All of it ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace(given: Path | None) -> Iterator[Path]:
    """A temporary folder, or the one given, which is kept."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="sd-ort-comfyui-") as folder:
        yield Path(folder)


@click.command()
@click.option("--comfyui", type=click.Path(path_type=Path), required=True, help="A checkout of ComfyUI.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep models and pictures here, and use what is there.")
@click.option("--rounds", type=int, default=7, show_default=True, help="Of the times; 0 for none.")
@click.option("--side", type=int, default=256, show_default=True, help="Pixels of the timed pictures' sides.")
def main(comfyui: Path, out: Path | None, work: Path | None, rounds: int, side: int) -> None:
    """Run the example workflows in ComfyUI and compare their pictures with our own pipelines'."""
    torch.set_num_threads(1)
    with workplace(work) as base:
        if not (base / "custom_nodes").is_dir():
            prepare(base)
        install_folder(base / "custom_nodes" / "sd_ort_nodes", CONTENT["comfyui"]())
        nodes, execution = start(comfyui.absolute(), base)
        folders, loras = base / "models" / "sd_ort", base / "models" / "loras"
        picture = Image.open(base / "input" / "picture.png")
        expected = {
            "text_to_image": lambda: ours(folders / "demo"),
            "image_to_image": lambda: ours_from_picture(folders / "demo", picture),
            "two_loras": lambda: ours(
                folders / "demo", loras={loras / "one.safetensors": 0.8, loras / "two.safetensors": -0.5}
            ),
            "controlnet": lambda: ours(
                folders / "demo-controlnet", control_image=picture, controlnet_conditioning_scale=0.7
            ),
        }
        pictures = {
            path.stem: run(execution, as_prompt(json.loads(path.read_text())), base / "output")
            for path in sorted(WORKFLOWS.glob("*.json"))
        }
        found = {name: round(psnr(pictures[name], make()), 1) for name, make in expected.items()}
        differs = {
            name: round(psnr(pictures[name], pictures["text_to_image"]), 1) for name in ("two_loras", "controlnet")
        }
        there = there_and_back(folders / "demo", picture)
        lower = slice(SIDE * 3 // 4, None)  # well below the mask, whose edge the VAE smears
        kept = psnr(pictures["inpainting"][lower], there[lower])
        drawn = psnr(pictures["inpainting"][: SIDE // 2], there[: SIDE // 2])
        findings = {
            "machine": machine.machine(),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "ComfyUI": importlib.import_module("comfyui_version").__version__,
            "PSNR to our own pipelines, dB": found,
            "PSNR to text to image without them, dB": differs,
            "inpainting": {"kept, dB": round(kept, 1), "drawn over, dB": round(drawn, 1)},
            "latent upscale": list(pictures["latent_upscale"].shape),
            "times": step_times(nodes, folders / "demo", side, rounds) if rounds else None,
        }
        if work:
            shutil.rmtree(base / "compared", ignore_errors=True)
            (base / "compared").mkdir()
            for name, made in pictures.items():
                Image.fromarray(made).save(base / "compared" / f"{name}.png")
    text = json.dumps(findings, indent=1)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    assert all(value >= MIN_PSNR for value in found.values()), f"below {MIN_PSNR} dB"
    assert all(value < MIN_PSNR for value in differs.values()), (
        "a LoRA or ControlNet that changes nothing proves nothing"
    )
    assert kept > drawn + 10, "the mask was not kept"
    assert pictures["latent_upscale"].shape == (SIDE * 3 // 2, SIDE * 3 // 2, 3)


if __name__ == "__main__":
    main()
