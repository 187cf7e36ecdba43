"""Attention processors of diffusion transformers: RMS norms and rotary embeddings of query and key as operators.

A processor calls the layers of its attention, so that LoRA layers and hooks run. The attention backend that a user
chooses is that of the processor which it replaces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Attention,
    Flux2AttnProcessor,
    Flux2ParallelSelfAttention,
    Flux2ParallelSelfAttnProcessor,
)
from diffusers.models.transformers.transformer_krea2 import Krea2Attention, Krea2AttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import nn

from sd_ort.torch.modules.modulated_norms import norm
from sd_ort.torch.operators import attention, rotary_embedding

Tensor = torch.Tensor
Heads = tuple[Tensor, Tensor, Tensor]  # query, key and value, each (B, S, heads, head size)
Angles = tuple[Tensor, Tensor]  # cosines and sines, each (S, head size / 2)
_ANGLES_ATTRIBUTE = "_sd_ort_angles"  # attribute of a rotary table


class FastProcessor:
    """Base of the attention processors that replace `original`."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @property
    def _attention_backend(self) -> Any:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: Any) -> None:
        self.original._attention_backend = value

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: Any) -> None:
        self.original._parallel_config = value

    def attend(self, heads: Heads, mask: Tensor | None = None) -> Tensor:
        """Return the attention (B, S, C) of query, key and value, by our operator unless another backend is chosen."""
        q, k, v = heads
        if _is_default(self.original):
            return attention(q, k, v, mask).flatten(2)
        groups = q.shape[2] // k.shape[2]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        y = attention_dispatch.dispatch_attention_fn(
            q, k, v, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return y.flatten(2, 3)


def _is_default(processor: Any) -> bool:
    """Return whether a processor runs torch's own attention, which ours may replace."""
    if not hasattr(processor, "_attention_backend"):
        return True
    if processor._attention_backend is not None or processor._parallel_config is not None:
        return False
    active, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    return active == attention_dispatch.AttentionBackendName.NATIVE


class FastFluxProcessor(FastProcessor):
    """FluxAttnProcessor and Flux2AttnProcessor."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output of diffusers' processor: the tokens of the text come first."""
        if attn.fused_projections:  # since `optimize`
            return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        heads = _projected(attn, hidden_states, attn.head_dim)
        if encoder_hidden_states is None:
            y = self.attend(_rotated(heads, real_angles(image_rotary_emb, heads[0])), attention_mask)
            return y if getattr(attn, "to_out", None) is None else _output(attn, y)
        heads = _joined(_projected(attn, encoder_hidden_states, attn.head_dim, added=True), heads)
        y = self.attend(_rotated(heads, real_angles(image_rotary_emb, heads[0])), attention_mask)
        text, image = y.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return _output(attn, image), attn.to_add_out(text)


class FastFlux2ParallelProcessor(FastProcessor):
    """Flux2ParallelSelfAttnProcessor with one GEMM for QKV and the feed-forward layers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> Tensor:
        joined = attn.to_qkv_mlp_proj(hidden_states)
        *qkv, mlp = joined.split([*[attn.inner_dim] * 3, joined.shape[-1] - 3 * attn.inner_dim], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, attn.head_dim)) for each in qkv)
        heads = norm(attn.norm_q, q), norm(attn.norm_k, k), v
        y = self.attend(_rotated(heads, real_angles(image_rotary_emb, q)), attention_mask)
        return attn.to_out(torch.cat([y, attn.mlp_act_fn(mlp)], dim=-1))


class FastJointProcessor(FastProcessor):
    """JointAttnProcessor2_0 of Stable Diffusion 3."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output of diffusers' processor: the tokens of the image come first, and the mask is ignored."""
        size = attn.inner_dim // attn.heads
        heads = _projected(attn, hidden_states, size)
        if encoder_hidden_states is None:
            return _output(attn, self.attend(heads))
        y = self.attend(_joined(heads, _projected(attn, encoder_hidden_states, size, added=True)))
        image, text = y.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return _output(attn, image), text if attn.context_pre_only else attn.to_add_out(text)


class FastQwenProcessor(FastProcessor):
    """QwenDoubleStreamAttnProcessor2_0."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Compute the output of diffusers' processor: the tokens of the text come first."""
        if encoder_hidden_states is None or attention_mask is not None:
            return self.original(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb
            )
        size = attn.inner_dim // attn.heads
        mask = None
        if encoder_hidden_states_mask is not None:
            ones = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            mask = torch.cat([encoder_hidden_states_mask, ones], dim=1)[:, None, None, :]
        image = _projected(attn, hidden_states, size)
        text = _projected(attn, encoder_hidden_states, size, added=True)
        heads = _joined(text, image)
        if image_rotary_emb is not None:
            image_angles, text_angles = image_rotary_emb
            heads = _rotated(heads, _complex_angles((text_angles, image_angles), heads[0]))
        y = self.attend(heads, mask)
        text_output, image_output = y.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return _output(attn, image_output), attn.to_add_out(text_output)


