"""A folder's text encoders as ComfyUI's CLIP: its own tokenizing, weighting and scheduling around our graphs."""

from __future__ import annotations

import numbers
from functools import partial
from typing import Any

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import torch

from sd_ort.core.errors import InputError
from sd_ort.family.conditioning import open_tokenizer, text_encoders, text_length
from sd_ort.hosts.comfyui.patches import follow_patches
from sd_ort.hosts.models import HostModels


def open_clip(models: HostModels) -> comfy.sd.CLIP:
    """The folder's text encoders as a CLIP. Raises InputError for a folder without them."""
    components = text_encoders(models.index)
    models.models.require(*components)
    names = [_short(models, component) for component in components]
    encoders = {
        name: partial(TextEncoder, models=models, component=component)
        for name, component in zip(names, components, strict=True)
    }
    tokenizers = {
        name: partial(_tokens, models, component, f"clip_{name}")
        for name, component in zip(names, components, strict=True)
    }
    target = _Target()
    if len(names) == 2:
        target.clip = partial(_Both, encoders=encoders)
        target.tokenizer = partial(_BothTokenizers, tokenizers=tokenizers)
    else:
        (name,) = names
        target.clip = partial(comfy.sd1_clip.SD1ClipModel, clip_name=name, clip_model=encoders[name])
        target.tokenizer = partial(comfy.sd1_clip.SD1Tokenizer, clip_name=name, tokenizer=tokenizers[name])
    clip = comfy.sd.CLIP(target, disable_dynamic=True)
    for name, component in zip(names, components, strict=True):
        prefix = f"clip_{name}."
        known = {prefix + key: source for key, source in getattr(clip.cond_stage_model, f"clip_{name}").names.items()}
        follow_patches(clip.patcher, models, component, known)
    return clip


def _short(models: HostModels, component: str) -> str:
    """ComfyUI's letter of an encoder: l (SD 1.x and SDXL), g (SDXL's second), h (SD 2.x)."""
    if component == "text_encoder_2":
        return "g"
    return "h" if models.config(component)["hidden_size"] == 1024 else "l"


class _Target:
    """What `comfy.sd.CLIP` makes its model and tokenizer from."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.clip: Any = None
        self.tokenizer: Any = None


def _tokens(models: HostModels, component: str, key: str, embedding_directory: Any = None, **_: Any) -> Any:
    """ComfyUI's tokenizer with the folder's vocabulary."""
    tokenizer = component.replace("text_encoder", "tokenizer")
    ours = open_tokenizer(models.folder, tokenizer)
    made = comfy.sd1_clip.SDTokenizer(
        tokenizer_path=str(models.folder / tokenizer),
        max_length=text_length(models.folder, component, ours),
        pad_token=ours.pad_token_id,
        embedding_directory=embedding_directory,
        embedding_size=models.config(component)["hidden_size"],
        embedding_key=key,
    )
    return made


class TextEncoder(comfy.sd1_clip.SDClipModel):
    """One encoder; `names`: ComfyUI's name of a weight -> the name in our recipes."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, *, models: HostModels, component: str
    ) -> None:
        torch.nn.Module.__init__(self)  # none of the layers
        self.models, self.component = models, component
        config = models.config(component)
        tokenizer = open_tokenizer(models.folder, component.replace("text_encoder", "tokenizer"))
        self.special_tokens = {
            "start": tokenizer.bos_token_id, "end": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id,
        }  # fmt: skip
        self.num_layers, self.max_length = config["num_hidden_layers"], text_length(models.folder, component, tokenizer)
        self.hidden = "hidden_states" in models.models[component].outputs
        self.layer = "hidden" if self.hidden else "last"
        self.layer_idx: int | None = -2 if self.hidden else None
        self.return_projected_pooled, self.execution_device = True, None
        self.options_default = (self.layer, self.layer_idx, True)
        self.listed, self.names = _listed(config)

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Raises InputError for a layer that the graph does not give (CLIP skip)."""
        given = (-2,) if self.hidden else (None, -1)
        if options.get("layer", given[0]) not in given:
            raise InputError(
                f"CLIP layer {options['layer']} is not in sd-ort's graph: take CLIP Set Last Layer out of the workflow."
            )
        self.execution_device = options.get("execution_device", self.execution_device)

    def forward(self, tokens: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of token ids -> hidden states (rows, S, C) and the pooled one (rows, D), float32.

        Raises InputError for embeddings among the tokens (textual inversion).
        """
        if any(not isinstance(token, numbers.Integral) for row in tokens for token in row):
            raise InputError("textual inversion embeddings are not in sd-ort's graph: take embedding:... out.")
        made = self.models.run(self.component, input_ids=torch.tensor(tokens, dtype=torch.int64))
        hidden = made["hidden_states" if self.hidden else "last_hidden_state"].float()
        pooled = made.get("text_embeds", made.get("pooler_output"))
        device = self.execution_device or hidden.device
        return hidden.to(device), None if pooled is None else pooled.float().to(device)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Names and shapes (on torch's meta device) of the weights that the graph was made from."""
        destination = {} if destination is None else destination
        for name, tensor in self.listed.items():
            destination[prefix + name] = tensor
        return destination


def _listed(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """ComfyUI's names of an encoder's weights, with their shapes and with the names in our recipes."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    with torch.device("meta"):
        model = CLIPTextModelWithProjection(CLIPTextConfig(**config))
    tensors, names = {}, {}
    for name, tensor in model.state_dict().items():
        bare = name.removeprefix("text_model.")
        key = f"transformer.{bare}" if bare.startswith("text_projection") else f"transformer.text_model.{bare}"
        tensors[key], names[key] = torch.empty(tensor.shape, device="meta"), bare
    return tensors, names


class _Both(comfy.sdxl_clip.SDXLClipModel):
    """SDXL's two encoders."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, *, encoders: dict[str, Any]
    ) -> None:
        torch.nn.Module.__init__(self)
        self.clip_l, self.clip_g = (encoders[name](device, dtype, model_options) for name in ("l", "g"))
        self.dtypes = {dtype}


class _BothTokenizers(comfy.sdxl_clip.SDXLTokenizer):
    """SDXL's two tokenizers."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Any = None, *, tokenizers: dict[str, Any]
    ) -> None:
        self.clip_l, self.clip_g = (tokenizers[name](embedding_directory) for name in ("l", "g"))
