"""`sd-ort generate` for a list of prompts, or on several replicas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_ort.cli.model_options import check_files, echo_progress, resolve_pipeline_folder, set_up_pipeline

LOAD_OPTIONS = ("scheduler", "allow_fallback", "graph", "low_memory", "vae_tiling", "vae_slicing")
ONE_PROMPT = ("image", "mask", "strength", "control_image", "ip_adapter_image", "ip_adapter_scale",
              "split_guidance", "split_image", "unet_on", "decode_on")  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InputError for options of `generate` that do not apply here."""
    from sd_ort.core.errors import InputError

    for name in ONE_PROMPT:
        if options[name] is not None:
            raise InputError(f"--{name.replace('_', '-')} is for one prompt, without --gpus and --replicas.")
    if (options["prompt"] is None) == (options["prompts"] is None):
        raise InputError("no prompt was given, or two ways: give PROMPT, or --prompts FILE with one a line.")


def generate_list(options: Mapping[str, Any]) -> None:
    """Generate the missing images of PROMPT, or of all prompts of --prompts, with the options of `generate`."""
    from tqdm import tqdm

    from sd_ort.core.files import write_bytes
    from sd_ort.core.paths import check_writable
    from sd_ort.serving import prompt_lists

    check_options(options)
    check_writable(options["out"] / "1.png")
    check_files(options["loras"], options["embedding_files"])
    folder, provider = resolve_pipeline_folder(
        options["model"],
        options["provider"],
        config=options["config"],
        save_to=options["save_optimized"],
        allow_fallback=options["allow_fallback"],
    )
    configs, tasks = plan_outputs(folder, provider, options)
    missing = tasks if options["overwrite"] else prompt_lists.missing_outputs(tasks, configs[0].png_text)
    if len(missing) < len(tasks):
        echo_progress(f"{len(tasks) - len(missing)} of {len(tasks)} images are there already.")
    if not missing:
        return
    with tqdm(total=len(missing), unit="image", delay=1e-9) as bar:

        def save(task: prompt_lists.OutputTask, file: bytes) -> None:
            write_bytes(task.path, file, overwrite=options["overwrite"])
            bar.write(str(task.path))
            bar.update()

        if options["gpus"] or options["replicas"]:
            prompt_lists.generate_on_replicas(configs, missing, options["batch"], save)
        else:
            prompt_lists.generate_locally(configs[0], missing, options["batch"], save)


def plan_outputs(folder: Path, provider: str, options: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the config of each replica, and all tasks. Raises InputError for invalid options; nothing is loaded."""
    from sd_ort.checkpoints.generation_defaults import generation_defaults
    from sd_ort.pipelines.arguments import check_numbers, check_text
    from sd_ort.serving.image_jobs import BatchSettings
    from sd_ort.serving.prompt_lists import output_tasks, read_prompts
    from sd_ort.serving.replica import ReplicaConfig, replica_configs

    texts = [options["prompt"]] if options["prompts"] is None else read_prompts(options["prompts"])
    negative = options["negative"] or ""
    check_text([*texts, negative])
    check_numbers(options["height"], options["width"], options["num_images"], guidance=options["guidance"])
    syntax = "weights" if options["prompt_weighting"] else None
    shared = {"clip_skip": options["clip_skip"], "prompt_syntax": syntax}
    loras, embedding_files = options["loras"], options["embedding_files"]
    text = {"model": str(options["model"]), "scheduler": options["scheduler"], "loras": ", ".join(loras) or None,
            "embeddings": ", ".join(embedding_files) or None, "cache": options["cache"], **shared}  # fmt: skip
    config = ReplicaConfig(
        folder,
        load_options={"provider": provider, **{name: options[name] for name in LOAD_OPTIONS}},
        setup=functools.partial(set_up_pipeline, loras, embedding_files, options["cache"]),
        call_options={name: value for name, value in shared.items() if value is not None},
        png_text={name: str(value) for name, value in text.items() if value is not None},
    )
    configs = replica_configs(config, options["gpus"], options["replicas"], options["threads"])
    defaults = generation_defaults(folder)
    guidance = defaults.guidance if options["guidance"] is None else options["guidance"]
    settings = BatchSettings(options["width"], options["height"], options["steps"] or defaults.steps, guidance)
    first = options["seed"] or 0  # not random: the same command continues
    return configs, output_tasks(texts, negative, settings, first, options["num_images"], options["out"])
