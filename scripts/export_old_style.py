"""Components as folders from before torch 2 hold them: opset 14, attention on merged batch and heads, without SDPA.

    python scripts/export_old_style.py OUT

writes OUT/sd15-tiny-eager-14 and OUT/sd15-tiny-half-14 (all in float16, as the old conversion scripts' --fp16), from
which scripts/make_graph_fixtures.py makes the graphs in tests/graphs. Opset 14 has no LayerNormalization.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor
from transformers.models.clip.modeling_clip import CLIPAttention

from sd_ort.core.quiet import quiet
from sd_ort.export.exporter import NOISY, TRACE, example
from sd_ort.export.tracing import export_torchscript
from sd_ort.family import signatures
from sd_ort.family.checkpoints import open_source
from sd_ort.family.modules import wrap

OPSET = 14


def merged_heads(
    self: CLIPAttention, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """CLIP's attention on [B*H,S,D]; the mask is added on [B,H,S,S]. hidden_states is [B,S,C]."""
    batch, length, width = hidden_states.shape
    heads, merged = self.num_heads, (batch * self.num_heads, -1, self.head_dim)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, -1, heads, self.head_dim).transpose(1, 2).contiguous().view(merged)

    query = split(self.q_proj(hidden_states) * self.scale)
    key, value = split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
    scores = torch.bmm(query, key.transpose(1, 2))
    if attention_mask is not None:
        scores = scores.view(batch, heads, length, length) + attention_mask
        scores = scores.view(batch * heads, length, length)
    out = torch.bmm(torch.softmax(scores, dim=-1), value)
    out = out.view(batch, heads, length, self.head_dim).transpose(1, 2).reshape(batch, length, width)
    return self.out_proj(out), None


def export_old_style(folder: Path, component: str, half: bool) -> None:
    """One component of the preset sd15-tiny in `folder`."""
    source = open_source(None, "sd15-tiny", True, 0)
    name = signatures.MODEL_OF.get(component, component)
    config, model = source.configs[name], source.load(name)
    if component == "text_encoder":
        model.set_attn_implementation("eager")  # type: ignore[operator]  # a mask instead of a flag
    else:
        model.set_attn_processor(AttnProcessor())  # type: ignore[operator]
    module = wrap(component, model, sdxl=False, controlnet=False)
    signature = signatures.signature(component, config)
    inputs = [example(tensor, TRACE, config, 0) for tensor in signature.inputs]
    if half:
        module = module.half()
        inputs = [x.half() if x.is_floating_point() and t.name != "timestep" else x
                  for x, t in zip(inputs, signature.inputs, strict=True)]  # fmt: skip
    (folder / component).mkdir(parents=True)
    with torch.no_grad(), quiet(*NOISY):
        export_torchscript(module, inputs, signature, OPSET, folder / component)
    (folder / component / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(source.index))


if __name__ == "__main__":
    CLIPAttention.forward = merged_heads
    for component in ("text_encoder", "unet", "vae_encoder", "vae_decoder"):
        for name, half in (("eager", False), ("half", True)):
            export_old_style(Path(sys.argv[1]) / f"sd15-tiny-{name}-{OPSET}", component, half)
