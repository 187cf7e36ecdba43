"""diffusers' attributes that all pipelines share: device and type, the last call, the progress bar, saving."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints.configs import Config, component_config
from sd_ort.core.errors import InputError
from sd_ort.core.paths import inside, output_path
from sd_ort.core.pipeline_folder import staged
from sd_ort.pipelines.state import PipelineState
from sd_ort.runtime.provider_choice import AUTO
from sd_ort.runtime.providers import warn_once

if TYPE_CHECKING:
    import torch

# Methods of diffusers' pipelines that are not there, and why; and those that change nothing.
REJECTED_METHODS = {
    "enable_model_cpu_offload": "components are opened one at a time with from_pretrained(..., low_memory=True)",
    "enable_sequential_cpu_offload": "components are opened one at a time with from_pretrained(..., low_memory=True)",
    "enable_group_offload": "components are opened one at a time with from_pretrained(..., low_memory=True)",
    "save_lora_weights": "LoRAs stay the files that they were loaded from",
    "set_lora_device": "LoRAs are added to weights where these are",
    "upcast_vae": "its type is chosen by `sd-ort optimize RAW OUT`, which measures where half precision fails",
}
NOOP_METHODS = dict.fromkeys((
    "enable_attention_slicing", "disable_attention_slicing", "enable_xformers_memory_efficient_attention",
    "disable_xformers_memory_efficient_attention", "fuse_qkv_projections", "unfuse_qkv_projections",
    "set_attention_slice", "set_use_memory_efficient_attention_xformers",
), "attention is fused in the graph") | dict.fromkeys((
    "maybe_free_model_hooks", "remove_all_hooks", "reset_device_map",
), "components have no hooks and one provider")  # fmt: skip


class PipelineMethods(PipelineState):
    """diffusers' properties and methods of pipelines of U-Nets and of transformers."""

    DENOISER = ("unet", "sample")  # component, and its input of the latents
    REJECTED_METHODS: Mapping[str, str] = REJECTED_METHODS
    progress_bar_config: Mapping[str, Any] = {}
    # Of the last call, under diffusers' names; a callback changes the guidance scale and ends the loop.
    _guidance_scale = 0.0
    _interrupt = False
    _num_timesteps = 0

    @classmethod
    def from_single_file(cls, file: Path | str, provider: str = AUTO, **options: Any) -> Any:
        """Load a checkpoint in one file, as `from_pretrained` does. Raises InputError if there is no such file."""
        if not isinstance(file, (str, Path)) or not Path(file).is_file():
            raise InputError(f"{file}: no such file.")
        kind: Any = cls
        return kind.from_pretrained(file, provider, **options)

    @property
    def config(self) -> Config:
        """The folder's model_index.json."""
        return Config(self.index)

    def _configured(self, name: str) -> Any:
        """Return a component's session with its config, or None."""
        if name not in self.models:
            return None
        model: Any = self.models[name]
        model.config = Config(component_config(self.folder, name))
        return model

    @property
    def text_encoder(self) -> Any:
        return self._configured("text_encoder")

    @property
    def text_encoder_2(self) -> Any:
        return self._configured("text_encoder_2")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the latents that the U-Net or transformer reads."""
        import torch

        component, latents = self.DENOISER
        return getattr(torch, np.dtype(self.models[component].dtype(latents)).name)

    @property
    def device(self) -> torch.device:
        """Device of the sessions."""
        import torch

        return torch.device("cpu" if self.models.device == "cpu" else "cuda")

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        """Steps of the last call that ran on the host."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether a callback set `_interrupt`, which ends the loop."""
        return self._interrupt

    def to(self, *targets: Any, **named: Any) -> Any:
        """This pipeline, if it is there already. Raises InputError for another device or type, with what to do."""
        own = "cpu" if self.models.device == "cpu" else "cuda"
        for target in (*targets, *named.values()):
            if isinstance(target, getattr(sys.modules.get("torch"), "dtype", ())):
                if target != self.dtype:
                    raise InputError(
                        f"this pipeline computes in {self.dtype}: its type is chosen by `sd-ort optimize RAW OUT`, "
                        "with --float16 or --bfloat16."
                    )
            elif target is not None and not isinstance(target, bool) and (device_type := _device_type(target)) != own:
                example = "cpu" if device_type == "cpu" else "cuda (or rocm, migraphx)"
                raise InputError(
                    f"this pipeline runs on {self.models.provider}: load it with from_pretrained(folder, "
                    f"provider=...), {example} for {device_type}."
                )
        return self

    def enable_vae_tiling(self) -> None:
        """Decode images larger than the model's own in overlapping tiles."""
        self.vae.enable_tiling()

    def disable_vae_tiling(self) -> None:
        self.vae.disable_tiling()

    def enable_vae_slicing(self) -> None:
        """Decode one image of a batch after the other."""
        self.vae.enable_slicing()

    def disable_vae_slicing(self) -> None:
        self.vae.disable_slicing()

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> Any:
        """Return tqdm's bar with the settings of `set_progress_bar_config`."""
        from tqdm.auto import tqdm

        return tqdm(iterable, total=total, **self.progress_bar_config)

    def set_progress_bar_config(self, **config: Any) -> None:
        """`disable=True` draws without a progress bar; other settings of tqdm change nothing."""
        self.progress_bar_config = config

    def __getattr__(self, name: str) -> Any:
        if name in NOOP_METHODS:
            return lambda *_, **__: warn_once(f"{name}() changes nothing: {NOOP_METHODS[name]}.")
        if name in self.REJECTED_METHODS:
            raise AttributeError(f"{name} is not there: {self.REJECTED_METHODS[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def save_pretrained(self, folder: Path | str, **_: Any) -> None:
        """Copy the pipeline's folder, its weights as they are on disk, without LoRAs.

        Raises OutputError when it cannot be written, and then nothing is left behind.
        """
        output = Path(folder)
        output_path(output, self.folder)
        with staged(output, self.folder) as work:
            for path in (path for path in self.folder.rglob("*") if path.is_file()):
                target = work / path.relative_to(self.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(inside(path, self.folder), target)


def _device_type(target: Any) -> str:
    """Return the type of a torch.device, of its text such as "cuda:0", or of the number of a GPU."""
    return "cuda" if isinstance(target, int) else str(target).partition(":")[0]
