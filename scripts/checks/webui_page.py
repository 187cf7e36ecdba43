"""A WebUI (AUTOMATIC1111's, its AMD fork, Forge), started whole: its own UNet's pictures and ours by its API; its page.

    python scripts/checks/webui_page.py --webui CHECKOUT --python PYTHON --folder FOLDER [--out X.json] [--page X.png]

CHECKOUT: its source, 1.10.1, or Forge of June 2025, with what its launcher clones in `repositories` (an empty
stable-diffusion-webui-assets will do); nothing in it is changed (of Forge a copy is run, see `webui_forge`). PYTHON:
one that has what its requirements_versions.txt pins, torch, and sd-ort's needs; torchvision, torchaudio and OpenAI's
clip may be missing, they are stubbed. FOLDER: the demo model, optimized for the CPU. The demo checkpoint goes into a
data folder of its own, with two LoRAs with random weights and a folder that is broken. Its API draws with its own UNet
and with ours (Settings > SD Unet; Forge: a checkbox and a folder), without and with LoRA tags: at least 40 dB between
the two, and less between with and without. With the broken folder the host's own UNet must draw, and say so. For the
page: playwright, and a Chromium of this machine.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml  # type: ignore[import-untyped]
from PIL import Image

from scripts.checks.browser import free_port, opened
from scripts.checks.comfyui_expected import psnr
from scripts.checks.demo_files import MODEL, save_checkpoint, save_loras
from scripts.checks.webui_forge import FLAGS as FORGE_FLAGS
from scripts.checks.webui_forge import choice, choose, described, is_forge
from scripts.report import save_findings
from sd_ort.integrations.application_installers import CONTENT
from sd_ort.integrations.managed_folder import install_folder

PROMPT, SIDE, STEPS, GUIDANCE, SEED = "a red circle on a blue background", 128, 10, 3.0, 7
LORAS = " <lora:one:2> <lora:two:-1.5>"
MIN_PSNR = 40.0
PINNED = ("torch", "transformers", "diffusers", "numpy", "pillow", "gradio", "protobuf", "onnx", "onnxruntime")
FLAGS = ("--api", "--use-cpu", "all", "--no-half", "--skip-torch-cuda-test", "--skip-version-check",
         "--no-download-sd-model")  # fmt: skip


# --- What it works on -----------------------------------------------------------------------------------------------


def architecture(checkout: Path, clip: Path) -> dict[str, Any]:
    """The WebUI's description of SD 1.x, with the demo model's sizes; its text encoder is described in `clip`."""
    config: dict[str, Any] = yaml.safe_load((checkout / "configs" / "v1-inference.yaml").read_text())
    unet, vae = (json.loads((MODEL / part / "config.json").read_text()) for part in ("unet", "vae"))
    params = config["model"]["params"]
    params |= {"scale_factor": vae["scaling_factor"], "parameterization": "v"}  # it predicts velocities
    channels = unet["block_out_channels"]
    params["unet_config"]["params"] |= {
        "model_channels": channels[0],
        "channel_mult": [each // channels[0] for each in channels],
        "num_heads": unet["attention_head_dim"],
        "context_dim": unet["cross_attention_dim"],
    }
    channels = vae["block_out_channels"]
    sizes = {"ch": channels[0], "ch_mult": [each // channels[0] for each in channels]}
    params["first_stage_config"]["params"]["ddconfig"] |= sizes
    params["cond_stage_config"]["params"] = {"version": str(clip), "device": "cpu"}
    return config


def prepare(checkout: Path, folder: Path, data: Path) -> None:
    """The WebUI's data folder: extension, checkpoint, LoRAs, folders of ours, and settings of a user."""
    install_folder(data / "extensions" / "sd-ort", CONTENT["webui"]())
    models = data / "models"
    save_checkpoint(models / "Stable-diffusion" / "demo.safetensors")
    for part in ("tokenizer", "text_encoder"):
        shutil.copytree(MODEL / part, data / "clip", dirs_exist_ok=True)
    if not is_forge(checkout):  # which describes models by itself
        text = yaml.safe_dump(architecture(checkout, data / "clip"))
        (models / "Stable-diffusion" / "demo.yaml").write_text(text)
    save_loras(models / "Lora")
    shutil.copytree(folder, models / "sd_ort" / "demo")
    (models / "sd_ort" / "broken").mkdir()
    shutil.copy(folder / "sd_ort.json", models / "sd_ort" / "broken")
    settings = {
        "quicksettings_list": ["sd_model_checkpoint", "sd_unet"], "sd_unet": "[sd-ort] demo",
        "live_previews_enable": False,
    }  # fmt: skip
    if is_forge(checkout):
        settings |= {"sd_t2i_width": SIDE, "sd_t2i_height": SIDE, "sd_t2i_cfg": GUIDANCE}
    (data / "config.json").write_text(json.dumps(settings))
    sizes = {"Width": SIDE, "Height": SIDE, "CFG Scale": GUIDANCE, "Seed": SEED}
    (data / "ui-config.json").write_text(json.dumps({f"txt2img/{name}/value": v for name, v in sizes.items()}))


