"""Every exporter's graph of every family becomes the same fused graph, with the numbers it had.

The graphs are exports of the `-tiny` presets, which have the topology of the full models: counts are theirs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import graph_fixtures
import onnx_ir as ir
import pytest

from sd_ort import folder
from sd_ort.optimize import optimize_component
from sd_ort.targets import PORTABLE, Target
from sd_ort.verify import check, verify

# All that a GPU provider could take, as function bodies, so that the CPU runs it: the layout and the packing.
NHWC = Target("nhwc", layout="NHWC", pack=True)

# What a family's components consist of after fusion; SD 1.5 as in the table of README.md, others by their topology.
# A GroupNorm is a SkipGroupNorm where it normalizes a sum (a convolution and the time embedding, a block and its
# residual), and stays one behind a Concat or a convolution alone.
VAE = {
    "vae_encoder": {"MultiHeadAttention": 1, "GroupNorm": 14, "SkipGroupNorm": 8, "NhwcConv": 28, "Transpose": 2},
    "vae_decoder": {"MultiHeadAttention": 1, "GroupNorm": 18, "SkipGroupNorm": 12, "NhwcConv": 36, "Transpose": 2},
}
SD_UNET = {
    "MultiHeadAttention": 32, "packed_qkv": 16, "packed_kv": 16, "GroupNorm": 16, "SkipGroupNorm": 45,
    "BiasSplitGelu": 16, "BiasAdd": 16, "SkipLayerNormalization": 32, "LayerNormalization": 16,
    "NhwcConv": 98, "Transpose": 2,
}  # fmt: skip
CLIP_L = {"MultiHeadAttention": 12, "SkipLayerNormalization": 24, "LayerNormalization": 1, "QuickGelu": 12}
EXPECTED: dict[str, dict[str, dict[str, int]]] = {
    "sd15": {"text_encoder": CLIP_L, "unet": SD_UNET, **VAE},
    "sd15-inpaint": {"unet": SD_UNET},
    # One Transpose a residual that comes in: 12 of the encoder, one of the middle block.
    "sd15-controlnet": {
        "unet": SD_UNET | {"Transpose": 15},
        "controlnet": {
            "MultiHeadAttention": 14, "packed_qkv": 7, "packed_kv": 7, "GroupNorm": 3, "SkipGroupNorm": 24,
            "BiasSplitGelu": 7, "BiasAdd": 7, "SkipLayerNormalization": 14, "LayerNormalization": 7, "NhwcConv": 61,
            "Transpose": 15,
        },
    },
    # Projections into and out of the transformers are linear: 32 convolutions fewer.
    "sd21": {
        "text_encoder": {"MultiHeadAttention": 23, "SkipLayerNormalization": 46, "LayerNormalization": 1},
        "unet": SD_UNET | {"NhwcConv": 66},
        **VAE,
    },
    "sdxl": {
        # The penultimate state is asked for: 11 layers, the last of which ends in a sum that no normalization follows.
        "text_encoder": {
            "MultiHeadAttention": 11, "SkipLayerNormalization": 21, "LayerNormalization": 1, "BiasAdd": 1,
            "QuickGelu": 11,
        },
        "text_encoder_2": {"MultiHeadAttention": 32, "SkipLayerNormalization": 64, "LayerNormalization": 1},
        "unet": {
            "MultiHeadAttention": 140, "packed_qkv": 70, "packed_kv": 70, "GroupNorm": 12, "SkipGroupNorm": 34,
            "BiasSplitGelu": 70, "BiasAdd": 11, "SkipLayerNormalization": 199, "LayerNormalization": 11, "NhwcConv": 51,
            "Transpose": 2,
        },
        **VAE,
    },
    "sdxl-refiner": {
        "unet": {
            "MultiHeadAttention": 88, "packed_qkv": 44, "packed_kv": 44, "GroupNorm": 16, "SkipGroupNorm": 40,
            "BiasSplitGelu": 44, "BiasAdd": 11, "SkipLayerNormalization": 121, "LayerNormalization": 11, "NhwcConv": 66,
            "Transpose": 2,
        },
    },
}  # fmt: skip
# No fused graph has these: each one left would be a site that was missed.
GONE = ("Softmax", "InstanceNormalization", "GroupNormalization", "Erf", "IsNaN", "ScaledDotProductAttention")
# Latent sizes; the session, not the run, takes the time.
SIZES = ({"batch": 1, "sequence": 19, "height": 16, "width": 8}, {"batch": 2, "sequence": 12, "height": 8, "width": 24})
# One exporter a family, each target and type; the others differ in spelling only, which the counts prove gone.
CHECKED = [
    ("sd15-tiny-torchscript-17.unet", NHWC, "float32"),
    ("sd15-tiny-dynamo-23.unet", PORTABLE, "float32"),
    ("sd15-tiny-dynamo-21.unet", NHWC, "float16"),
    ("sd21-tiny-dynamo-20.unet", PORTABLE, "float16"),
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


def fuse(name: str, path: Path, target: Target, dtype: str = "float32") -> tuple[Path, Path, dict]:
    """(source folder, optimized folder, entry of the manifest) of a committed graph."""
    source, out = graph_fixtures.make_folder(path / "source", name), path / "out"
    model = Path(name.rsplit(".", 1)[1]) / folder.MODEL
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


@pytest.mark.parametrize("name", graph_fixtures.NAMES)
def test_counts(name: str, tmp_path: Path) -> None:
    family, component = family_of(name)
    _, out, entry = fuse(name, tmp_path, NHWC)
    packed = {key: count for key, count in entry["rules"].items() if key.startswith("packed") and count}
    assert entry["counts"] | packed == EXPECTED[family][component]
    ops = Counter(node.op_type for node in ir.load(out / component / folder.MODEL).graph)
    assert {op: ops[op] for op in GONE if ops[op]} == {}


@pytest.mark.parametrize(("name", "target", "dtype"), CHECKED, ids=lambda x: x.name if isinstance(x, Target) else x)
def test_numbers(name: str, target: Target, dtype: str, tmp_path: Path) -> None:
    source, out, _ = fuse(name, tmp_path, target, dtype)
    result = verify(source, out, portable=True, sizes=SIZES)
    assert {row["tolerance"] for row in result["rows"]} == {3e-3 if dtype == "float16" or "-half-" in name else 1e-5}
    assert len({tuple(row["shape"]) for row in result["rows"] if row["output"] == result["rows"][0]["output"]}) == 2
    check(result)
