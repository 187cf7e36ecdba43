"""Hosts' tensors on a GPU: what diffusers draws on our components beside our own call, and call by call.

    python scripts/checks/host_tensors_gpu.py FOLDER --provider cuda [--out results/hosts/host_tensors_h200.json]

FOLDER is the demo model, float16, as `plain_call.py make demo` writes it (WORK/demo/ours): trained, so that rounding
stays rounding. Three things must hold, else the exit status is 1:

- Pictures. The same noise through our own call and through diffusers' pipeline on our components, with tensors shared
  with torch and through the host's memory. From float32 latents, as our loop keeps them, at least 40 dB; what float16
  latents cost, which diffusers draws for itself, is written beside it.
- Calls. One UNet, captured or not, shared or not, must give what an uncaptured session gives for arrays: for changing
  numbers and shapes, inputs refilled in place behind queued work and overwritten right after the call, on torch's
  default stream and on another, and results kept over later calls.
- Inputs. All of a shared graph's lie where torch's tensors do: others would be copied when they are bound, unordered.

On a CPU, where nothing is shared, the same code runs over torch's memory there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import diffusers
import numpy as np
import torch

from scripts.report import save_findings
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.core.metrics import psnr
from sd_ort.integrations.diffusers import OrtTextEncoder, OrtUNet, OrtVae
from sd_ort.integrations.models import TorchComponentSessions

PROMPTS = ("a red circle on a blue background", "a small green square left of a yellow triangle on a white background")
SIZE = {"num_inference_steps": demo.STEPS, "guidance_scale": demo.GUIDANCE, "height": demo.HEIGHT, "width": demo.WIDTH}
MIN_PSNR = 40.0
MAX_OFF = 2e-2  # of the largest value: float16 kernels that ONNX Runtime chose anew for another session
SHAPES = ((2, 16, 16), (1, 16, 16), (2, 24, 16))  # rows, height and width of latents


def models_of(folder: Path, provider: str, share: bool, **options: Any) -> TorchComponentSessions:
    """A host's models; on a CPU, `share` takes the path that a GPU's shared tensors take."""
    models = TorchComponentSessions(folder, provider, share=share, **options)
    models.shared = models.shared or (share and provider == "cpu")
    if share and not models.shared:
        raise click.ClickException(f"torch and {provider} share no device here: torch sees {torch.cuda.device_count()}")
    return models


# --- Pictures -------------------------------------------------------------------------------------------------------


def in_diffusers(models: TorchComponentSessions) -> Any:
    """diffusers' own pipeline on the folder's components."""
    scheduler = diffusers.DDIMScheduler.from_pretrained(models.folder / "scheduler")
    pipeline = diffusers.StableDiffusionPipeline(
        OrtVae(models), OrtTextEncoder(models), models.tokenizer("text_encoder"), OrtUNet(models), scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pictures(folder: Path, provider: str) -> dict[str, float]:
    """Lowest PSNR of the prompts' pictures to our own call's, dB."""
    ours = StableDiffusionPipeline.from_pretrained(folder, provider, scheduler="ddim")
    shape = (1, ours.unet_config["in_channels"], demo.HEIGHT // 8, demo.WIDTH // 8)
    noises = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(len(PROMPTS))]
    expected = [
        np.asarray(ours(prompt, latents=noise, progress=False, **SIZE).images[0])
        for prompt, noise in zip(PROMPTS, noises, strict=True)
    ]
    assert all(picture.std() > 5 for picture in expected), "a flat picture proves nothing"
    found = {}
    for share in (False, True):
        hosted = in_diffusers(models_of(folder, provider, share))
        for dtype in (torch.float32, torch.float16):
            drawn = [
                np.asarray(hosted(prompt, latents=noise.to(hosted.device, dtype), **SIZE).images[0])
                for prompt, noise in zip(PROMPTS, noises, strict=True)
            ]
            decibels = [psnr(a, b) for a, b in zip(drawn, expected, strict=True)]
            found[f"share={share}, {str(dtype).removeprefix('torch.')} latents"] = round(min(decibels), 1)
    return found


# --- Calls ----------------------------------------------------------------------------------------------------------


def calls(folder: Path, provider: str, count: int) -> dict[str, Any]:
    """Largest difference of a call's result from the plain session's, over the largest value, for each way to call."""
    plain = OrtUNet(models_of(folder, provider, False, graph=False))
    config: dict[str, Any] = plain.models.unet_config
    generator = torch.Generator().manual_seed(0)
    feeds = [
        (
            torch.randn(rows, config["in_channels"], high, wide, generator=generator),
            float(1 + 37 * number % 999),
            torch.randn(rows, 77, config["cross_attention_dim"], generator=generator),
        )
        for number, (rows, high, wide) in enumerate(SHAPES[n // 3 % len(SHAPES)] for n in range(count))
    ]
    expected = [plain(*feed).sample.float().cpu() for feed in feeds]
    found: dict[str, Any] = {}
    for graph in (None, False):
        for share in (False, True):
            unet = OrtUNet(models_of(folder, provider, share, graph=graph))
            for stream in (False, True):
                with side_stream(stream, provider):
                    outs = refilled(unet, feeds, provider)
                off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(outs, expected, strict=True))
                name = f"share={share}, {'uncaptured' if graph is False else 'captured'}"
                found[f"{name}{', another stream' if stream else ''}"] = float(f"{off:.3g}")
            if share and graph is None:
                found["inputs not on the device"] = elsewhere(unet.models)
    return found


@contextlib.contextmanager
def side_stream(wanted: bool, provider: str) -> Iterator[None]:
    """Have torch work on another stream than its default one."""
    if not wanted or provider == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


def refilled(unet: OrtUNet, feeds: list[Any], provider: str) -> list[torch.Tensor]:
    """Results for all feeds: inputs of one shape are the same tensors, refilled behind work that is still queued, and
    spoiled as soon as the call returned. Results are read once all calls are made."""
    device = torch.device("cpu" if provider == "cpu" else "cuda")
    buffers: dict[Any, Any] = {}
    busy = torch.ones((64, 64) if provider == "cpu" else (4096, 4096), device=device)
    outs = []
    for sample, timestep, context in feeds:
        inputs = sample.to(device), context.to(device)
        here = buffers.setdefault(sample.shape, tuple(torch.zeros_like(tensor) for tensor in inputs))
        for _ in range(4):
            busy = (busy @ busy).clamp(max=1.0)
        for buffer, tensor in zip(here, inputs, strict=True):
            buffer.copy_(tensor * busy[0, 0])  # times one, once the products are done
        outs.append(unet(here[0], timestep, here[1]).sample)
        for buffer in here:
            buffer.fill_(float("nan"))
    return [out.float().cpu() for out in outs]


def elsewhere(models: TorchComponentSessions) -> dict[str, list[str]]:
    """Inputs that ONNX Runtime wants on another device than the models', by component. Newer ones tell (1.24)."""
    found = {}
    for name in ("text_encoder", "unet_prompt", "unet_time", "unet", "vae_decoder"):
        session: Any = models.models[name].session if name in models else None
        if hasattr(session, "get_input_memory_infos"):
            wanted = [info.name.lower() for info in session.get_input_memory_infos()]
            here = "cuda" if models.device.type == "cuda" else "cpu"
            found[name] = [n for n, at in zip(models.inputs(name), wanted, strict=True) if here not in at]
    return {name: names for name, names in found.items() if names}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--provider", default="cuda", show_default=True)
@click.option("--calls", "count", default=27, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(folder: Path, provider: str, count: int, out: Path | None) -> None:
    """Compare pictures and calls."""
    with torch.no_grad():
        drawn, called = pictures(folder, provider), calls(folder, provider, count)
    found = {"PSNR to our own call, dB": drawn, "UNet calls, largest difference": called}
    command = "scripts/checks/host_tensors_gpu.py FOLDER"
    save_findings("Hosts' tensors shared with ONNX Runtime, and not", command, found, out, provider=provider)
    not_here = called.pop("inputs not on the device")
    wrong = [name for name, value in drawn.items() if "float32" in name and value < MIN_PSNR]
    wrong += [name for name, value in called.items() if not value <= MAX_OFF]
    if wrong or not_here:
        raise click.ClickException(f"not as our own call: {wrong}; inputs elsewhere: {not_here}")


if __name__ == "__main__":
    main()