# --- The host -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(checkout: Path, python: Path, data: Path, log: Path) -> Iterator[str]:
    """The WebUI's address on this machine while it runs."""
    port = free_port()
    script = Path(__file__).with_name("webui_serve.py")
    flags = FORGE_FLAGS if is_forge(checkout) else FLAGS
    command = [str(python), str(script), str(checkout), *flags, "--port", port, "--data-dir", str(data)]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise click.ClickException(f"the WebUI did not start: {log.read_text().strip().splitlines()[-1]}")
            if "Startup time:" in log.read_text():  # its API answers before it is whole
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def generate(address: str, chosen: dict[str, Any], prompt: str = PROMPT) -> np.ndarray:
    """The image (H, W, 3), uint8, that its API draws with a UNet that was `chosen`."""
    fields = {
        "prompt": prompt, "seed": SEED, "steps": STEPS, "cfg_scale": GUIDANCE, "width": SIDE, "height": SIDE,
        "sampler_name": "Euler", **chosen,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/sdapi/v1/txt2img", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    try:
        answer = json.loads(urllib.request.urlopen(request, timeout=300).read())
    except urllib.error.HTTPError as error:
        raise click.ClickException(f"the WebUI refuses to draw: {error.read().decode()[:300]}") from error
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))).convert("RGB"))


def unet_of(folder: str) -> dict[str, Any]:
    """Return the API's arguments that select a folder of ours, or "" for AUTOMATIC1111's own UNet."""
    return {"override_settings": {"sd_unet": f"[sd-ort] {folder}" if folder else "None"}}


def photographed(address: str, out: Path, forge: bool) -> None:
    """The page after it has generated the prompt."""
    with opened(address, 1100, 1100 if forge else 820, 180) as page:
        page.fill("#txt2img_prompt textarea", PROMPT)
        if forge:
            choose(page, "demo")
        page.click("#txt2img_generate")
        page.wait_for_selector("#html_info_txt2img:has-text('Steps:')")
        page.wait_for_timeout(4000)  # for the image to be shown and the progress bar to go
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=str(out))


def pinned(python: Path) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PINNED!r}}}))"
    answered = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    report: dict[str, str] = json.loads(answered.stdout)
    return report


@click.command()
@click.option("--webui", "checkout", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--python", type=click.Path(path_type=Path, exists=True), required=True, help="The WebUI's.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), required=True, help="The demo model's.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here, .json and .md.")
@click.option("--page", type=click.Path(path_type=Path), help="Photograph the page into this .png.")
@click.option("--log", type=click.Path(path_type=Path), help="Keep the WebUI's log here.")
def main(checkout: Path, python: Path, folder: Path, out: Path | None, page: Path | None, log: Path | None) -> None:
    """Draw in the WebUI with its own UNet and with ours, and compare."""
    with tempfile.TemporaryDirectory(prefix="sd-ort-webui-") as work:
        data = Path(work)
        log = log or data / "log.txt"
        chosen = choice if is_forge(checkout) else unet_of
        source = described(checkout, data / "forge") if is_forge(checkout) else checkout.absolute()
        prepare(source, folder, data)
        with served(source, python.absolute(), data, log) as address:
            theirs, ours = (generate(address, chosen(name)) for name in ("", "demo"))
            theirs_lora, ours_lora = (generate(address, chosen(name), PROMPT + LORAS) for name in ("", "demo"))
            warned = "sd-ort:" in log.read_text()
            refused = generate(address, chosen("broken"))
            lines = [line for line in log.read_text().splitlines() if line.startswith("sd-ort:")]
            if page:
                photographed(address, page, is_forge(checkout))
    findings = {
        "checkout": checkout.name,
        "versions of the host": pinned(python),
        "PSNR of our UNet's picture to the host's, dB": round(psnr(ours, theirs), 1),
        "the same with two LoRA tags": round(psnr(ours_lora, theirs_lora), 1),
        "ours with the tags to ours without": round(psnr(ours_lora, ours), 1),
        "a broken folder's picture to the host's": round(psnr(refused, theirs), 1),
        "said then": [line.replace(str(data), "DATA") for line in lines[:1]],
    }
    save_findings("Our UNet in a WebUI, whole, on a CPU", "scripts/checks/webui_page.py", findings, out)
    assert not warned, "our UNet did not draw"
    assert len(lines) == 1, "a folder that cannot be used must be said, once"
    good = psnr(ours, theirs), psnr(ours_lora, theirs_lora), psnr(refused, theirs)
    assert min(good) >= MIN_PSNR, f"below {MIN_PSNR} dB"
    assert psnr(ours_lora, ours) < MIN_PSNR, "LoRAs that change nothing prove nothing"


if __name__ == "__main__":
    main()
