"""Train the demo model: a small Stable Diffusion that draws the synthetic scenes of `sd_ort.demo.scenes`.

    python scripts/train_demo_model.py --out model --minutes 8
    python scripts/train_demo_model.py --out model2 --minutes 8 --init model     # go on from there
    python scripts/train_demo_model.py --evaluate sd_ort/demo/model --out fidelity.json

One GPU, bfloat16 autocast. First the VAE (half of the time), then text encoder and UNet together on the VAE's
latents (v-prediction, caption dropout, exponential moving average). Written: a diffusers `StableDiffusionPipeline`
folder in float16, and `fidelity.json` with its score on prompts of combinations that training never saw.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sd_ort.core.folder import sha256
from sd_ort.demo import GUIDANCE, STEPS, fidelity, scenes
from sd_ort.runtime import machine

TOKENS = 77
START, END = "<|startoftext|>", "<|endoftext|>"
CAPTION_DROPOUT = 0.1
EMA_DECAY = 0.999
PALETTE = list(scenes.COLOURS)
SHAPES = list(scenes.SHAPES)


# --- Tokenizer --------------------------------------------------------------------------------------------------------


def bpe_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is one symbol (ending in `</w>`)."""
    split = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for symbols in split for pair in pairwise(symbols)):
        pair = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(pair)
        for symbols in split:
            i = 0
            while i < len(symbols) - 1:
                if (symbols[i], symbols[i + 1]) == pair:
                    symbols[i : i + 2] = ["".join(pair)]
                i += 1
    return merges


