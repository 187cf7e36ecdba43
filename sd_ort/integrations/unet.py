"""Runner of a folder's UNet for applications: hoisted or not, with ControlNet residuals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from sd_ort.checkpoints.signatures import residual_axes, size
from sd_ort.core.errors import InputError
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.tensors import Tensors

MIDDLE = "mid_block_additional_residual"


class UNetRunner:
    """Computes the UNet's prediction in each step, and the prompt graph of a hoisted UNet once per prompt."""

    def __init__(self, models: TorchComponentSessions) -> None:
        self.models = models
        self.residual_names = [n for n in models.inputs("unet") if n.startswith("down_block_res_sample_")]
        self.hoisted = "unet_prompt" in models
        self.prompt: Tensors = {}
        self.conditioning: Sequence[torch.Tensor] = ()
        self.prompt_cache_key: tuple[Any, ...] | None = None
        self.seconds: deque[float] = deque(maxlen=100)  # host time of the last calls; on a GPU until they are enqueued

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        conditioning: Mapping[str, torch.Tensor],
        residuals: Sequence[torch.Tensor] = (),
        middle: torch.Tensor | None = None,
        key: Hashable = None,
    ) -> torch.Tensor:
        """Return the prediction (B, C, h, w) in the dtype and on the device of `sample`.

        Args:
            sample: scaled latents (B, C, h, w).
            timestep: a scalar, or equal timesteps (B,).
            conditioning: the other inputs by name, each (B, ...).
            residuals, middle: residuals of a ControlNet, outermost first, and of the middle block.
            key: cache key of `conditioning`: equal keys mean equal tensors. Without, the tensors are compared.

        Raises:
            InputError: if the graph does not have an input, or an input of the graph is missing.
        """
        started = time.perf_counter()
        models = self.models
        timesteps = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1)
        if timesteps.device.type == "cpu" and len(timesteps) > 1 and not bool((timesteps == timesteps[0]).all()):
            raise InputError("the batch has different timesteps: this graph has one timestep for the batch.")
        feed = {"sample": sample, **self._residual_inputs(sample, residuals, middle)}
        zero_copy_inputs: Tensors = {}
        if self.hoisted:
            prompt = self._prompt_outputs(conditioning, key)
            rows = timesteps if len(timesteps) == len(sample) else timesteps[:1].expand(len(sample))
            available = {**prompt, "timestep": rows}
            time_inputs = {name: available[name] for name in models.inputs("unet_time")}
            zero_copy_inputs = {**prompt, **models.call("unet_time", time_inputs, reuse_outputs=True)}
        else:
            feed |= conditioning
        names = models.inputs("unet")
        zero_copy_inputs = {name: tensor for name, tensor in zero_copy_inputs.items() if name in names}
        if "timestep" in names:
            rank = len(models.models["unet"].inputs["timestep"].shape)
            feed["timestep"] = timesteps[:1].reshape((1,) * rank)
        if missing := [name for name in names if name not in feed and name not in zero_copy_inputs]:
            raise InputError(
                f"the UNet of {models.folder} needs {', '.join(missing)}, which this pipeline does not provide."
            )
        out = models.call("unet", {n: feed[n] for n in names if n not in zero_copy_inputs}, zero_copy_inputs)[
            "out_sample"
        ]
        self.seconds.append(time.perf_counter() - started)
        return out.to(sample.device, sample.dtype)

    def _prompt_outputs(self, conditioning: Mapping[str, torch.Tensor], key: Hashable) -> Tensors:
        """Return the outputs of the prompt graph; compute them only for another prompt or updated weights."""
        tensors = list(conditioning.values())
        cache_key = (key, self.models.weights_version, *(tuple(t.shape) for t in tensors))
        if key is None:  # torch counts in-place changes of a tensor, except in inference mode
            cache_key = (*cache_key, *(None if t.is_inference() else t._version for t in tensors))
        same_tensors = key is not None or (
            all(a is b for a, b in zip(tensors, self.conditioning, strict=False))
            and not any(t.is_inference() for t in tensors)
        )
        if not (same_tensors and cache_key == self.prompt_cache_key):
            names = self.models.inputs("unet_prompt")
            self.prompt = self.models.call(
                "unet_prompt", {name: conditioning[name] for name in names}, reuse_outputs=True
            )
            self.prompt_cache_key, self.conditioning = cache_key, tensors
        return self.prompt

    def _residual_inputs(
        self, sample: torch.Tensor, residuals: Sequence[torch.Tensor], middle: torch.Tensor | None
    ) -> Tensors:
        if not self.residual_names:
            if residuals or middle is not None:
                raise InputError(
                    f"the UNet of {self.models.folder} takes no ControlNet: export it again with --controlnet."
                )
            return {}
        if not residuals:
            return self._zero_residuals(sample)
        if len(residuals) != len(self.residual_names):
            raise InputError(
                f"{len(residuals)} residuals of a ControlNet for {len(self.residual_names)} skip connections: "
                "it is for another model."
            )
        named = dict(zip(self.residual_names, residuals, strict=True))
        return {**named, MIDDLE: torch.zeros_like(residuals[-1]) if middle is None else middle}

    def _zero_residuals(self, sample: torch.Tensor) -> Tensors:
        """Return zeros for all residuals, as from a ControlNet with conditioning scale 0."""
        sizes = {"batch": len(sample), "height": sample.shape[2], "width": sample.shape[3]}
        axes = residual_axes(self.models.unet_config)
        dtype = self.models.dtype("unet")
        zeros = [torch.zeros([size(a, sizes) for a in each], dtype=dtype, device=sample.device) for each in axes]
        return {**dict(zip(self.residual_names, zeros, strict=True)), MIDDLE: torch.zeros_like(zeros[-1])}


def reject_patches(options: Mapping[str, Any]) -> None:
    """Raise InputError for ComfyUI's or Forge's patches of UNet layers (FreeU, IP-Adapter, ...), which are fused."""
    if patched := [name for key in ("patches", "patches_replace") for name in options.get(key, {})]:
        raise InputError(
            f"something changes the UNet's layers ({', '.join(patched)}), which are fused in sd-ort's graph: "
            "leave FreeU, IP-Adapter and the like out, or use the application's own UNet."
        )


def parse_residuals(
    x: torch.Tensor, control: Mapping[str, Sequence[Any]] | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return ControlNet residuals from ComfyUI's and Forge's `control`: outermost first, and the middle one.

    Each is repeated to the batch size of x (B, C, h, w). Raises InputError for those of a T2I-Adapter.
    """
    if not control:
        return [], None
    if any(value is not None for value in control.get("input", ())):
        raise InputError("T2I-Adapters change the UNet's encoder, which is fused in sd-ort's graph: use a ControlNet.")

    def repeated(value: torch.Tensor) -> torch.Tensor:
        value = value.to(x.device)
        return value if len(value) == len(x) else value.repeat(-(-len(x) // len(value)), 1, 1, 1)[: len(x)]

    residuals = [None if value is None else repeated(value) for value in control.get("output", ())]
    if any(value is None for value in residuals):
        raise InputError("this ControlNet omits some of its residuals: sd-ort's graph needs all or none.")
    middle = next((repeated(value) for value in control.get("middle", ()) if value is not None), None)
    return [value for value in residuals if value is not None], middle
