"""A folder's UNet as hosts call it, one step after another: plain, hoisted, or with a ControlNet's residuals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from sd_ort.core.errors import InputError
from sd_ort.family.signatures import residual_axes, size
from sd_ort.hosts.models import HostModels
from sd_ort.hosts.tensors import Tensors

MIDDLE = "mid_block_additional_residual"


class HostUNet:
    """Noise predictions (or whatever the UNet was trained to predict) of `models`' folder."""

    def __init__(self, models: HostModels) -> None:
        self.models = models
        self.residual_names = [n for n in models.inputs("unet") if n.startswith("down_block_res_sample_")]
        self.hoisted = "unet_prompt" in models
        self.prompt: Tensors = {}
        self.told: Sequence[torch.Tensor] = ()
        self.prompt_key: tuple[Any, ...] | None = None
        self.seconds: deque[float] = deque(maxlen=100)  # of the last calls, on the host: until queued, on a GPU

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        told: Mapping[str, torch.Tensor],
        residuals: Sequence[torch.Tensor] = (),
        middle: torch.Tensor | None = None,
        key: Hashable = None,
    ) -> torch.Tensor:
        """Prediction (B, C, h, w) in sample's dtype and on its device, for scaled latents `sample` (B, C, h, w).

        `timestep`: one number, or one a row, all equal. `told`: the other inputs by name, each (B, ...). `residuals`,
        `middle`: a ControlNet's, outermost first. `key`: equal for two calls of equal `told`; None for telling by the
        tensors themselves.

        Raises InputError for inputs that the folder's graph lacks or misses.
        """
        started = time.perf_counter()
        models = self.models
        at = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1)
        if at.device.type == "cpu" and len(at) > 1 and not bool((at == at[0]).all()):
            raise InputError("the rows of one call have different timesteps: this graph takes one for all of them.")
        feed = {"sample": sample, **self._controlled(sample, residuals, middle)}
        lent: Tensors = {}
        if self.hoisted:
            prompt = self._every_prompt(told, key)
            rows = {**prompt, "timestep": at if len(at) == len(sample) else at[:1].expand(len(sample))}
            time_inputs = {name: rows[name] for name in models.inputs("unet_time")}
            lent = {**prompt, **models.call("unet_time", time_inputs, lend=True)}
        else:
            feed |= told
        names = models.inputs("unet")
        lent = {name: tensor for name, tensor in lent.items() if name in names}
        if "timestep" in names:
            rank = len(models.models["unet"].inputs["timestep"].shape)
            feed["timestep"] = at[:1].reshape((1,) * rank)
        if missing := [name for name in names if name not in feed and name not in lent]:
            raise InputError(
                f"the UNet of {models.folder} wants {', '.join(missing)}, which this pipeline does not give."
            )
        out = models.call("unet", {n: feed[n] for n in names if n not in lent}, lent)["out_sample"]
        self.seconds.append(time.perf_counter() - started)
        return out.to(sample.device, sample.dtype)

    def _every_prompt(self, told: Mapping[str, torch.Tensor], key: Hashable) -> Tensors:
        """What a hoisted folder computes once a prompt, again only for another prompt or other weights."""
        tensors = list(told.values())
        mark = (key, self.models.changes, *(tuple(t.shape) for t in tensors))
        if key is None:  # torch counts changes of a tensor, but not in inference mode
            mark = (*mark, *(None if t.is_inference() else t._version for t in tensors))
        kept = key is not None or (
            all(a is b for a, b in zip(tensors, self.told, strict=False)) and not any(t.is_inference() for t in tensors)
        )
        if not (kept and mark == self.prompt_key):
            names = self.models.inputs("unet_prompt")
            self.prompt = self.models.call("unet_prompt", {name: told[name] for name in names}, lend=True)
            self.prompt_key, self.told = mark, tensors
        return self.prompt

    def _controlled(
        self, sample: torch.Tensor, residuals: Sequence[torch.Tensor], middle: torch.Tensor | None
    ) -> Tensors:
        if not self.residual_names:
            if residuals or middle is not None:
                raise InputError(
                    f"the UNet of {self.models.folder} takes no ControlNet: export it again with --controlnet."
                )
            return {}
        if not residuals:
            return self._uncontrolled(sample)
        if len(residuals) != len(self.residual_names):
            raise InputError(
                f"{len(residuals)} residuals of a ControlNet for {len(self.residual_names)} skip connections: "
                "it is for another model."
            )
        given = dict(zip(self.residual_names, residuals, strict=True))
        return {**given, MIDDLE: torch.zeros_like(residuals[-1]) if middle is None else middle}

    def _uncontrolled(self, sample: torch.Tensor) -> Tensors:
        """Zeros for every residual, as of a ControlNet of strength 0."""
        sizes = {"batch": len(sample), "height": sample.shape[2], "width": sample.shape[3]}
        axes = residual_axes(self.models.unet_config)
        dtype = self.models.dtype("unet")
        made = [torch.zeros([size(a, sizes) for a in each], dtype=dtype, device=sample.device) for each in axes]
        return {**dict(zip(self.residual_names, made, strict=True)), MIDDLE: torch.zeros_like(made[-1])}


def refuse_patches(options: Mapping[str, Any]) -> None:
    """Raise InputError for what ComfyUI or Forge would change inside the UNet (FreeU, IP-Adapter, ...): it is fused."""
    if changed := [kind for key in ("patches", "patches_replace") for kind in options.get(key, {})]:
        raise InputError(
            f"something changes the UNet's layers ({', '.join(changed)}), which are fused in sd-ort's graph: "
            "leave FreeU, IP-Adapter and the like out, or take the host's own UNet."
        )


def residuals_of(
    x: torch.Tensor, control: Mapping[str, Sequence[Any]] | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """A ControlNet's residuals as ComfyUI and Forge hand them over: outermost first, for all rows of x (B, C, h, w),
    and the middle one. Raises InputError for a T2I-Adapter's."""
    if not control:
        return [], None
    if any(value is not None for value in control.get("input", ())):
        raise InputError("T2I-Adapters change the UNet's encoder, which is fused in sd-ort's graph: use a ControlNet.")

    def rows(value: torch.Tensor) -> torch.Tensor:
        value = value.to(x.device)
        return value if len(value) == len(x) else value.repeat(-(-len(x) // len(value)), 1, 1, 1)[: len(x)]

    given = [None if value is None else rows(value) for value in control.get("output", ())]
    if any(value is None for value in given):
        raise InputError("this ControlNet leaves out some of its residuals: sd-ort's graph takes all or none.")
    middle = next((rows(value) for value in control.get("middle", ()) if value is not None), None)
    return [value for value in given if value is not None], middle
