"""The graphs of all exporters of a model family become the same fused graph with the same outputs.

Every weight is recomputed from its recipe, bit for bit. The graphs are exports of the `-tiny` presets, which have the
topology and thus the node counts of the full models.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from recompute_weights import check_recipes_of_targets, checked_recipes, init_tensors

from fusion_passes import weight_recipes
from fusion_passes.canonicalize import canonicalize
from fusion_passes.fuse import fuse as run_fusions
from fusion_passes.graph_pass import run_all, totals
from fusion_passes.lower import nhwc_layout, pack_qkv, subpixel_conv, upsample_nearest
from scripts.fixtures import graph_fixtures
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints import presets, signatures
from sd_ort.checkpoints.checkpoint import Checkpoint, component_signature, is_sdxl
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS, Preset, open_preset
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.export.exporter import CHECK_SIZES, example_input, export
from sd_ort.inspect.verify import check, verify
from sd_ort.integrations.diffusers import accelerate
from sd_ort.optimize.optimizer import COUNTED, optimize_component
from sd_ort.optimize.targets import PORTABLE, Target
from sd_ort.stages import optimize

# The layout and packing passes of GPU targets; their fused operators run as function bodies on the CPU.
NHWC = Target("nhwc", (nhwc_layout.PASS, pack_qkv.PASS, upsample_nearest.PASS, subpixel_conv.PASS))

# Node counts of a family's components after fusion; SD 1.5 as in the table of README.md, others by their topology.
# A GroupNorm of a sum (a convolution and the time embedding, a block and its residual) is a SkipGroupNorm. A GroupNorm
# of a Concat or of a single convolution stays.
VAE = {
    "vae_encoder": {"MultiHeadAttention": 1, "GroupNorm": 14, "SkipGroupNorm": 8, "NhwcConv": 28, "Transpose": 2},
    "vae_decoder": {
        "MultiHeadAttention": 1, "GroupNorm": 18, "SkipGroupNorm": 12, "SubpixelShuffle": 3, "NhwcConv": 36,
        "Transpose": 2,
    },
}  # fmt: skip
SD_UNET = {
    "MultiHeadAttention": 32, "packed_qkv": 16, "packed_kv": 16, "GroupNorm": 16, "SkipGroupNorm": 45,
    "BiasSplitGelu": 16, "BiasAdd": 16, "SkipLayerNormalization": 32, "LayerNormalization": 16,
    "SubpixelShuffle": 3, "NhwcConv": 98, "Transpose": 2,
}  # fmt: skip
CLIP_L = {"MultiHeadAttention": 12, "SkipLayerNormalization": 24, "LayerNormalization": 1, "QuickGelu": 12}
EXPECTED: dict[str, dict[str, dict[str, int]]] = {
    "sd15": {"text_encoder": CLIP_L, "unet": SD_UNET, **VAE},
    "sd15-inpaint": {"unet": SD_UNET},
    # One Transpose for each residual input: 12 of the encoder, one of the middle block.
    "sd15-controlnet": {
        "unet": SD_UNET | {"Transpose": 15},
        "controlnet": {
            "MultiHeadAttention": 14, "packed_qkv": 7, "packed_kv": 7, "GroupNorm": 3, "SkipGroupNorm": 24,
            "BiasSplitGelu": 7, "BiasAdd": 7, "SkipLayerNormalization": 14, "LayerNormalization": 7, "NhwcConv": 61,
            "Transpose": 15,
        },
    },
    # Input and output projections of the transformers are linear: 32 convolutions fewer.
    "sd21": {
        "text_encoder": {"MultiHeadAttention": 23, "SkipLayerNormalization": 46, "LayerNormalization": 1},
        "unet": SD_UNET | {"NhwcConv": 66},
        **VAE,
    },
    "sdxl": {
        # Only the penultimate state is used: 11 layers; no normalization follows the sum at the end of the last one.
        "text_encoder": {
            "MultiHeadAttention": 11, "SkipLayerNormalization": 21, "LayerNormalization": 1, "BiasAdd": 1,
            "QuickGelu": 11,
        },
        "text_encoder_2": {"MultiHeadAttention": 32, "SkipLayerNormalization": 64, "LayerNormalization": 1},
        "unet": {
            "MultiHeadAttention": 140, "packed_qkv": 70, "packed_kv": 70, "GroupNorm": 12, "SkipGroupNorm": 34,
            "BiasSplitGelu": 70, "BiasAdd": 11, "SkipLayerNormalization": 199, "LayerNormalization": 11,
            "SubpixelShuffle": 2, "NhwcConv": 51, "Transpose": 2,
        },
        **VAE,
    },
    "sdxl-refiner": {
        "unet": {
            "MultiHeadAttention": 88, "packed_qkv": 44, "packed_kv": 44, "GroupNorm": 16, "SkipGroupNorm": 40,
            "BiasSplitGelu": 44, "BiasAdd": 11, "SkipLayerNormalization": 121, "LayerNormalization": 11,
            "SubpixelShuffle": 3, "NhwcConv": 66, "Transpose": 2,
        },
    },
}  # fmt: skip
# No fused graph has these: each would be an unfused site.
REMOVED = (
    "Softmax", "InstanceNormalization", "GroupNormalization", "Erf", "IsNaN", "ScaledDotProductAttention", "Resize",
)  # fmt: skip
# Latent sizes. Creating the session takes most of the time, not the run.
SIZES = ({"batch": 1, "sequence": 19, "height": 16, "width": 8}, {"batch": 2, "sequence": 12, "height": 8, "width": 24})
# One exporter for each family, each target and dtype. The fused graphs of the others are equal, as their counts show.
# UNets in float16 take longest to open: tests/optimize/test_optimize.py has one for each target.
CHECKED = [
    ("sd15-tiny-torchscript-17.unet", NHWC, "float32"),
    ("sd15-tiny-dynamo-23.unet", PORTABLE, "float32"),
    ("sd21-tiny-dynamo-20.unet", PORTABLE, "float32"),
    ("sd15-tiny-eager-14.unet", NHWC, "float32"),
    ("sd15-tiny-half-14.vae_decoder", NHWC, "float32"),
    ("sd15-tiny-half-14.text_encoder", NHWC, "float32"),
    ("sd15-tiny-eager-14.text_encoder", PORTABLE, "float16"),
    ("sd15-controlnet-tiny-dynamo-20.unet", NHWC, "float32"),
    ("sd15-controlnet-tiny-dynamo-20.controlnet", NHWC, "float32"),
    ("sd15-inpaint-tiny-dynamo-20.unet", NHWC, "float32"),
    ("sdxl-refiner-tiny-dynamo-20.unet", NHWC, "float32"),
    ("sd15-tiny-torchscript-17.text_encoder", NHWC, "float32"),
    ("sd15-tiny-dynamo-23.text_encoder", PORTABLE, "float16"),
    ("sd21-tiny-torchscript-17.text_encoder", NHWC, "float32"),
    ("sdxl-tiny-torchscript-17.text_encoder", NHWC, "float16"),
    ("sdxl-tiny-torchscript-17.text_encoder_2", NHWC, "float32"),
    *((f"sd15-tiny-{export}.vae_{half}", target, dtype)
      for export, target, dtype in (("dynamo-18", NHWC, "float32"), ("torchscript-20", PORTABLE, "float32"),
                                    ("dynamo-23", NHWC, "float16"))
      for half in ("encoder", "decoder")),
]  # fmt: skip


# Config values of public checkpoints that no committed graph has, several in one model: the differences to `topology`.
SMALL_CLIP = presets.clip_config(32, 2, 4, "quick_gelu", 32, vocab_size=presets.BYTE_VOCABULARY, intermediate_size=80)
SMALL_UNET = presets.unet_config(
    sample_size=8, block_out_channels=[32, 64], layers_per_block=1, attention_head_dim=4, cross_attention_dim=32,
    down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"], up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
    norm_num_groups=8,
)  # fmt: skip
SMALL_VAE = presets.vae_config(
    sample_size=16, block_out_channels=[16, 32], layers_per_block=1, norm_num_groups=8,
    down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
)  # fmt: skip
TOPOLOGIES: dict[str, dict[str, signatures.Config]] = {
    # SSD-1B and Vega: no middle block, other depths at every layer, up differing from down.
    "no-middle": {"unet": {
        "mid_block_type": None, "layers_per_block": 2, "attention_head_dim": [2, 4], "use_linear_projection": True,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "transformer_layers_per_block": [1, [1, 2]],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "reverse_transformer_layers_per_block": [[2, 1, 3], 1], "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 6 * 8,
    }},
    # x4 upscaler: a noise level as class label; only cross-attention.
    "upscaler": {"unet": {
        "in_channels": 7, "num_class_embeds": 100, "only_cross_attention": [True, False], "use_linear_projection": True,
    }},
    # unCLIP: an image embedding as class label. SD 2.1: scores in float32. Head and channel counts not powers of two.
    "unclip": {"unet": {
        "class_embed_type": "projection", "projection_class_embeddings_input_dim": 48, "upcast_attention": True,
        "attention_head_dim": [3, 5], "block_out_channels": [30, 50], "norm_num_groups": 5,
    }},
    "scale-shift": {"unet": {
        "resnet_time_scale_shift": "scale_shift", "act_fn": "mish", "cross_attention_norm": "layer_norm",
        "center_input_sample": True,
    }},
    "attention-blocks": {"vae": {
        "use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False,
        "down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        "up_block_types": ["AttnUpDecoderBlock2D", "UpDecoderBlock2D"], "norm_num_groups": 4,
        "block_out_channels": [12, 20],
    }},
    "taesd": {"vae": {
        "_class_name": "AutoencoderTiny", "encoder_block_out_channels": [16, 16, 16], "num_encoder_blocks": [1, 2, 1],
        "decoder_block_out_channels": [16, 16, 16], "num_decoder_blocks": [1, 2, 1],
    }},
    # Later CLIPs have another end token and other activations.
    "clip": {"text_encoder": {
        "eos_token_id": 513, "hidden_act": "gelu", "hidden_size": 36, "num_attention_heads": 3,
        "max_position_embeddings": 100,
    }},
}  # fmt: skip
# torch module class -> the operators that replace it; the counts must be equal.
CALLED = {
    "Attention": ("MultiHeadAttention",),
    "CLIPAttention": ("MultiHeadAttention",),
    "GroupNorm": ("GroupNorm", "SkipGroupNorm"),
    "GEGLU": ("BiasSplitGelu",),
    "LayerNorm": ("LayerNormalization", "SkipLayerNormalization"),
    "Conv2d": ("NhwcConv",),
    "Upsample2D": ("UpsampleNearest", "SubpixelShuffle"),
    "QuickGELUActivation": ("QuickGelu",),
}


def topology(
    changes: dict[str, signatures.Config], pipeline: str = "StableDiffusionPipeline", **scheduler: Any
) -> Preset:
    """Return a small Stable Diffusion preset with the config values `changes`."""
    small = {"text_encoder": SMALL_CLIP, "unet": SMALL_UNET, "vae": SMALL_VAE}
    configs = {name: config | changes.get(name, {}) for name, config in small.items()}
    if configs["vae"]["_class_name"] == "AutoencoderTiny":
        configs["vae"] = changes["vae"]
    return Preset(pipeline, configs, presets.EULER | scheduler, {})


def calls(source: Checkpoint, component: str, config: signatures.Config) -> Counter[str]:
    """Return how often each module class in `CALLED` runs in one forward call of a component in torch."""
    model = source.load(signatures.MODEL_OF.get(component, component))
    module = wrap(component, model, is_sdxl(source), controlnet=False)
    counts: Counter[str] = Counter()
    for part in module.modules():
        part.register_forward_hook(lambda called, *_: counts.update([type(called).__name__]))
    signature = component_signature(source, component, config)
    with torch.no_grad():
        module(*(example_input(tensor, CHECK_SIZES, config, 0) for tensor in signature.inputs))
    return Counter({name: counts[name] for name in CALLED if counts[name]})


def fuse(name: str, path: Path, target: Target, dtype: str = "float32") -> tuple[Path, Path, dict]:
    """Return (source folder, optimized folder, manifest entry) of a committed graph."""
    source, out = graph_fixtures.make_folder(path / "source", name), path / "out"
    model = Path(name.rsplit(".", 1)[1]) / pipeline_folder.MODEL
    entry = optimize_component(source / model, out / model, target, dtype)
    (out / "model_index.json").write_text("{}")
    return source, out, entry


def test_every_family_has_two_exporters() -> None:
    exports = {(*family_of(name), name.rsplit(".", 1)[0].rsplit("-", 2)[1]) for name in graph_fixtures.NAMES}
    once = [key for key in EXPECTED if key != "sd15" for c in EXPECTED[key] if not c.startswith("vae")
            for exporter in ("dynamo", "torchscript") if (key, c, exporter) not in exports]  # fmt: skip
    assert once == []
    sd15 = {name.rsplit(".", 1)[0] for name in graph_fixtures.NAMES if name.startswith("sd15-tiny-")}
    assert len(sd15) == 8  # two of them as diffusers was exported before SDPA: eager, and half (in float16)


def family_of(name: str) -> tuple[str, str]:
    export, component = name.rsplit(".", 1)
    return export.rsplit("-", 2)[0].removesuffix("-tiny"), component


def assert_counts(name: str, graph: ir.Graph, rules: Mapping[str, int]) -> None:
    """Assert that a graph fused for `NHWC` with the rewrite counts `rules` has the nodes of its family."""
    family, component = family_of(name)
    ops = Counter(node.op_type for node in graph)
    packed = {key: rules[key] for key in ("packed_qkv", "packed_kv") if rules.get(key)}
    assert {op: ops[op] for op in COUNTED if ops[op]} | packed == EXPECTED[family][component]
    assert {op: ops[op] for op in REMOVED if ops[op]} == {}


COUNTED_BELOW = {name for name, target, dtype in CHECKED if (target, dtype) == (NHWC, "float32")}


COUNTED_HERE = [name for name in graph_fixtures.NAMES if name not in COUNTED_BELOW]
# One graph of each component of each family; those of SD 1.5 in tests/optimize/test_recipes.py.
FOR_EVERY_TARGET = {family_of(name): name for name in reversed(COUNTED_HERE) if family_of(name)[0] != "sd15"}


def test_every_family_is_rebuilt_for_every_target() -> None:
    assert FOR_EVERY_TARGET.keys() == {family_of(name) for name in graph_fixtures.NAMES if "sd15-tiny" not in name}


@pytest.mark.parametrize("name", COUNTED_HERE)
def test_counts(name: str) -> None:
    model = ir.from_proto(graph_fixtures.load(name))
    checkpoint = init_tensors(model)
    canonicalized = canonicalize(model)
    canonical = model.clone() if name in FOR_EVERY_TARGET.values() else None
    fused = run_fusions(model)
    if canonical is not None:
        check_recipes_of_targets(name, canonical, model, checkpoint)
    done = canonicalized, fused, run_all(model, NHWC.lowering_passes)
    assert_counts(name, model.graph, totals(*done))
    assert checked_recipes([model], checkpoint) > 50


@pytest.mark.parametrize(("name", "target", "dtype"), CHECKED, ids=lambda x: x.name if isinstance(x, Target) else x)
def test_numbers(name: str, target: Target, dtype: str, tmp_path: Path) -> None:
    source, out, entry = fuse(name, tmp_path, target, dtype)
    component = name.rsplit(".", 1)[1]
    model = ir.load(out / component / pipeline_folder.MODEL)
    if name in COUNTED_BELOW and (target, dtype) == (NHWC, "float32"):
        assert_counts(name, model.graph, entry["rewrite_counts"])
    weight_recipes.init_recipes(model, weight_recipes.load(entry["weight_recipes"]))
    assert checked_recipes([model], init_tensors(ir.load(source / component / pipeline_folder.MODEL))) > 50
    result = verify(source, out, library=False, sizes=SIZES)
    limits = {row["tolerance"] for row in result["rows"]}
    assert (
        all(2.9e-3 < limit < 4e-3 for limit in limits) if dtype == "float16" or "-half-" in name else limits == {1e-5}
    )
    assert len({tuple(row["shape"]) for row in result["rows"] if row["output"] == result["rows"][0]["output"]}) == 2
    check(result)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export (verified against torch), compare the counts with torch's calls, and verify the fused graph."""
    monkeypatch.setitem(PRESETS, name, topology(TOPOLOGIES[name]))
    raw, out, (changed,) = tmp_path / "raw", tmp_path / "out", TOPOLOGIES[name]
    components = ["vae_encoder", "vae_decoder"] if changed == "vae" else [changed]
    options = {"exporter": "torchscript", "opset": 17, "components": components}
    export(None, raw, preset=name, random_weights=True, **options)
    for component in components:
        model = Path(component) / pipeline_folder.MODEL
        counts = optimize_component(raw / model, out / model, NHWC)["op_counts"]
        config = json.loads((raw / component / "config.json").read_text())
        torch_calls = calls(open_preset(name, 0), component, config)
        assert {kind: sum(counts.get(op, 0) for op in ops) for kind, ops in CALLED.items() if kind in torch_calls} == {
            **torch_calls
        }
        assert counts.get("Transpose", 0) == (0 if component == "text_encoder" else 2)
    (out / "model_index.json").write_text("{}")
    check(verify(raw, out, library=False, sizes=SIZES))


