"""One replica: a pipeline that generates batches of images as PNG files.

It runs in a Ray actor, in another process (tests, scripts), or in the calling process (a prompt list without Ray).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, SdOrtError, describe_error
from sd_ort.core.pipeline_folder import MODEL, check_not_merged, components, read_index
from sd_ort.runtime import visible_devices
from sd_ort.serving.image_jobs import ImageJob, ModelInfo


def no_setup(pipeline: Any) -> None:
    """Leave the pipeline as it was loaded."""


@dataclass(frozen=True)
class ReplicaConfig:
    """Configuration from which a replica loads its pipeline.

    folder: pipeline folder.
    load_options: further arguments of `from_pretrained`.
    setup: called with the loaded pipeline, for example to add LoRAs.
    loras: name and default scale of each LoRA that `setup` adds and requests may scale.
    variants: name and folder of pipelines to compare with; a folder of torch weights is opened by diffusers.
    call_options: further arguments of each pipeline call.
    png_text: text of each PNG file in addition to `ImageJob.png_text`.
    environment: variables that restrict the process to one GPU; without effect after ONNX Runtime was imported.
    """

    folder: Path
    load_options: Mapping[str, Any] = field(default_factory=dict)
    setup: Callable[[Any], None] = no_setup
    loras: tuple[tuple[str, float], ...] = ()
    variants: tuple[tuple[str, Path], ...] = ()
    call_options: Mapping[str, Any] = field(default_factory=dict)
    png_text: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def replica_configs(
    config: ReplicaConfig, gpus: int | None, replicas: int | None, threads: int | None
) -> list[ReplicaConfig]:
    """Return one config per replica: one on each of `gpus` GPUs, else `replicas` (default 1) on one device.

    `threads`: CPU threads per replica; None for its share of the cores. Raises InputError for a folder or a scheduler
    that replicas cannot use, or missing GPUs; nothing is loaded.
    """
    from sd_ort import TRANSFORMER_PIPELINES, StableDiffusionPipeline
    from sd_ort.pipelines.scheduler import PipelineScheduler

    if (kind := read_index(config.folder).get("_class_name")) in TRANSFORMER_PIPELINES:
        raise InputError(
            f"{config.folder} holds a {kind}: replicas and lists of prompts are for U-Nets. Give one PROMPT to "
            "`sd-ort generate`, without --gpus and --replicas."
        )
    StableDiffusionPipeline.check_folder(config.folder)
    if scheduler := config.load_options.get("scheduler"):
        PipelineScheduler(config.folder, scheduler)
    check_not_merged(config.folder, components(config.folder))
    if gpus and replicas:
        raise InputError("--gpus N starts a replica on each of N GPUs, --replicas N starts N on one device: pass one.")
    environments = (
        visible_devices.per_gpu_environments(str(config.load_options["provider"]), gpus)
        if gpus
        else [{}] * (replicas or 1)
    )
    load_options = {**config.load_options, "threads": threads or visible_devices.threads_per_process(len(environments))}
    return [replace(config, load_options=load_options, environment=environment) for environment in environments]


class PipelineReplica:
    """A loaded pipeline. Create it in a process that has not imported ONNX Runtime yet."""

    def __init__(self, config: ReplicaConfig) -> None:
        """Load the model. Raises SdOrtError if the model cannot be used."""
        os.environ.update(config.environment)
        from sd_ort import StableDiffusionPipeline
        from sd_ort.checkpoints.configs import scheduler_config
        from sd_ort.checkpoints.generation_defaults import generation_defaults

        self.config = config
        self.writers = ThreadPoolExecutor(4)
        self.pipeline: Any = StableDiffusionPipeline.from_pretrained(config.folder, **config.load_options)
        self.pipelines: dict[str, Any] = {"": self.pipeline}
        for name, folder in config.variants:
            options = config.load_options
            from_torch = not any(folder.glob(f"*/{MODEL}"))
            self.pipelines[name] = (
                TorchPipeline(folder, str(options["provider"]), options.get("scheduler"))
                if from_torch
                else StableDiffusionPipeline.from_pretrained(folder, **options)
            )
        for pipeline in self.pipelines.values():
            config.setup(pipeline)
        self.model = ModelInfo(
            default_size=self.pipeline.default_size,
            size_multiple=self.pipeline.size_multiple,
            **generation_defaults(config.folder)._asdict(),
            train_timesteps=scheduler_config(config.folder).get("num_train_timesteps", 1000),
            pid=os.getpid(),
            loras=config.loras,
            variants=tuple(name for name, _ in config.variants),
        )
        self.lora_scales = dict.fromkeys(self.pipelines, config.loras)

    def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        """Return the PNG files of jobs with equal settings, generated as one batch. Raises SdOrtError on failure."""
        from sd_ort.pipelines.png import png_bytes

        settings = jobs[0].settings
        pipeline = self.pipelines[settings.variant]
        self._scale_loras(settings.variant, settings.loras or self.config.loras)
        images = pipeline(
            [job.prompt for job in jobs],
            height=settings.height or self.pipeline.default_size,
            width=settings.width or self.pipeline.default_size,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            negative_prompt=[job.negative for job in jobs],
            generator=[job.seed for job in jobs],
            progress=False,
            **self.config.call_options,
        ).images
        texts = [{**job.png_text(), **self.config.png_text} for job in jobs]
        return list(self.writers.map(png_bytes, images, texts))  # slower than a step; releases the GIL

    def _scale_loras(self, variant: str, loras: tuple[tuple[str, float], ...]) -> None:
        """Use LoRAs at these scales, unless the last batch of this pipeline did."""
        if loras != self.lora_scales[variant]:
            self.pipelines[variant].set_adapters([name for name, _ in loras], [scale for _, scale in loras])
            self.lora_scales[variant] = loras


class TorchPipeline:
    """diffusers' pipeline of a folder, called as ours: integers as seeds, and no progress bar."""

    def __init__(self, folder: Path, provider: str, scheduler: str | None) -> None:
        """Load it on the device of `provider`. Raises SdOrtError if it cannot be loaded, or with a scheduler."""
        if scheduler:
            raise InputError("--compare with torch keeps the model's scheduler: leave --scheduler out.")
        from sd_ort.checkpoints.torch_pipeline import torch_device, torch_pipeline

        self.pipeline = torch_pipeline(str(folder)).to(*torch_device(provider))
        self.load_lora_weights, self.set_adapters = self.pipeline.load_lora_weights, self.pipeline.set_adapters

    def __call__(self, prompts: list[str], *, generator: list[int], progress: bool, **arguments: Any) -> Any:
        """Return diffusers' output for the same arguments."""
        import torch

        return self.pipeline(
            prompts, generator=[torch.Generator().manual_seed(seed) for seed in generator], **arguments
        )


@dataclass(frozen=True)
class RemoteError:
    """An error of a replica in a form that every process can unpickle: one line, and the command's exit code."""

    line: str
    code: int

    def error(self) -> SdOrtError:
        """Return the error to raise in the calling process."""
        error = SdOrtError(self.line)
        error.exit_code = self.code
        return error


class Actor:
    """A `PipelineReplica` that another process calls. Errors are returned as `RemoteError` values."""

    replica: PipelineReplica

    def load(self, config: ReplicaConfig) -> ModelInfo | RemoteError:
        """Load the model. Call this once, first."""
        try:
            self.replica = PipelineReplica(config)
        except Exception as error:
            return RemoteError(*describe_error(error))
        return self.replica.model

    def generate(self, jobs: Sequence[ImageJob]) -> list[bytes] | RemoteError:
        """Call `PipelineReplica.generate`."""
        try:
            return self.replica.generate(jobs)
        except Exception as error:
            return RemoteError(*describe_error(error))
