"""`sd-ort generate`: images from a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from sd_ort.cli.model_options import (
    check_files,
    echo_progress,
    enable_cache,
    integer_if_whole,
    load_adapters,
    options_on_command_line,
    resolve_pipeline_folder,
)
from sd_ort.cli.numbers import GUIDANCE, PIXELS, REPLICAS, THREADS, Number
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
    type=click.Path(path_type=Path),
    required=True,
    help="Pipeline folder, or a checkpoint as `optimize` takes it.",
)
@click.option("--config", metavar="MODEL", help="With a checkpoint in one file: a folder or hub id of its family.")
@click.option(
    "--save-optimized",
    "--keep",
    type=click.Path(path_type=Path),
    help="Optimize a checkpoint into this folder [default: the cache, see `sd-ort cache`].",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Denoising steps [default: 50, FLUX.1 and SD 3 28, demo model 25, demo-dit 20].",
)
@click.option(
    "--guidance", type=GUIDANCE, help="Guidance scale; 1 or less is none [default: 7.5, SDXL 5, demo model 3]."
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the first image, counting up [default: a random one].")
@click.option("--num-images", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images generated at once.")
@click.option("--negative", help="What the image must not show.")
@click.option("--height", type=PIXELS, help="Pixels [default: the model's].")
@click.option("--width", type=PIXELS, help="Pixels [default: the model's].")
@click.option("--image", type=click.Path(path_type=Path, dir_okay=False), help="Start from this image.")
@click.option(
    "--mask", type=click.Path(path_type=Path, dir_okay=False), help="Inpaint: change only where this image is white."
)
@click.option(
    "--strength",
    type=Number(0, 1, min_open=True),
    help="Share of the steps that change --image [default: 0.8, 1 with --mask].",
)
@click.option("--control-image", type=click.Path(path_type=Path, dir_okay=False), help="Image for the ControlNet.")
@click.option("--ip-adapter-image", type=click.Path(path_type=Path, dir_okay=False), help="Image prompt.")
@click.option("--ip-adapter-scale", type=Number(), help="IP-Adapter scale; 0 disables the image prompt [default: 1].")
@click.option("--lora", "loras", multiple=True, metavar="FILE[:SCALE]", help="Add a LoRA; repeatable.")
@click.option(
    "--embedding", "embedding_files", multiple=True, metavar="FILE", help="Add a textual inversion; repeatable."
)
@click.option(
    "--prompt-weighting",
    "--weights",
    is_flag=True,
    help="Read (word:1.3), [word], BREAK and long prompts as the WebUIs do.",
)
@click.option("--clip-skip", type=click.IntRange(0), help="Skip this many last layers of the text encoder.")
@click.option(
    "--scheduler",
    help="A diffusers scheduler: euler, ddim, dpmsolver, unipc, ...; for a diffusion transformer the path of a "
    "scheduler_config.json [default: the model's].",
)
@click.option(
    "--cache",
    type=click.FloatRange(0, min_open=True),
    callback=integer_if_whole,
    metavar="N",
    help="Compute the whole UNet in every Nth step only, and its last layers in the others (DeepCache). For FLUX.1 and "
    "Qwen-Image a threshold such as 0.05: all blocks only if the first one changes by more (FirstBlockCache).",
)
@click.option(
    "--provider",
    default="auto",
    show_default=True,
    help=f"One of {', '.join(PROVIDERS)}, or plugin:LIBRARY [default: the best that runs here].",
)
@click.option("--gpus", type=REPLICAS, help="Generate on this many GPUs, one replica on each.")
@click.option("--replicas", type=REPLICAS, help="Generate with this many replicas on the CPU, or on one GPU.")
@click.option("--allow-fallback", is_flag=True, help="Warn instead of failing when the provider is not really used.")
@click.option(
    "--gpu-graph/--no-gpu-graph",
    "--graph/--no-graph",
    "graph",
    default=None,
    help="Capture the UNet as a CUDA or HIP graph [default: where it can be].",
)
@click.option(
    "--split-guidance", type=Devices(), metavar="A,B", help="Predict one half of guidance on each of two devices: 0,1."
)
@click.option(
    "--split-image",
    type=Devices(),
    metavar="A,B,...",
    help="Compute bands of rows of one large image on several devices: 0,1,2,3. It is close to that of one device.",
)
@click.option(
    "--unet-devices",
    "--unet-on",
    "unet_on",
    type=Devices(),
    metavar="A,B,...",
    help="Partition a large UNet over devices: 0,1.",
)
@click.option(
    "--decode-device",
    "--decode-on",
    "decode_on",
    type=click.IntRange(0),
    metavar="N",
    help="Decode on device N while the next batch is generated.",
)
@click.option(
    "--low-memory",
    is_flag=True,
    help="Keep one component in memory at a time; stream a transformer that does not fit on the GPU.",
)
@click.option("--vae-tiling", is_flag=True, help="Decode large images in overlapping tiles.")
@click.option("--vae-slicing", is_flag=True, help="Decode the images of a batch one by one.")
@click.option("--threads", type=THREADS, help="CPU threads [default: one a core].")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("."), help="A .png file, or a folder [default: .]."
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def command(
    prompt: str | None,
    prompts: Path | None,
    gpus: int | None,
    replicas: int | None,
    model: Path,
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
    embedding_files: tuple[str, ...],
    prompt_weighting: bool,
    clip_skip: int | None,
    cache: float | None,
    out: Path,
    overwrite: bool,
    config: str | None,
    save_optimized: Path | None,
    **load_options: Any,
) -> None:
    """Generate images of PROMPT and write them as PNG files.

    A checkpoint (a .safetensors file, a diffusers folder, a hub id, `demo`) is optimized for the provider first, in
    float16 or on a CPU in float32, and stays in a cache: the second call opens it.

    With --image, the pipeline starts from that image; with --mask too, it changes only where the mask is white.

    Image number i has seed + i, so each can be generated again alone. The files hold prompt, seed and settings as PNG
    text. With --prompts, --gpus or --replicas the first seed is 0, and existing files stay: the same command continues
    where it was interrupted.
    """
    options = click.get_current_context().params
    if prompts or gpus or replicas or prompt is None:
        from sd_ort.cli.prompt_list import generate_list

        return generate_list(options)
    from sd_ort.checkpoints.generation_defaults import generation_defaults
    from sd_ort.core.errors import InputError
    from sd_ort.pipelines.arguments import check_numbers, check_seeds, check_text
    from sd_ort.runtime.provider_choice import AUTO, likely_provider
    from sd_ort.runtime.warm_up import import_ahead, warm_up

    if likely := likely_provider(model) if load_options["provider"] == AUTO else load_options["provider"]:
        warm_up(likely)
    import_ahead("tqdm", "PIL.Image")
    check_text([prompt, negative or ""])
    check_files(loras, embedding_files)
    check_numbers(height, width, num_images, guidance=guidance, strength=strength)
    if image is None and (mask is not None or strength is not None):
        raise InputError("--mask and --strength change an image: pass it with --image.")
    image_files = {"image": image, "mask_image": mask, "control_image": control_image}
    image_files["ip_adapter_image"] = ip_adapter_image
    images = {}
    for name, path in image_files.items():
        if path is not None:
            from sd_ort.core.image_file import read_image

            images[name] = read_image(path)
    first = random.randrange(2**31) if seed is None else seed
    check_seeds(first, num_images)
    seeds = range(first, first + num_images)
    paths = output_paths(out, prompt, seeds, overwrite)
    folder, load_options["provider"] = resolve_pipeline_folder(
        model,
        load_options["provider"],
        config=config,
        save_to=save_optimized,
        allow_fallback=load_options["allow_fallback"],
        gpu_options=options_on_command_line({"split_guidance", "split_image", "unet_on", "decode_on"}),
    )
    defaults = generation_defaults(folder, inpaint=mask is not None)
    steps, guidance = steps or defaults.steps, defaults.guidance if guidance is None else guidance
    kind = "Inpaint" if mask else "Img2Img" if image else "ControlNet" if control_image else ""
    pipeline = open_pipeline(folder, kind, load_options)
    if negative and guidance <= (pipeline.family.unguided if hasattr(pipeline, "family") else 1):
        echo_progress(f"--negative has no effect: guidance {guidance:g} disables guidance.")
    if kind == "" and (height is None) != (width is None):  # which diffusers' arguments would ignore
        height, width = height or pipeline.default_size, width or pipeline.default_size
    load_adapters(loras, embedding_files, pipeline)
    if ip_adapter_scale is not None:
        pipeline.set_ip_adapter_scale(ip_adapter_scale)
    enable_cache(cache, pipeline)
    syntax = "weights" if prompt_weighting else None
    shared = {"strength": strength, "clip_skip": clip_skip, "prompt_syntax": syntax}
    settings = png_text(
        prompt=prompt, negative_prompt=negative or "", steps=steps, guidance=guidance, model=model, **image_files,
        scheduler=pipeline.scheduler_name, loras=", ".join(loras) or None,
        embeddings=", ".join(embedding_files) or None, ip_adapter_scale=ip_adapter_scale, cache=cache,
        split_image=",".join(map(str, load_options["split_image"] or ())) or None, **shared,
    )  # fmt: skip
    arguments = {
        "prompt": prompt, "height": height, "width": width, "num_inference_steps": steps, "guidance_scale": guidance,
        "negative_prompt": negative, **images, **{name: value for name, value in shared.items() if value is not None},
    }  # fmt: skip
    if getattr(pipeline, "CLASS", "") == "QwenImageTransformer2DModel":
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
    if negative and getattr(pipeline, "CLASS", "") == "FluxTransformer2DModel":
        if pipeline.transformer_config.get("guidance_embeds"):
            echo_progress("--negative has no effect: this model reads --guidance as an input, and no negative prompt.")
        else:
            arguments["true_cfg_scale"] = guidance
    batches = [seeds[start : start + batch] for start in range(0, num_images, batch)]
    calls = ({**arguments, "num_images_per_prompt": len(part), "generator": list(part)} for part in batches)
    by_seed = dict(zip(seeds, paths, strict=True))

    def save(images: Sequence[Any], part: range) -> None:
        for generated, seed_ in zip(images, part, strict=False):
            save_png(generated, by_seed[seed_], {**settings, "seed": str(seed_)}, overwrite=overwrite)
            click.echo(by_seed[seed_])

    with ThreadPoolExecutor(1, "save") as saver:  # PNG files of a batch are written while the next one is generated
        saving: Future[None] | None = None
        for part, output in zip(batches, pipeline.draw_each(calls), strict=True):
            if saving is not None:
                saving.result()
            saving = saver.submit(save, output.images, part)
        if saving is not None:
            saving.result()


def open_pipeline(folder: Path, kind: str, load_options: dict[str, Any]) -> Any:
    """Return the pipeline of a folder for text to image, "ControlNet", "Img2Img" or "Inpaint".

    Raises InputError for a merged folder that is to start from an image.
    """
    import sd_ort
    from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline, StableDiffusionPipeline
    from sd_ort.core.errors import InputError
    from sd_ort.core.pipeline_folder import MERGED, components, read_index

    if (name := str(read_index(folder).get("_class_name"))) in sd_ort.TRANSFORMER_PIPELINES:
        if kind == "ControlNet":
            raise InputError(f"{folder} holds a {name}, for which ControlNets are not supported.")
        return getattr(sd_ort, sd_ort.transformer_pipeline(name, kind)).from_pretrained(folder, **load_options)
    by_kind = {"Img2Img": StableDiffusionImg2ImgPipeline, "Inpaint": StableDiffusionInpaintPipeline}
    pipeline: type[StableDiffusionPipeline] = by_kind.get(kind, StableDiffusionPipeline)
    if MERGED in components(folder):
        from sd_ort.pipelines.merged import MergedPipeline

        if kind:
            raise InputError(f"{folder} is merged, for text to image only: use the folder it was made from.")
        pipeline = MergedPipeline
    return pipeline.from_pretrained(folder, **load_options)


def output_paths(out: Path, prompt: str, seeds: range, overwrite: bool) -> list[Path]:
    """Return a PNG path for each seed: `out` itself for one image and a file name, else names that end in the seed.

    Raises OutputError if one exists that must not be overwritten, or cannot be written.
    """
    from sd_ort.core.errors import OutputError
    from sd_ort.core.paths import check_writable, slugify

    if out.suffix.lower() == ".png":
        paths = [out] if len(seeds) == 1 else [out.with_stem(f"{out.stem}-{seed}") for seed in seeds]
    else:
        paths = [out / f"{slugify(prompt)}-{seed}.png" for seed in seeds]
    check_writable(paths[0])
    if not overwrite and (existing := next((path for path in paths if path.exists()), None)):
        raise OutputError(f"{existing} exists: choose another --out or pass --overwrite.")
    return paths


def png_text(**settings: object) -> dict[str, str]:
    """Return the settings that are not None, as the text of a PNG file."""
    return {name: str(value) for name, value in settings.items() if value is not None}


def save_png(image: Any, path: Path, settings: dict[str, str], *, overwrite: bool) -> None:
    """Write a PIL image with its settings as PNG text; the file appears complete or not at all."""
    from sd_ort.core.files import write_bytes
    from sd_ort.pipelines.png import png_bytes

    write_bytes(path, png_bytes(image, settings), overwrite=overwrite)
