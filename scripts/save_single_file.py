"""Write a diffusers folder as one .safetensors file with the names Stable Diffusion was first published with (LDM).

    python scripts/save_single_file.py FOLDER OUT.safetensors [--half]

The inverse of what diffusers' from_single_file reads, for Stable Diffusion 1.x, 2.x and XL. For tests, and to make a
second demo checkpoint; the names are those that diffusers' converters expect.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import torch

from sd_ort.family.checkpoints import open_folder

Tensors = dict[str, torch.Tensor]
RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
VAE = {
    "group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out",
    "conv_shortcut": "nin_shortcut", "conv_norm_out": "norm_out",
}  # fmt: skip
OPEN_CLIP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding": "token_embedding", "final_layer_norm": "ln_final",
    "encoder.layers.": "transformer.resblocks.", "layer_norm1": "ln_1", "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj", "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def replace_all(name: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        name = name.replace(old, new)
    return name


def unet(tensors: Tensors, layers: int) -> Tensors:
    """A UNet with `layers` residual blocks a level; inputs, middle and outputs are numbered lists of blocks."""
    out = {}
    crossed = {int(m[1]) for name in tensors if (m := re.match(r"up_blocks\.(\d+)\.attentions", name))}
    for name, tensor in tensors.items():
        if m := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
            side, block, kind, layer, rest = m.groups()
            index = int(block) * (layers + 1) + int(layer) + (side == "down")
            prefix = f"{'input' if side == 'down' else 'output'}_blocks.{index}.{int(kind == 'attentions')}."
            new = prefix + (replace_all(rest, RESNET) if kind == "resnets" else rest)
        elif m := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", name):
            new = f"input_blocks.{(int(m[1]) + 1) * (layers + 1)}.0.op.{m[2]}"
        elif m := re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.*)", name):
            new = f"output_blocks.{int(m[1]) * (layers + 1) + layers}.{1 + (int(m[1]) in crossed)}.conv.{m[2]}"
        elif m := re.match(r"mid_block\.(resnets|attentions)\.(\d+)\.(.*)", name):
            rest = replace_all(m[3], RESNET) if m[1] == "resnets" else m[3]
            new = f"middle_block.{1 if m[1] == 'attentions' else 2 * int(m[2])}.{rest}"
        else:
            new = replace_all(name, UNET)
        out[new] = tensor
    return out


def vae(tensors: Tensors) -> Tensors:
    """A VAE; the decoder's levels are counted from the image, and its attention is made of 1x1 convolutions."""
    levels = 1 + max(int(m[1]) for name in tensors if (m := re.match(r"decoder\.up_blocks\.(\d+)", name)))
    out = {}
    for name, tensor in tensors.items():
        new = re.sub(r"decoder\.up_blocks\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", name)
        new = new.replace("down_blocks", "down").replace("resnets", "block")
        new = re.sub(r"(down|up)samplers\.0", r"\1sample", new)
        new = re.sub(r"mid_block\.block\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", new)
        new = new.replace("mid_block.attentions.0", "mid.attn_1")
        new = replace_all(new, VAE)
        out[new] = tensor[:, :, None, None] if ".attn_1." in new and tensor.ndim == 2 else tensor
    return out


def open_clip(tensors: Tensors) -> Tensors:
    """A CLIP text encoder under OpenCLIP's names; query, key and value are packed."""
    tensors = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    out = {}
    for name, tensor in tensors.items():
        if m := re.match(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            out[f"transformer.resblocks.{m[1]}.attn.in_proj_{m[2]}"] = torch.cat(parts)
        elif name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif not re.search(r"self_attn\.[kv]_proj", name):
            out[replace_all(name, OPEN_CLIP)] = tensor
    return out


def single_file(models: dict[str, torch.nn.Module]) -> Tensors:
    """All tensors of a pipeline's `models` (unet, vae, text_encoder, text_encoder_2) under LDM's names."""
    states = {name: model.state_dict() for name, model in models.items()}
    xl = "text_encoder_2" in states
    config = getattr(models["unet"], "config", {})
    parts: list[tuple[str, Tensors]] = [("model.diffusion_model.", unet(states["unet"], config["layers_per_block"]))]
    if "vae" in states:
        parts.append(("first_stage_model.", vae(states["vae"])))
    if "text_encoder" in states:
        encoder = {name.removeprefix("text_model."): tensor for name, tensor in states["text_encoder"].items()}
        if config["cross_attention_dim"] == 1024 and not xl:
            parts.append(("cond_stage_model.model.", open_clip(encoder)))
        else:
            prefix = (
                "conditioner.embedders.0.transformer.text_model." if xl else "cond_stage_model.transformer.text_model."
            )
            parts.append((prefix, encoder))
    if xl:
        place = 1 if "text_encoder" in states else 0
        parts.append((f"conditioner.embedders.{place}.model.", open_clip(states["text_encoder_2"])))
    return {prefix + name: tensor.contiguous() for prefix, part in parts for name, tensor in part.items()}


def save(models: dict[str, torch.nn.Module], path: Path, dtype: torch.dtype = torch.float32) -> Path:
    from safetensors.torch import save_file

    save_file({name: t.detach().to(dtype).clone() for name, t in single_file(models).items()}, path)
    return path


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--half", is_flag=True, help="Weights in float16.")
def main(folder: Path, out: Path, half: bool) -> None:
    source = open_folder(str(folder), folder)
    save({name: source.load(name) for name in source.configs}, out, torch.float16 if half else torch.float32)


if __name__ == "__main__":
    main()