class FastZProcessor(FastProcessor):
    """ZSingleStreamAttnProcessor with rotary angles for each row of a batch."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        q, k, v = _projected(attn, hidden_states, attn.inner_dim // attn.heads)
        if freqs_cis is not None:
            cos, sin = _complex_angles((freqs_cis,), q)
            q, k = (rotary_embedding(x.flatten(0, 1)[None], cos, sin)[0].view(x.shape) for x in (q, k))
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        return _output(attn, self.attend((q, k, v), attention_mask))


class FastKrea2Processor(FastProcessor):
    """Krea2AttnProcessor: grouped queries, and a sigmoid gate behind the attention."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> Tensor:
        heads = _projected(attn, hidden_states, attn.head_dim)
        y = self.attend(_rotated(heads, real_angles(image_rotary_emb, heads[0])), attention_mask)
        return attn.to_out[0](y * torch.sigmoid(attn.to_gate(hidden_states)))


def _projected(attn: Any, x: Tensor, size: int, added: bool = False) -> Heads:
    """Return the normalized heads of a stream. added: use the layers of the second stream."""
    if added:
        layers, norms = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), (attn.norm_added_q, attn.norm_added_k)
    else:
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
    q, k, v = (layer(x).unflatten(-1, (-1, size)) for layer in layers)
    return norm(norms[0], q), norm(norms[1], k), v


def _joined(first: Heads, second: Heads) -> Heads:
    """Return the tokens of two streams one behind the other."""
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    return q, k, v


def _rotated(heads: Heads, angles: Angles | None) -> Heads:
    q, k, v = heads
    return heads if angles is None else (rotary_embedding(q, *angles), rotary_embedding(k, *angles), v)


def real_angles(tables: Angles | None, x: Tensor) -> Angles | None:
    """Return the angles of diffusers' tables (S, head size), where each angle stands in two columns."""
    return None if tables is None else _once(tables, x, lambda: (tables[0][:, ::2], tables[1][:, ::2]))


def _complex_angles(tables: tuple[Tensor, ...], x: Tensor) -> Angles:
    """Return the angles of complex tables (..., S, head size / 2), one behind the other."""

    def compute() -> Angles:
        joined = torch.cat([table.flatten(0, -2) for table in tables])
        return joined.real, joined.imag

    return _once(tables, x, compute)


def _once(tables: tuple[Tensor, ...], x: Tensor, compute: Callable[[], Angles]) -> Angles:
    """Return compute(), which depends on `tables` alone, for the device and dtype of x.

    The first table keeps it: all layers of a forward have the same tables, which diffusers makes in each forward.
    """
    if torch.compiler.is_compiling() or any(table.requires_grad for table in tables):
        return copy_like(compute(), x)
    versions = [0 if table.is_inference() else table._version for table in tables]
    cached = getattr(tables[0], _ANGLES_ATTRIBUTE, None)
    if cached is not None:
        others, *key, angles = cached
        if key == [versions, x.device, x.dtype] and all(map(operator.is_, others, tables[1:])):
            return angles
    angles = copy_like(compute(), x)
    setattr(tables[0], _ANGLES_ATTRIBUTE, (tables[1:], versions, x.device, x.dtype, angles))
    return angles


def copy_like(angles: Angles, x: Tensor) -> Angles:
    """Return contiguous copies: a view would keep the table alive that keeps it."""
    cos, sin = (a.to(x.device, x.dtype, copy=True, memory_format=torch.contiguous_format) for a in angles)
    return cos, sin


def _output(attn: Any, x: Tensor) -> Tensor:
    """Return the output layer of x, and its dropout if there is one."""
    for layer in attn.to_out:
        x = layer(x)
    return x


# diffusers' processor -> the processor that replaces it, and the class of its attention.
PROCESSORS: dict[type, tuple[type[FastProcessor], type[nn.Module]]] = {
    FluxAttnProcessor: (FastFluxProcessor, FluxAttention),
    Flux2AttnProcessor: (FastFluxProcessor, Flux2Attention),
    Flux2ParallelSelfAttnProcessor: (FastFlux2ParallelProcessor, Flux2ParallelSelfAttention),
    JointAttnProcessor2_0: (FastJointProcessor, Attention),
    QwenDoubleStreamAttnProcessor2_0: (FastQwenProcessor, Attention),
    ZSingleStreamAttnProcessor: (FastZProcessor, Attention),
    Krea2AttnProcessor: (FastKrea2Processor, Krea2Attention),
}
ATTENTIONS = tuple({cls for _, cls in PROCESSORS.values()} - {Attention})


def is_joint(module: nn.Module) -> bool:
    """Return whether a module is an attention of a diffusion transformer, by its class or its processor."""
    return isinstance(module, ATTENTIONS) or (isinstance(module, Attention) and type(module.processor) in PROCESSORS)


def unsupported_reason(attn: Any) -> str | None:
    """Return why the processor of an attention cannot be replaced, or None."""
    if type(attn.processor) not in PROCESSORS:
        return f"its processor is {type(attn.processor).__name__}"
    if type(attn) is not PROCESSORS[type(attn.processor)][1]:
        return "a subclass of a supported class"
    if getattr(attn, "fused_projections", False):
        return "its projections are fused"
    return None


def replace(attn: Any) -> None:
    """Replace the processor of a supported attention."""
    attn.processor = PROCESSORS[type(attn.processor)][0](attn.processor)


def restore(attn: Any) -> None:
    """Undo `replace`."""
    if isinstance(getattr(attn, "processor", None), FastProcessor):
        attn.processor = attn.processor.original
