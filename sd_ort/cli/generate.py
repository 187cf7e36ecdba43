"""`sd-ort generate`: draw images from a prompt."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import click

from sd_ort.runtime.provider_table import PROVIDERS


class Devices(click.ParamType):
    """Numbers of devices, such as 0,1."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in value.split(","))
        except ValueError:
            self.fail(f"{value!r} are no numbers of devices: write 0,1.", param, ctx)


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--prompts", type=click.Path(path_type=Path, dir_okay=False), help="A file of prompts instead, one a line."
)
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Pipeline folder to draw with, or a checkpoint as `optimize` takes it.",
)
@click.option("--config", metavar="MODEL", help="With a checkpoint in one file: a folder or hub id of its family.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the folder that a checkpoint is made into.")
@click.option("--steps", type=click.IntRange(1), help="Denoising steps [default: 50, demo model 25].")
@click.option("--guidance", type=float, help="Guidance scale; 1 or less is none [default: 7.5, SDXL 5, demo model 3].")
@click.option("--seed", type=click.IntRange(0), help="Seed of the first image, counting up [default: a random one].")
@click.option("--num-images", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images drawn at once.")
@click.option("--negative", help="What the image must not show.")
@click.option("--height", type=int, help="Pixels [default: the model's].")
@click.option("--width", type=int, help="Pixels [default: the model's].")
@click.option("--image", type=click.Path(path_type=Path, dir_okay=False), help="Start from this picture.")
@click.option("--mask", type=click.Path(path_type=Path, dir_okay=False), help="Draw only where this picture is white.")
@click.option(
    "--strength",
    type=click.FloatRange(0, 1, min_open=True),
    help="How much noise covers --image [default: 0.8, 1 with --mask].",
)
@click.option("--control-image", type=click.Path(path_type=Path, dir_okay=False), help="What the ControlNet is shown.")
@click.option("--ip-adapter-image", type=click.Path(path_type=Path, dir_okay=False), help="A picture as a prompt.")
@click.option("--ip-adapter-scale", type=float, help="How much it counts, 0 not at all [default: 1].")
@click.option("--lora", "loras", multiple=True, metavar="FILE[:STRENGTH]", help="A LoRA on top; can be repeated.")
@click.option("--embedding", "words", multiple=True, metavar="FILE", help="A word of textual inversion; repeatable.")
@click.option("--weights", is_flag=True, help="Read (word:1.3), [word], BREAK and long prompts as the WebUIs do.")
@click.option("--clip-skip", type=click.IntRange(0), help="Leave out so many last layers of the text encoder.")
@click.option("--scheduler", help="A diffusers scheduler: euler, ddim, dpmsolver, unipc, ... [default: the model's].")
@click.option(
    "--provider",
    default="auto",
    show_default=True,
    help=f"One of {', '.join(PROVIDERS)}, or plugin:LIBRARY [default: the best that runs here].",
)
@click.option("--gpus", type=click.IntRange(1), help="Draw on so many GPUs, a replica on each.")
@click.option("--replicas", type=click.IntRange(1), help="Draw with so many replicas on the CPU, or on one GPU.")
@click.option("--allow-fallback", is_flag=True, help="Warn instead of failing when the provider is not really used.")
@click.option("--graph/--no-graph", default=None, help="Capture the UNet as a GPU graph [default: where it can be].")
@click.option(
    "--split-guidance", type=Devices(), metavar="A,B", help="Predict one half of guidance on each of two devices: 0,1."
)
@click.option("--unet-on", type=Devices(), metavar="A,B,...", help="Spread a large UNet over devices: 0,1.")
@click.option(
    "--decode-on", type=click.IntRange(0), metavar="N", help="Decode on device N while the next batch is drawn."
)
@click.option("--low-memory", is_flag=True, help="Keep one component in memory at a time.")
@click.option("--vae-tiling", is_flag=True, help="Decode large images in overlapping tiles.")
@click.option("--vae-slicing", is_flag=True, help="Decode the images of a batch one by one.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: one a core].")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("."), help="A .png file, or a folder [default: .]."
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def command(
    prompt: str | None,
    prompts: Path | None,
    gpus: int | None,
    replicas: int | None,
    folder: Path,
    steps: int | None,
    guidance: float | None,
    seed: int | None,
    num_images: int,
    batch: int,
    negative: str | None,
    height: int | None,
    width: int | None,
    image: Path | None,
    mask: Path | None,
    strength: float | None,
    control_image: Path | None,
    ip_adapter_image: Path | None,
    ip_adapter_scale: float | None,
    loras: tuple[str, ...],
    words: tuple[str, ...],
    weights: bool,
    clip_skip: int | None,
    out: Path,
    overwrite: bool,
    **loading: Any,
) -> None:
    """Draw images of PROMPT and write them as PNG files.

    A checkpoint (a .safetensors file, a diffusers folder, a hub id, `demo`) is optimized for the provider first, in
    float16 but on a CPU, into a folder that goes again unless --keep names it.

    With --image, the picture is drawn over; with --mask too, only where the mask is white.

    Image number i is drawn from seed + i, so each can be drawn again alone. The files keep prompt, seed and settings
    as PNG text. With --prompts, --gpus or --replicas the first seed is 0, and files that are there already stay: the
    same command goes on where it was interrupted.
    """
    if prompts or gpus or replicas or prompt is None:
        from sd_ort.cli.prompt_list import draw_list

        return draw_list(click.get_current_context().params)
    from sd_ort.checkpoints.generation_defaults import generation_defaults
    from sd_ort.core.errors import InputError
    from sd_ort.pipelines.arguments import check_numbers, check_seeds, check_text

    check_text([prompt, negative or ""])
    check_files(loras, words)
    check_numbers(height, width, num_images, guidance=guidance, strength=strength)
    if image is None and (mask is not None or strength is not None):
        raise InputError("--mask and --strength change a picture: give it with --image.")
    pictures = {"image": image, "mask_image": mask, "control_image": control_image}
    pictures["ip_adapter_image"] = ip_adapter_image
    opened = {name: open_picture(path) for name, path in pictures.items() if path is not None}
    first = random.randrange(2**31) if seed is None else seed
    check_seeds(first, num_images)
    seeds = range(first, first + num_images)
    paths = free_paths(out, prompt, seeds, overwrite)
    model = folder
    folder, loading["provider"] = whole_folder(folder, loading)
    defaults = generation_defaults(folder, inpaint=mask is not None)
    steps, guidance = steps or defaults.steps, defaults.guidance if guidance is None else guidance
    if negative and guidance <= 1:
        click.echo(f"--negative changes nothing: guidance {guidance:g} is none.", err=True)
    kind = "Inpaint" if mask else "Img2Img" if image else "ControlNet" if control_image else ""
    pipeline = open_pipeline(folder, kind, loading)
    add_loras(pipeline, loras)
    add_words(pipeline, words)
    if ip_adapter_scale is not None:
        pipeline.set_ip_adapter_scale(ip_adapter_scale)
    changing = {"strength": strength, "clip_skip": clip_skip, "prompt_syntax": "weights" if weights else None}
    given = {name: value for name, value in {**opened, **changing}.items() if value is not None}
    settings = png_text(
        prompt=prompt, negative_prompt=negative or "", steps=steps, guidance=guidance, model=model, **pictures,
        scheduler=type(pipeline.scheduler).__name__, loras=", ".join(loras) or None,
        embeddings=", ".join(words) or None, ip_adapter_scale=ip_adapter_scale, **changing,
    )  # fmt: skip
    alike = {
        "prompt": prompt, "height": height, "width": width, "num_inference_steps": steps, "guidance_scale": guidance,
        "negative_prompt": negative, **given,
    }  # fmt: skip
    draw_files(pipeline, alike, dict(zip(seeds, paths, strict=True)), batch, settings, overwrite=overwrite)


def draw_files(
    pipeline: Any,
    alike: dict[str, Any],
    paths: dict[int, Path],
    batch: int,
    settings: dict[str, str],
    *,
    overwrite: bool,
) -> None:
    """Draw an image for each seed of `paths`, `batch` at once, with arguments `alike`, and say where each was saved."""
    seeds = list(paths)
    parts = [seeds[start : start + batch] for start in range(0, len(seeds), batch)]
    calls = ({**alike, "num_images_per_prompt": len(part), "generator": part} for part in parts)
    for part, output in zip(parts, pipeline.draw_each(calls), strict=True):
        for drawn, seed in zip(output.images, part, strict=False):
            save_png(drawn, paths[seed], {**settings, "seed": str(seed)}, overwrite=overwrite)
            click.echo(paths[seed])


def whole_folder(model: Path, loading: dict[str, Any]) -> tuple[Path, str]:
    """The pipeline folder to draw with: `model`, or what a checkpoint is optimized into, until the command ends; and
    the provider that runs it.

    loading: options of the command, whose `keep` and `config` it takes out. Raises InputError for a model that is
    neither, ProviderError for a provider that cannot draw: before the seconds of importing torch or of optimizing.
    """
    from sd_ort.checkpoints import is_checkpoint
    from sd_ort.core.errors import InputError
    from sd_ort.core.pipeline_folder import components
    from sd_ort.runtime.providers import check_provider

    keep, config = loading.pop("keep"), loading.pop("config")
    checkpoint = is_checkpoint(model)
    if not checkpoint:
        if keep or config:
            raise InputError(f"--keep and --config go with a checkpoint: {model} is none.")
        components(model)
    provider = choose(None if checkpoint else model, loading["provider"])
    check_provider(provider, allow_fallback=loading["allow_fallback"])
    if not checkpoint:
        return model, provider
    from sd_ort.stages import optimized_folder

    made = optimized_folder(str(model), provider, keep, config, lambda line: click.echo(line, err=True))
    return click.get_current_context().with_resource(made), provider


def choose(folder: Path | None, provider: str) -> str:
    """Return the provider that runs a pipeline folder, or None for a checkpoint; say an automatic choice on stderr."""
    from sd_ort.runtime import provider_choice

    if folder is not None:
        choice = provider_choice.provider_for(folder, provider)
    else:
        auto = provider == provider_choice.AUTO
        choice = provider_choice.choose_provider() if auto else provider_choice.resolve_device(provider)
    if choice.reason:
        click.echo(choice.line, err=True)
    return choice.provider


def open_pipeline(folder: Path, kind: str, loading: dict[str, Any]) -> Any:
    """The pipeline that draws with a folder: text to image, "ControlNet", "Img2Img" or "Inpaint". `loading`: options of
    `from_pretrained`. Raises InputError for a merged folder that starts from a picture."""
    from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline
    from sd_ort.core.errors import InputError
    from sd_ort.core.pipeline_folder import MERGED, components

    pictures = {"Img2Img": StableDiffusionImg2ImgPipeline, "Inpaint": StableDiffusionInpaintPipeline}
    drawing: type[StableDiffusionPipeline] = pictures.get(kind, StableDiffusionPipeline)
    if MERGED in components(folder):
        from sd_ort.pipelines.merged import MergedPipeline

        if kind:
            raise InputError(f"{folder} is merged, for text to image alone: draw with the folder it was made from.")
        drawing = MergedPipeline
    return drawing.from_pretrained(folder, **loading)


def check_files(loras: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Raise InputError where a LoRA or a textual inversion is missing, or a strength is no number."""
    from sd_ort.core.errors import InputError

    for path in (*(lora_strength(lora)[0] for lora in loras), *words):
        if not Path(path).is_file():
            raise InputError(f"{path} is no file: give a .safetensors file that is there.")


def add_loras(pipeline: Any, loras: tuple[str, ...]) -> None:
    """Load LoRAs, each FILE or FILE:STRENGTH."""
    strengths = [lora_strength(lora) for lora in loras]
    for number, (lora, _) in enumerate(strengths):
        pipeline.load_lora_weights(lora, f"lora{number}")
    if strengths:
        pipeline.set_adapters([f"lora{i}" for i in range(len(strengths))], [strength for _, strength in strengths])


def add_words(pipeline: Any, words: tuple[str, ...]) -> None:
    """Load textual inversions."""
    for word in words:
        pipeline.load_textual_inversion(word)


def free_paths(out: Path, prompt: str, seeds: range, overwrite: bool) -> list[Path]:
    """A PNG for each image. Raises OutputError where one exists that must not be overwritten, or none can be made."""
    from sd_ort.core.errors import OutputError
    from sd_ort.core.paths import check_writable

    paths = image_paths(out, prompt, seeds)
    check_writable(paths[0])
    if not overwrite and (taken := [path for path in paths if path.exists()]):
        raise OutputError(f"{taken[0]} exists: choose another --out or pass --overwrite.")
    return paths


def png_text(**settings: object) -> dict[str, str]:
    """What a file keeps of the settings it was drawn with: those that were given."""
    return {name: str(value) for name, value in settings.items() if value is not None}


def lora_strength(text: str) -> tuple[str, float]:
    """FILE:0.8 -> (FILE, 0.8), FILE -> (FILE, 1.0). Raises InputError for a strength that is no number."""
    from sd_ort.core.errors import InputError

    path, colon, strength = text.rpartition(":")
    if not colon or strength.endswith(".safetensors"):
        return text, 1.0
    try:
        number = float(strength)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"--lora {text}: {strength!r} is no strength; write FILE or FILE:0.8.")
    return path, number


def open_picture(path: Path) -> object:
    """A picture as RGB. Raises InputError when it is missing or none."""
    from PIL import Image

    from sd_ort.core.errors import InputError

    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        raise InputError(f"{path} cannot be opened as a picture: {error.strerror or 'unknown format'}.") from error


def image_paths(out: Path, prompt: str, seeds: range) -> list[Path]:
    """One PNG path a seed: `out` itself for one image and a file name, else names that end in the seed."""
    if out.suffix.lower() == ".png":
        return [out] if len(seeds) == 1 else [out.with_stem(f"{out.stem}-{seed}") for seed in seeds]
    from sd_ort.core.paths import words_of

    return [out / f"{words_of(prompt)}-{seed}.png" for seed in seeds]


def save_png(image: object, path: Path, settings: dict[str, str], *, overwrite: bool) -> None:
    """Write a PIL image with its settings as PNG text; the file appears whole or not at all."""
    from PIL import Image

    from sd_ort.core.files import write_bytes
    from sd_ort.pipelines.png import png_bytes

    assert isinstance(image, Image.Image)
    write_bytes(path, png_bytes(image, settings), overwrite=overwrite)
