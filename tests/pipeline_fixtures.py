"""A Stable Diffusion pipeline of 150 thousand random parameters: its diffusers folder, its export, and its fusion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sd_ort.models import BYTE_VOCABULARY

WORDS = 77


def make_torch_pipeline(folder: Path) -> None:
    """Save it as a diffusers folder. 64x64 pixels, VAE factor 8, two UNet levels, distinct non-zero parameters."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    from sd_ort.export import fill_random, write_byte_tokenizer

    write_byte_tokenizer(folder.parent / "tokenizer", BYTE_VOCABULARY)
    tokenizer = CLIPTokenizer.from_pretrained(folder.parent / "tokenizer")
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=WORDS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
    for seed, model in enumerate((text, unet, vae)):
        fill_random(model, seed)
    # A random UNet predicts noise of any size: small predictions keep the latents, and so the pixels, within range.
    with torch.no_grad():
        unet.conv_out.weight.mul_(0.3)
        vae.decoder.conv_out.weight.mul_(0.5)
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """One torch thread: for models this small a second one only waits, for long when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_torch(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """The diffusers folder."""
    folder = tmp_path_factory.mktemp("tiny") / "torch"
    make_torch_pipeline(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_onnx(tiny_torch: Path) -> Path:
    """Its raw export, without the VAE encoder."""
    from sd_ort.export import export

    out = tiny_torch.parent / "onnx"
    export(str(tiny_torch), out, components=["text_encoder", "unet", "vae_decoder"])
    return out


@pytest.fixture(scope="session")
def tiny_fused(tiny_onnx: Path) -> Path:
    """The export, fused for the portable target."""
    from sd_ort.optimize import optimize

    out = tiny_onnx.parent / "fused"
    optimize(tiny_onnx, out)
    return out
