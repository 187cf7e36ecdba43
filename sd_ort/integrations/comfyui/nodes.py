"""ComfyUI nodes: Load sd-ort model, diffusion model and ControlNet, Convert checkpoint, sd-ort info."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.utils
from comfy_api.latest import ComfyExtension, io

from sd_ort.core.errors import InputError, describe_error
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.core.progress import ProgressCallback
from sd_ort.integrations.comfyui import folders
from sd_ort.integrations.models import TorchComponentSessions, default_provider
from sd_ort.runtime.provider_choice import ORT_PROVIDERS

CATEGORY = "sd-ort"
PROVIDERS = ["auto", *ORT_PROVIDERS]
log = logging.getLogger("sd_ort")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise exceptions as RuntimeError with a message of one line, which ComfyUI shows in a box."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"sd-ort: {describe_error(error)[0]}") from error


def _progress_callback() -> ProgressCallback:
    """Return a callback that writes progress to ComfyUI's log and the node's progress bar, which has 12 steps."""
    bar = comfy.utils.ProgressBar(12)

    def on_progress(line: str) -> None:
        log.info("%s", line)
        bar.update(1)

    return on_progress


def _resolve(model: str, provider: str) -> tuple[Path, str | None]:
    """Return the pipeline folder, which a checkpoint becomes the first time, and the provider.

    None is the best provider for the folder's target.
    """
    auto = provider == "auto"
    folder = folders.resolve_folder(model, default_provider() if auto else provider, _progress_callback())
    return folder, None if auto else provider


def _inputs(models: list[str], tooltip: str = "A folder of models/sd_ort.") -> list[Any]:
    """Return the inputs of a node that opens one of `models`, on a provider."""
    return [
        io.Combo.Input("model", options=models, tooltip=tooltip),
        io.Combo.Input("provider", options=PROVIDERS, default="auto", tooltip="auto: the best one here."),
    ]


class LoadModel(io.ComfyNode):
    """Loads a pipeline folder, or a checkpoint that is converted once, as MODEL, CLIP and VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SdOrtLoadModel",
            display_name="Load sd-ort model",
            category=CATEGORY,
            description="Stable Diffusion on ONNX Runtime's fused graphs, for stock samplers, prompts and VAE nodes.",
            inputs=_inputs(
                [*folders.list_pipeline_folders(), *folders.checkpoints()],
                "A folder of models/sd_ort, or a checkpoint, which is converted the first time (minutes).",
            ),
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, model: str, provider: str) -> io.NodeOutput:
        from sd_ort.integrations.comfyui.clip import open_clip
        from sd_ort.integrations.comfyui.model import open_model
        from sd_ort.integrations.comfyui.vae import open_vae

        with one_line_errors():
            resolved = _resolve(model, provider)
            if "transformer" in TorchComponentSessions(*resolved):
                raise InputError(
                    f"{model} is a diffusion transformer: use Load sd-ort diffusion model, and ComfyUI's own loaders "
                    "of CLIP and VAE."
                )
            # Separate sessions, so that a LoRA of one does not reopen those of another.
            opened = [open_(TorchComponentSessions(*resolved)) for open_ in (open_model, open_clip, open_vae)]
            return io.NodeOutput(*opened)


class LoadDiffusionModel(io.ComfyNode):
    """Node that loads only the UNet or diffusion transformer of a pipeline folder, as MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SdOrtLoadDiffusionModel",
            display_name="Load sd-ort diffusion model",
            category=CATEGORY,
            description="FLUX.1, FLUX.2 klein, SD 3.5, Z-Image, Qwen-Image or a UNet; CLIP and VAE by stock loaders.",
            inputs=_inputs(folders.list_pipeline_folders()),
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: str, provider: str) -> io.NodeOutput:
        from sd_ort.integrations.comfyui.model import open_model

        with one_line_errors():
            return io.NodeOutput(open_model(TorchComponentSessions(*_resolve(model, provider))))


class LoadControlNet(io.ComfyNode):
    """Loads the ControlNet of a pipeline folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SdOrtLoadControlNet",
            display_name="Load sd-ort ControlNet",
            category=CATEGORY,
            inputs=_inputs(folders.list_pipeline_folders()),
            outputs=[io.ControlNet.Output()],
        )

    @classmethod
    def execute(cls, model: str, provider: str) -> io.NodeOutput:
        from sd_ort.integrations.comfyui.controlnet import open_controlnet

        with one_line_errors():
            return io.NodeOutput(open_controlnet(TorchComponentSessions(*_resolve(model, provider))))


class Convert(io.ComfyNode):
    """Converts a checkpoint of models/checkpoints to a pipeline folder in models/sd_ort."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SdOrtConvert",
            display_name="Convert checkpoint (sd-ort)",
            category=CATEGORY,
            is_output_node=True,
            inputs=[
                io.Combo.Input("checkpoint", options=folders.checkpoints()),
                io.String.Input("name", default="my-model", tooltip="The folder it becomes in models/sd_ort."),
                io.Combo.Input("target", options=[*PROVIDERS, "portable"], default="auto"),
                io.Boolean.Input("float16", default=True),
            ],
            outputs=[io.String.Output(display_name="folder")],
        )

    @classmethod
    def execute(cls, checkpoint: str, name: str, target: str, float16: bool) -> io.NodeOutput:
        with one_line_errors():
            folder = folders.convert(checkpoint, name, target, float16, _progress_callback())
        return io.NodeOutput(str(folder))


class Info(io.ComfyNode):
    """Shows fused nodes, provider, size and speed of an sd-ort MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SdOrtInfo",
            display_name="sd-ort info",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Latent.Input("after", optional=True, tooltip="Wait for a sampler.")],
            outputs=[io.String.Output(display_name="info")],
        )

    @classmethod
    def execute(cls, model: Any, after: Any = None) -> io.NodeOutput:
        with one_line_errors():
            return io.NodeOutput(describe(model))


def describe(model: Any) -> str:
    """Return fused nodes, provider, size and ms per step of an sd-ort MODEL, one per line."""
    net: Any = getattr(model.model, "diffusion_model", None)
    models = getattr(net, "models", None)
    if not isinstance(models, TorchComponentSessions):
        return "this MODEL is not sd-ort's"
    kind = {"unet": "UNet"}.get(net.component, net.component)
    manifest = read_manifest(models.folder)
    counts = manifest.get("components", {}).get(net.component, {}).get("op_counts", {})
    fused = ", ".join(f"{count} {op}" for op, count in counts.items())
    size = sum(path.stat().st_size for path in (models.folder / net.component).iterdir()) / 1e6
    steps = net.runner.seconds
    return "\n".join(
        [
            f"folder: {models.folder}",
            f"provider: {models.provider}, tensors on {models.device}, {net.dtype}",
            f"fused in the {kind}: {fused or 'nothing: the folder was not optimized'}",
            f"{kind} on disk: {size:.0f} MB",
            f"step: {1e3 * sorted(steps)[len(steps) // 2]:.1f} ms (median of {len(steps)})"
            if steps
            else "step: none yet",
        ]
    )


class SdOrtExtension(ComfyExtension):
    """ComfyUI's extension object with the list of nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadModel, LoadDiffusionModel, LoadControlNet, Convert, Info]