def write_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIPTokenizer whose vocabulary is all bytes and one token for each word of the captions."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    merges = bpe_merges(scenes.words())
    symbols = [*letters, *(f"{c}</w>" for c in letters), *map("".join, merges), START, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": TOKENS,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for word in scenes.words():
        if len(tokenizer(word).input_ids) != 3:
            raise RuntimeError(f"the tokenizer splits {word!r}: {tokenizer.tokenize(word)}")
    return tokenizer


# --- Model ------------------------------------------------------------------------------------------------------------


def new_pipeline(folder: Path) -> Any:
    """A randomly initialized pipeline of SD 1.5's topology, 10 M parameters; its tokenizer is written to `folder`."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            projection_dim=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=scenes.SIDE // 8,
        block_out_channels=(64, 128, 64, 64),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        cross_attention_dim=128,
        attention_head_dim=4,  # the number of heads, as in SD 1.5's config
        norm_num_groups=32,
    )
    vae = AutoencoderKL(
        sample_size=scenes.SIDE,
        block_out_channels=(64, 64, 64, 64),
        layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=32,
    )
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        steps_offset=1,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )
    return StableDiffusionPipeline(
        vae, text_encoder, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
    )


def parameters(pipeline: Any) -> int:
    """Number of parameters of all three networks."""
    return sum(p.numel() for m in (pipeline.text_encoder, pipeline.unet, pipeline.vae) for p in m.parameters())


# --- Data -------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Training scenes as tensors on the device.

    shape, colour: int64 [N, 2] (indices; shape -1: no such item); background: int64 [N]; place: float32 [N, 2, 3]
    (centre x, y, radius in pixels); tokens: int64 [N, 77].
    """

    shape: torch.Tensor
    colour: torch.Tensor
    background: torch.Tensor
    place: torch.Tensor
    tokens: torch.Tensor

    def __len__(self) -> int:
        return len(self.background)


def _sample_chunk(job: tuple[int, int, dict[str, int]]) -> tuple[np.ndarray, ...]:
    """`count` training scenes as arrays; `ids` maps the captions' words to token ids."""
    seed, count, ids = job
    rng = random.Random(f"train {seed}")
    shape = np.full((count, 2), -1, np.int64)
    colour = np.zeros((count, 2), np.int64)
    background = np.zeros(count, np.int64)
    place = np.ones((count, 2, 3), np.float32)
    tokens = np.full((count, TOKENS), ids[END], np.int64)
    for n in range(count):
        scene = scenes.sample(rng, 1 if rng.random() < 0.35 else 2, unseen=False)
        for i, (item, position) in enumerate(zip(scene.items, scenes.layout(scene, rng), strict=True)):
            shape[n, i], colour[n, i], place[n, i] = SHAPES.index(item.shape), PALETTE.index(item.colour), position
        background[n] = PALETTE.index(scene.background)
        row = [ids[START], *(ids[word] for word in scenes.caption(scene).split())]
        tokens[n, : len(row)] = row
    return shape, colour, background, place, tokens


def sample_data(count: int, seed: int, tokenizer: CLIPTokenizer, device: torch.device) -> Data:
    """`count` random training scenes, drawn by all CPU cores."""
    ids = {word: tokenizer(word).input_ids[1] for word in scenes.words()}
    ids |= {START: tokenizer.bos_token_id, END: tokenizer.eos_token_id}
    chunk = max(1, min(10_000, count // (os.cpu_count() or 1)))
    jobs = [(seed * 1_000_003 + i, chunk, ids) for i in range(math.ceil(count / chunk))]
    with multiprocessing.get_context("spawn").Pool() as pool:
        parts = pool.map(_sample_chunk, jobs)
    return Data(*(torch.from_numpy(np.concatenate(p)[:count]).to(device) for p in zip(*parts, strict=True)))


def render(data: Data, index: torch.Tensor) -> torch.Tensor:
    """Pictures of the scenes `index`, float32 [B, 3, 128, 128] in -1..1."""
    device = index.device
    palette = torch.tensor([scenes.COLOURS[c] for c in PALETTE], device=device, dtype=torch.float32) / 127.5 - 1
    centres = torch.arange(scenes.SIDE, device=device) + 0.5
    picture = palette[data.background[index], :, None, None].repeat(1, 1, scenes.SIDE, scenes.SIDE)
    for slot in (0, 1):
        for s, name in enumerate(SHAPES):
            rows = torch.nonzero(data.shape[index, slot] == s)[:, 0]
            cx, cy, radius = data.place[index[rows], slot, :, None, None].unbind(1)
            share = scenes.coverage(name, centres[None, None] - cx, centres[None, :, None] - cy, radius)[:, None]
            colour = palette[data.colour[index[rows], slot], :, None, None]
            picture[rows] += share * (colour - picture[rows])
    return picture


# --- Training ---------------------------------------------------------------------------------------------------------


class Clock:
    """Progress of a phase, 0 to 1: by steps when `steps` is given, else by wall-clock `seconds`."""

    def __init__(self, name: str, seconds: float, steps: int | None) -> None:
        self.name, self.seconds, self.steps = name, seconds, steps
        self.step, self.start, self.printed = 0, time.monotonic(), 0.0

    def progress(self) -> float:
        elapsed = (time.monotonic() - self.start) / self.seconds
        return min(1.0, self.step / self.steps if self.steps else elapsed)

    def tick(self, loss: torch.Tensor) -> None:
        self.step += 1
        now = time.monotonic()
        if now - self.printed > 10:
            self.printed = now
            rate = self.step / (now - self.start)
            print(
                f"{self.name}: {self.progress():4.0%}, step {self.step}, loss {loss:.4f}, {rate:.1f} it/s", flush=True
            )


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Cosine from `peak` to a hundredth of it, after 200 steps of linear warm-up."""
    return peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


def _optimizer(parameters: list[torch.nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type == "cuda")


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train_vae(vae: Any, data: Data, clock: Clock, batch: int, compiled: bool) -> None:
    """Reconstruction (L1 + L2 + L1 of the differences between neighbouring pixels) with a small KL term."""
    device = data.tokens.device

    def losses(pictures: torch.Tensor) -> torch.Tensor:
        posterior = vae.encode(pictures).latent_dist
        drawn = vae.decode(posterior.sample()).sample.float()
        error = drawn - pictures
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        kl = posterior.kl().mean() / pictures[0].numel()
        return error.abs().mean() + error.square().mean() + 0.5 * edges + 1e-3 * kl

    loss_of = torch.compile(losses) if compiled else losses
    optimizer = _optimizer(list(vae.parameters()), device)
    vae.train()
    while (progress := clock.progress()) < 1:
        pictures = render(data, torch.randint(len(data), (batch,), device=device))
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(pictures)
        _step(optimizer, loss, learning_rate(progress, clock.step, 7e-4))
        clock.tick(loss)
    vae.eval()


@torch.no_grad()
def encode(vae: Any, data: Data, batch: int, compiled: bool) -> torch.Tensor:
    """Latents of all scenes, sampled from the VAE's posterior, before scaling: bfloat16 [N, 4, 16, 16]."""
    device = data.tokens.device
    encoder = torch.compile(vae.encode) if compiled else vae.encode
    side = scenes.SIDE // 8
    latents = torch.empty(len(data), 4, side, side, dtype=torch.bfloat16, device=device)
    for start in range(0, len(data), batch):
        index = torch.arange(start, start + batch, device=device) % len(data)  # all batches alike: compiled once
        pictures = render(data, index).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            latents[index] = encoder(pictures).latent_dist.sample().to(torch.bfloat16)
    return latents


def train_diffusion(
    pipeline: Any,
    data: Data,
    latents: torch.Tensor,
    clock: Clock,
    batch: int,
    rate: float,
    compiled: bool,
) -> None:
    """Text encoder and UNet together; both are left with the moving average of their weights."""
    device = latents.device
    unet, text_encoder = pipeline.unet, pipeline.text_encoder
    alphas = pipeline.scheduler.alphas_cumprod.to(device)
    empty = torch.tensor(pipeline.tokenizer("", padding="max_length").input_ids, device=device)
    forward = torch.compile(unet) if compiled else unet
    trained = [*unet.parameters(), *text_encoder.parameters()]
    average = copy.deepcopy([p.detach() for p in trained])
    optimizer = _optimizer(trained, device)
    unet.train()
    text_encoder.train()
    while (progress := clock.progress()) < 1:
        index = torch.randint(len(data), (batch,), device=device)
        dropped = torch.rand(batch, 1, device=device) < CAPTION_DROPOUT
        tokens = torch.where(dropped, empty, data.tokens[index])
        clean = latents[index].float() * pipeline.vae.config.scaling_factor
        noise = torch.randn_like(clean)
        time_steps = torch.randint(len(alphas), (batch,), device=device)
        signal = alphas[time_steps, None, None, None].sqrt()
        spread = (1 - alphas[time_steps, None, None, None]).sqrt()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            text = text_encoder(tokens).last_hidden_state
            noisy = (signal * clean + spread * noise).contiguous(memory_format=torch.channels_last)
            drawn = forward(noisy, time_steps, text, return_dict=False)[0]
        loss = F.mse_loss(drawn.float(), signal * noise - spread * clean)
        _step(optimizer, loss, learning_rate(progress, clock.step, rate))
        decay = min(EMA_DECAY, (clock.step + 1) / (clock.step + 10))
        torch._foreach_lerp_(average, [p.detach() for p in trained], 1 - decay)
        clock.tick(loss)
    with torch.no_grad():
        for parameter, value in zip(trained, average, strict=True):
            parameter.copy_(value)
    unet.eval()
    text_encoder.eval()


# --- Evaluation -------------------------------------------------------------------------------------------------------


def reconstruction(vae: Any, count: int, device: torch.device) -> float:
    """Fidelity of unseen scenes after encoding and decoding (an upper bound for the model)."""
    rng = random.Random("reconstruction")
    drawn = [scenes.sample(rng, 1 + i % 2, unseen=True) for i in range(count)]
    pictures = np.stack([scenes.render(s, scenes.layout(s, rng)) for s in drawn])
    images = []
    with torch.no_grad():
        for part in torch.from_numpy(pictures).split(32):
            inputs = part.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
            outputs = vae.decode(vae.encode(inputs).latent_dist.mode()).sample
            images.append(((outputs + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy())
    return fidelity.score([scenes.caption(s) for s in drawn], np.concatenate(images)).share


def draw(pipeline: Any, prompts: list[str], seed: int, steps: int, guidance: float, batch: int) -> list[Any]:
    """One picture for each prompt, from noise made on the CPU: the i-th prompt's seed is `seed + i`."""
    images: list[Any] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        images += pipeline(part, num_inference_steps=steps, guidance_scale=guidance, generator=generators).images
    return images


def evaluate(
    folder: Path, path: Path, device: torch.device, count: int, seed: int, settings: list[tuple[int, float]]
) -> None:
    """Fidelity of the saved folder in float32 on `count` unseen prompts, for each (steps, guidance).

    The report goes to `path` (JSON), a contact sheet of the first setting's pictures to the same name ending in .png.
    """
    torch.backends.cudnn.allow_tf32 = False
    pipeline = StableDiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    prompts = scenes.unseen_prompts(count, seed)
    report: dict[str, Any] = {
        "prompts": count,
        "seed": seed,
        "dtype": "float32",
        "scheduler": type(pipeline.scheduler).__name__,
        "parameters": parameters(pipeline),
        "vae_reconstruction_share": reconstruction(pipeline.vae, count, device),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else machine.cpu_name(),
        "versions": machine.versions(),
        "command": " ".join(["python", *sys.argv]),
        "commit": machine.commit(),
        "weights_sha256": {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*.safetensors"))},
        "runs": [],
    }
    print(f"VAE reconstruction: {report['vae_reconstruction_share']:.2%}", flush=True)
    for steps, guidance in settings:
        images = draw(pipeline, prompts, seed, steps, guidance, 128 if device.type == "cuda" else 8)
        result = fidelity.score(prompts, images)
        print(f"fidelity, {steps} steps, guidance {guidance}: {result.right}/{result.total} = {result.share:.2%}")
        report["runs"].append(
            {"steps": steps, "guidance": guidance, "right": result.right, "share": result.share}
            | {"failures": [f"{prompt}: {reason}" for prompt, reason in result.failures]}
        )
        if len(report["runs"]) == 1:
            sheet(images[:48]).save(path.with_suffix(".png"))
    path.write_text(json.dumps(report, indent=1) + "\n")


def sheet(images: list[Any], columns: int = 8) -> Any:
    """A contact sheet of equally large PIL pictures."""
    from PIL import Image

    width, height = images[0].size
    page = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height))
    for i, image in enumerate(images):
        page.paste(image, (i % columns * width, i // columns * height))
    return page


# --- Main -------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline; with --evaluate: JSON file")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps a phase instead of --minutes")
    parser.add_argument("--init", type=Path, help="start from this pipeline folder instead of random weights")
    parser.add_argument("--vae-share", type=float, default=0.5, help="VAE's share of the time; 0 leaves it as it is")
    parser.add_argument("--evaluate", type=Path, help="train nothing, only score this pipeline folder")
    parser.add_argument("--scenes", type=int, default=300_000, help="number of training scenes")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=8e-4, help="peak learning rate of UNet and text encoder")
    parser.add_argument("--vae-batch", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=512, help="number of unseen prompts to score")
    parser.add_argument("--sweep", action="store_true", help="score other numbers of steps and guidances, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def save(pipeline: Any, folder: Path) -> None:
    """Write the pipeline, with the tokenizer as vocab.json and merges.txt and no trace of the folder it came from."""
    pipeline.save_pretrained(folder, safe_serialization=True)
    shutil.rmtree(folder / "tokenizer")
    write_tokenizer(folder / "tokenizer")
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=2) + "\n")


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    start, seconds = time.monotonic(), options.minutes * 60
    options.out.mkdir(parents=True, exist_ok=True)
    pipeline: Any = StableDiffusionPipeline.from_pretrained(options.init) if options.init else new_pipeline(options.out)
    for module in (pipeline.vae, pipeline.unet, pipeline.text_encoder):
        module.to(device, torch.float32, memory_format=torch.channels_last)
    print(f"{parameters(pipeline) / 1e6:.2f} M parameters", flush=True)
    data = sample_data(options.scenes, options.seed + bool(options.init), pipeline.tokenizer, device)
    print(f"{len(data)} scenes after {time.monotonic() - start:.0f} s", flush=True)
    if options.vae_share:
        clock = Clock("VAE", seconds * options.vae_share, options.steps)
        train_vae(pipeline.vae, data, clock, options.vae_batch, options.compile)
    latents = encode(pipeline.vae, data, 500, options.compile)
    if options.vae_share:
        pipeline.vae.register_to_config(scaling_factor=round(1 / latents[:50_000].float().std().item(), 5))
    means = latents[:50_000].float().mean(dim=(0, 2, 3)).tolist()
    print(
        f"latents after {time.monotonic() - start:.0f} s: channel means {means}, {pipeline.vae.config.scaling_factor=}"
    )
    left = max(1.0, seconds - (time.monotonic() - start))
    train_diffusion(
        pipeline, data, latents, Clock("UNet", left, options.steps), options.batch, options.rate, options.compile
    )
    for module in (pipeline.vae, pipeline.unet, pipeline.text_encoder):
        module.to("cpu", torch.float16, memory_format=torch.contiguous_format)
    save(pipeline, options.out)
    print(f"saved after {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    folder = options.evaluate or options.out
    if not options.evaluate:
        train(options, device)
    settings = [(STEPS, GUIDANCE)]
    if options.sweep:
        settings += [(STEPS, 1.0), (STEPS, 2.0), (STEPS, 5.0), (15, GUIDANCE), (50, GUIDANCE)]
    path = options.out if options.evaluate else options.out.parent / f"{folder.name}-fidelity.json"
    evaluate(folder, path, device, options.prompts, options.seed, settings)


if __name__ == "__main__":
    main()
