"""A folder's text encoders as ComfyUI's CLIP. Tokenization, prompt weighting and scheduling are ComfyUI's."""

from __future__ import annotations

import numbers
from functools import partial
from typing import Any

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import torch

from sd_ort.checkpoints.conditioning import text_encoders, text_length
from sd_ort.checkpoints.transformer_layouts import RowSlice
from sd_ort.core.errors import InputError
from sd_ort.integrations.comfyui.net import MetaWeights
from sd_ort.integrations.comfyui.patches import apply_patches_on_load
from sd_ort.integrations.models import TorchComponentSessions


def open_clip(models: TorchComponentSessions) -> comfy.sd.CLIP:
    """Return the folder's text encoders as a CLIP. Raises InputError if the folder has none."""
    components = text_encoders(models.index)
    models.models.require(*components)
    names = [_comfy_letter(models, component) for component in components]
    encoders = {
        name: partial(TextEncoder, models=models, component=component)
        for name, component in zip(names, components, strict=True)
    }
    tokenizers = {
        name: partial(_comfy_tokenizer, models, component, f"clip_{name}")
        for name, component in zip(names, components, strict=True)
    }
    target = _ClipTarget()
    if len(names) == 2:
        target.clip = partial(_TwoTextEncoders, encoders=encoders)
        target.tokenizer = partial(_TwoTokenizers, tokenizers=tokenizers)
    else:
        (name,) = names
        target.clip = partial(comfy.sd1_clip.SD1ClipModel, clip_name=name, clip_model=encoders[name])
        target.tokenizer = partial(comfy.sd1_clip.SD1Tokenizer, clip_name=name, tokenizer=tokenizers[name])
    clip = comfy.sd.CLIP(target, disable_dynamic=True)
    for name, component in zip(names, components, strict=True):
        prefix = f"clip_{name}."
        encoder = getattr(clip.cond_stage_model, f"clip_{name}")
        sources = {prefix + key: (RowSlice(source),) for key, source in encoder.names.items()}
        apply_patches_on_load(clip.patcher, models, component, sources)
    return clip


def _comfy_letter(models: TorchComponentSessions, component: str) -> str:
    """Return ComfyUI's letter of an encoder: l (SD 1.x and SDXL), g (SDXL's second), h (SD 2.x)."""
    if component == "text_encoder_2":
        return "g"
    return "h" if models.config(component)["hidden_size"] == 1024 else "l"


class _ClipTarget:
    """Factories of model and tokenizer for `comfy.sd.CLIP`."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.clip: Any = None
        self.tokenizer: Any = None


def _comfy_tokenizer(
    models: TorchComponentSessions, component: str, key: str, embedding_directory: Any = None, **_: Any
) -> Any:
    """Return ComfyUI's tokenizer with the folder's vocabulary."""
    tokenizer = models.tokenizer(component)
    return comfy.sd1_clip.SDTokenizer(
        tokenizer_path=str(models.folder / component.replace("text_encoder", "tokenizer")),
        max_length=text_length(models.folder, component, tokenizer),
        pad_token=tokenizer.pad_token_id,
        embedding_directory=embedding_directory,
        embedding_size=models.config(component)["hidden_size"],
        embedding_key=key,
    )


class TextEncoder(MetaWeights, comfy.sd1_clip.SDClipModel):
    """ComfyUI's text encoder on a component. `names`: ComfyUI's name of a weight -> its name in the weight recipes."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Any = None,
        *,
        models: TorchComponentSessions,
        component: str,
    ) -> None:
        torch.nn.Module.__init__(self)  # without the layers of SDClipModel
        self.models, self.component = models, component
        config = models.config(component)
        tokenizer = models.tokenizer(component)
        self.special_tokens = {
            "start": tokenizer.bos_token_id, "end": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id,
        }  # fmt: skip
        self.num_layers, self.max_length = config["num_hidden_layers"], text_length(models.folder, component, tokenizer)
        self.has_hidden_states = "hidden_states" in models.models[component].outputs
        self.layer = "hidden" if self.has_hidden_states else "last"
        self.layer_idx: int | None = -2 if self.has_hidden_states else None
        self.return_projected_pooled, self.execution_device = True, None
        self.options_default = (self.layer, self.layer_idx, True)
        self.meta_weights, self.names = _state_dict_and_names(config)

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Set options. Raises InputError for a layer that is not an output of the graph (CLIP skip)."""
        available = (-2,) if self.has_hidden_states else (None, -1)
        if options.get("layer", available[0]) not in available:
            raise InputError(
                f"CLIP layer {options['layer']} is not in sd-ort's graph: take CLIP Set Last Layer out of the workflow."
            )
        self.execution_device = options.get("execution_device", self.execution_device)

    def forward(self, tokens: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode token ids (B, S) to float32 hidden states (B, S, C) and the pooled output (B, D).

        Raises InputError for embeddings among the tokens (textual inversion).
        """
        if any(not isinstance(token, numbers.Integral) for row in tokens for token in row):
            raise InputError("textual inversion embeddings are not in sd-ort's graph: take embedding:... out.")
        outputs = self.models.run(self.component, input_ids=torch.tensor(tokens, dtype=torch.int64))
        hidden = outputs["hidden_states" if self.has_hidden_states else "last_hidden_state"].float()
        pooled = outputs.get("text_embeds", outputs.get("pooler_output"))
        device = self.execution_device or hidden.device
        return hidden.to(device), None if pooled is None else pooled.float().to(device)


def _state_dict_and_names(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return meta tensors by ComfyUI's names of an encoder's weights, and their names in the weight recipes."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    with torch.device("meta"):
        model = CLIPTextModelWithProjection(CLIPTextConfig(**config))
    tensors, names = {}, {}
    for name, tensor in model.state_dict().items():
        bare = name.removeprefix("text_model.")
        key = f"transformer.{bare}" if bare.startswith("text_projection") else f"transformer.text_model.{bare}"
        tensors[key], names[key] = torch.empty(tensor.shape, device="meta"), bare
    return tensors, names


class _TwoTextEncoders(comfy.sdxl_clip.SDXLClipModel):
    """SDXL's two encoders."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, *, encoders: dict[str, Any]
    ) -> None:
        torch.nn.Module.__init__(self)
        self.clip_l, self.clip_g = (encoders[name](device, dtype, model_options) for name in ("l", "g"))
        self.dtypes = {dtype}


class _TwoTokenizers(comfy.sdxl_clip.SDXLTokenizer):
    """SDXL's two tokenizers."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Any = None, *, tokenizers: dict[str, Any]
    ) -> None:
        self.clip_l, self.clip_g = (tokenizers[name](embedding_directory) for name in ("l", "g"))