def test_distilled_model_matches_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LCM: the UNet has a guidance scale input. The VAE is a tiny autoencoder."""
    changes = {"unet": {"time_cond_proj_dim": 33}, **TOPOLOGIES["taesd"]}
    preset = topology(
        changes, "LatentConsistencyModelPipeline", _class_name="LCMScheduler", original_inference_steps=50
    )
    monkeypatch.setitem(PRESETS, "lcm", preset)
    export(None, tmp_path / "raw", preset="lcm", random_weights=True, exporter="torchscript")
    optimize(tmp_path / "raw", tmp_path / "out", hoist=True)
    arguments: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 3, "output_type": "np"}
    pipeline, reference = StableDiffusionPipeline.from_pretrained(tmp_path / "out"), torch_pipeline("lcm", True)
    theirs = accelerate(torch_pipeline("lcm", True), tmp_path / "out", provider="cpu")
    for scale in (1.0, 6.0):
        seed = [torch.Generator().manual_seed(3) for _ in range(3)]
        image, accelerated, expected = (
            np.asarray(p("a cat", guidance_scale=scale, generator=g, **arguments).images)
            for p, g in zip((pipeline, theirs, reference), seed, strict=True)
        )
        assert expected.std() > 0.05
        assert np.abs(image - expected).max() < 1e-4
        assert np.abs(accelerated - expected).max() < 1e-4
    with pytest.raises(InputError, match="cannot take 60 steps"):
        pipeline("a cat", **arguments | {"num_inference_steps": 60})
