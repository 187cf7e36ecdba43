"""`sd-ort generate` with a list of prompts, or on several replicas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

LOADING = ("scheduler", "provider", "allow_fallback", "graph", "low_memory", "vae_tiling", "vae_slicing")
ONE_PROMPT = ("image", "mask", "strength", "control_image", "ip_adapter_image", "ip_adapter_scale",
              "split_guidance", "unet_on", "decode_on")  # fmt: skip


def prepare(loras: tuple[str, ...], words: tuple[str, ...], pipeline: Any) -> None:
    """Put LoRAs and textual inversions on a replica's pipeline."""
    from sd_ort.cli.generate import add_loras, add_words

    add_loras(pipeline, loras)
    add_words(pipeline, words)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InputError for options of `generate` that do not go together here."""
    from sd_ort.core.errors import InputError

    for name in ONE_PROMPT:
        if options[name] is not None:
            raise InputError(f"--{name.replace('_', '-')} is for one prompt, without --gpus and --replicas.")
    if (options["prompt"] is None) == (options["prompts"] is None):
        raise InputError("no prompt was given, or two ways: give PROMPT, or --prompts FILE with one a line.")


def draw_list(options: Mapping[str, Any]) -> None:
    """Draw with the options of `generate`: what is not there yet of PROMPT, or of all prompts of --prompts."""
    from tqdm.auto import tqdm

    from sd_ort.cli.generate import check_files, whole_folder
    from sd_ort.core.files import write_bytes
    from sd_ort.core.paths import check_writable
    from sd_ort.serving import prompt_lists

    check_options(options)
    check_writable(options["out"] / "1.png")
    check_files(options["loras"], options["words"])
    folder, provider = whole_folder(options["folder"], dict(options))
    options = {**options, "folder": folder, "provider": provider}
    configs, asked = what_is_asked(options)
    missing = asked if options["overwrite"] else prompt_lists.missing_outputs(asked, configs[0].png_text)
    if len(missing) < len(asked):
        click.echo(f"{len(asked) - len(missing)} of {len(asked)} images are there already.", err=True)
    if not missing:
        return
    with tqdm(total=len(missing), unit="image", delay=1e-9) as bar:

        def done(task: prompt_lists.OutputTask, file: bytes) -> None:
            write_bytes(task.path, file, overwrite=options["overwrite"])
            bar.write(str(task.path))
            bar.update()

        if options["gpus"] or options["replicas"]:
            prompt_lists.generate_on_replicas(configs, missing, options["batch"], done)
        else:
            prompt_lists.generate_locally(configs[0], missing, options["batch"], done)


def what_is_asked(options: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What each replica opens, and all tasks. Raises InputError for what cannot be drawn; nothing is loaded."""
    from sd_ort.checkpoints.generation_defaults import generation_defaults
    from sd_ort.pipelines.arguments import check_numbers, check_text
    from sd_ort.serving.image_jobs import BatchSettings
    from sd_ort.serving.prompt_lists import output_tasks, read_prompts
    from sd_ort.serving.replica import ReplicaConfig, replica_configs

    texts = [options["prompt"]] if options["prompts"] is None else read_prompts(options["prompts"])
    negative, folder = options["negative"] or "", Path(options["folder"])
    check_text([*texts, negative])
    check_numbers(options["height"], options["width"], options["num_images"], guidance=options["guidance"])
    changing = {"clip_skip": options["clip_skip"], "prompt_syntax": "weights" if options["weights"] else None}
    kept = {"model": str(folder), "scheduler": options["scheduler"], "loras": ", ".join(options["loras"]) or None,
            "embeddings": ", ".join(options["words"]) or None, **changing}  # fmt: skip
    config = ReplicaConfig(
        folder,
        load_options={name: options[name] for name in LOADING},
        setup=functools.partial(prepare, options["loras"], options["words"]),
        call_options={name: value for name, value in changing.items() if value is not None},
        png_text={name: str(value) for name, value in kept.items() if value is not None},
    )
    configs = replica_configs(config, options["gpus"], options["replicas"], options["threads"])
    defaults = generation_defaults(folder)
    guidance = defaults.guidance if options["guidance"] is None else options["guidance"]
    settings = BatchSettings(options["width"], options["height"], options["steps"] or defaults.steps, guidance)
    first = options["seed"] or 0  # not a random one: the same command draws what is left
    return configs, output_tasks(texts, negative, settings, first, options["num_images"], options["out"])
