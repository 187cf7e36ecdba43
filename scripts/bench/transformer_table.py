#!/usr/bin/env python3
"""Write results/transformers.md from results of scripts/bench/bench_transformer_step.py.

    python scripts/bench/bench_transformer_image.py flux-dev --steps 28
    python scripts/bench/bench_transformer_image.py flux2-klein-4b --steps 4
    python scripts/bench/bench_transformer_image.py z-image-turbo --steps 8
    python scripts/bench/transformer_table.py results/transformers --out results/transformers.md

Memory and fused nodes are those of `transformer_weights.md` and `fusion_transformers.md` beside that page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.checkpoints.presets import PRESETS

# Preset -> what never ran of it, beside its step and its image where there are no files of them.
FAMILIES = {
    "flux-dev": "",
    "flux2-klein-4b": "",
    "flux2-dev": "",
    "sd35-medium": "",
    "z-image-turbo": "",
    "qwen-image": "edits of full size",
    "krea2": "",
}
GOALS = {  # of torch.compile
    "flux-dev": 0.88, "flux2-klein-4b": 0.85, "sd35-medium": 0.80, "qwen-image": 0.88, "krea2": 0.88,
}  # fmt: skip
FLOAT8_GOAL = 0.62  # of torch.compile in bfloat16
IMAGE_GOALS = {"flux-dev": 0.85, "flux2-klein-4b": 0.85, "z-image-turbo": 0.82}
FAMILY_HEAD = """
## Families

Step and image: 1024 x 1024, bfloat16, random weights, beside torch.compile of the repeated blocks, or of all of SD 3.5.
Memory: weights in GB of 10^9 bytes, text encoders + transformer ([weights](transformer_weights.md)). Fused: of the tiny
preset, opset 23, target `gpu` ([fusions](fusion_transformers.md)); cuda and hip have as many of each, cpu as many
attentions, rotary embeddings and norms. Conversion: `sd-ort optimize --bfloat16` of a checkpoint of zeros with its text
encoder and VAE, FLUX.1's transformer alone; read, written and peak resident memory on two cores
(`scripts/bench/stream_checkpoint.py`). No family ran with its trained weights or on an AMD GPU; `demo-dit`, a trained
FLUX.1 of 7.6 million weights, ran on CPUs. `never ran` adds what else did not.
"""
VIDEO = """
## AnimateDiff and video transformers

They are refused by name, as folders ([test](../tests/export/test_diffusion_transformers.py)) and as single files
([test](../tests/checkpoints/test_published_transformers.py)). AnimateDiff would need `UNetMotionModel` as a family: F
frames of each image in the batch, attention over F for each pixel between two transposes, motion adapters as a second
checkpoint with LoRAs of their own, and FreeNoise's windows over F. Its VAE decodes frame by frame, as now. Video
transformers (Wan, HunyuanVideo, LTX, Mochi, CogVideoX) would need an axis of time in latents, positions and pipelines;
VAEs of causal 3-D convolutions, of which we have no kernel (Qwen-Image's runs in 2-D, since an image is one frame);
attention over tens of thousands of tokens; Wan's two experts, changed between steps; UMT5, LLaMA and GLM text encoders;
and a writer of video files.
"""
IMAGES = """
## Whole images as called, 1024 x 1024

From the prompt to a PIL image, text encoder and VAE included, bfloat16, random weights, medians of three rounds in
turn (`scripts/bench/bench_transformer_image.py`). PSNR to torch's image in bfloat16: rounding errors of random weights
grow from step to step, most in 28 steps of FLUX.1. In float32 tiny models agree to 60 dB and more (`parity.md`).
"""
CACHES = """
## Caches between steps, 1024 x 1024

Seconds of whole images, bfloat16, random weights, beside diffusers with the same cache. Files are in
`results/transformers/caches/`. What random weights change from step to step says nothing of a trained model, so the
settings decide how many steps are full: one threshold of FirstBlockCache skips none, another all it may. diffusers runs
with compiled blocks.

"""
HEAD = """# Steps of diffusion transformers of full size on a GPU

A goal is the largest allowed ratio of our time to that of torch.compile, both measured in one process. In bfloat16
Qwen-Image's step meets its goal, and the steps of FLUX.1, FLUX.2 klein, SD 3.5 and Krea 2 miss theirs. With linears in
float8 the steps of Qwen-Image, Z-Image and Krea 2 meet theirs. Of the whole images FLUX.2 klein's meets its goal, those
of FLUX.1 and Z-Image-Turbo miss theirs.

The models have full width and depth, and random weights. Steps with linears in float8 (e4m3), the rest in float16,
stand beside torch's in bfloat16. All else is bfloat16 on both sides. Peers use cuDNN's attention. Our transformer is
hoisted, tuned and captured: modulation, rotary tables and text projections are computed before the loop; torch computes
them in each step.

At the card's power limit a step takes as long as its energy divided by the limit. The floor is the time of products
and attentions alone at that limit, each by the fastest of torch's and cuBLASLt's algorithms or by cuDNN
(`scripts/bench/transformer_floor.py`, files in `{folder}/floor/`). All floors are of one H200, steps of
the cards in their sections. The goals of SD 3.5, klein and Krea 2 lie below their floors: an engine without any other
kernel would miss them. So does the goal of Z-Image's whole image, 0.82. FLUX.1's goal lies 1.4 ms above its floor,
our step 5.0.

{floors}
"""
COLUMNS = """
## Columns of the sections below

Each section is one run of `scripts/bench/bench_transformer_step.py`.

- `queued`: ms per step of steps queued behind one another, the median of seven rounds in which ours and the peer take
  turns
- `ours`: the same of our provider in those rounds
- `ratio`: the median of the rounds' ratios of ours to the peer; below 1 ours is faster
- `ready s`: seconds to the first step
- `other size s`: seconds of the first step of another size
- `error`: relative L2 norm of the difference to torch eager in bfloat16

The tables of kernels are of two steps after a pause, at the full clock. A step behind others takes 4 to 12 % longer
than its kernels: they draw more than the card's power limit, ours with fewer pauses between them more than torch's.
Products and attentions, by the vendor's libraries on both sides (cuBLASLt, cuDNN), are 87 to 95 % of our kernels' time.
"""
TAIL = """
## Again

    sd-ort build-ops --cuda sm_90
    python scripts/bench/bench_transformer_step.py flux-dev --profile 30
    python scripts/bench/bench_transformer_step.py flux2-klein-4b --profile 30
    python scripts/bench/bench_transformer_step.py sd35-medium --rows 2 --profile 30
    python scripts/bench/bench_transformer_image.py flux-dev --steps 28
    python scripts/bench/bench_transformer_image.py flux2-klein-4b --steps 4
    python scripts/bench/bench_transformer_image.py z-image-turbo --steps 8
    python scripts/bench/bench_transformer_step.py qwen-image --profile 30
    python scripts/bench/bench_transformer_step.py z-image-turbo --peers compile --profile 30
    python scripts/bench/bench_transformer_step.py krea2 --peers compile
    python scripts/bench/bench_transformer_step.py qwen-image --float8 --peers compile --profile 30
    python scripts/bench/bench_transformer_step.py z-image-turbo --float8 --peers compile --profile 30
    python scripts/bench/bench_transformer_step.py krea2 --float8 --peers compile
    python scripts/bench/first_block_cache.py flux-dev --rounds 1 --thresholds 1e-9 0.1 0.999 --skips 1 3 --lite 2
    python scripts/bench/first_block_cache.py qwen-image --steps 20 --rounds 1 --thresholds 1e-9 0.999 --skips 1 \\
        --lite 2
    python scripts/bench/transformer_weights.py
    python scripts/bench/fusion_transformers.py
    python scripts/bench/transformer_floor.py flux-dev flux2-klein-4b sd35-medium:2 qwen-image krea2 z-image-turbo
    python scripts/bench/transformer_table.py results/transformers --out results/transformers.md
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    runs = [run for run in runs if "preset" in run]  # not the list of files of `sd-ort report`
    caches = [json.loads(path.read_text()) for path in sorted((options.folder / "caches").glob("*.json"))]
    steps, images = ([run for run in runs if ("optimize_s" in run) is of_images] for of_images in (False, True))
    text = (
        HEAD.format(folder=options.folder, floors=floor_table(steps, options.folder / "floor"))
        + family_section(steps, images + [without_cache(run) for run in caches], options.folder.parent)
        + COLUMNS
        + "".join(map(section, steps))
        + image_section(images)
        + CACHES
        + cache_table(caches)
        + VIDEO
        + TAIL
    )
    options.out.write_text(text)


def family_section(steps: list[dict[str, Any]], images: list[dict[str, Any]], results: Path) -> str:
    """Return a table for each of FAMILIES. `results`: the folder of the other pages."""
    text = FAMILY_HEAD
    weights = table_rows(results / "transformer_weights.md")
    fused = table_rows(results / "fusion_transformers.md")
    columns = next(row for row in fused if row[0] == "model")
    for preset, never in FAMILIES.items():
        rows = [("parameters", parameters(preset))]
        memory = [f"{row[1]} {row[2]} + {float(row[3]) + float(row[4]):.1f}" for row in weights if row[0] == preset]
        rows.append(("memory", "; ".join(memory) or "not computed"))
        step, float8 = (
            compiled(runs, preset, "{ours_ms:.1f} ms, torch.compile {device_ms:.1f}: {ours_ratio:.3f}")
            for runs in by_layers(steps)
        )
        image = compiled(images, preset, "{ours_s:.2f} s, torch.compile {theirs_s:.2f}: {ratio:.3f} ({steps} steps)")
        rows += [("step", step or "never"), ("step, linears in float8", float8 or "never"), ("image", image or "never")]
        tiny = {row[2]: row for row in fused if row[:2] == [f"{preset}-tiny", "23"]}
        if tiny:
            ours, raw = tiny["sd-ort, gpu"], tiny["export"]
            counts = [f"{name} {count}" for name, count in zip(columns[3:-1], ours[3:-1], strict=True)]
            rows.append(("fused", f"{', '.join(counts)}; {raw[-1]} nodes became {ours[-1]}"))
        streamed = results / f"stream_{preset.replace('-', '_')}.json"
        if streamed.is_file():
            rows.append(("conversion", f"{conversion(json.loads(streamed.read_text()))} ([file]({streamed.name}))"))
        missing = [what for what, value in (("a step", step), ("an image", image)) if not value]
        missing = [f"{' and '.join(missing)} of full size"] if missing else []
        rows.append(("never ran", "; ".join([*missing, *([never] if never else [])]) or "nothing else"))
        text += f"\n### {preset}\n\n" + "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]) + "\n"
    return text


def without_cache(run: dict[str, Any]) -> dict[str, Any]:
    """Return the image without a cache of a run of `first_block_cache.py`, as a run of whole images."""
    ours, theirs = (run[side]["rows"][0]["seconds"] for side in ("ours", "diffusers"))
    return {**run, "engines": [{"engine": run["peer"], "ours_s": ours, "theirs_s": theirs, "ratio": ours / theirs}]}


def cache_table(runs: list[dict[str, Any]]) -> str:
    """Return a table of the runs of `first_block_cache.py`."""
    lines = ["| model | cache | full steps | ours, s | diffusers, s | ratio |", "|---|---|---:|---:|---:|---:|"]
    for run in runs:
        for ours, theirs in zip(run["ours"]["rows"], run["diffusers"]["rows"], strict=True):
            settings = [f"{n} {v:g}" for n, v in ours.items() if n not in ("cache", "full_steps", "seconds")]
            cache = " ".join([(ours["cache"] or "none").removesuffix("Config"), *settings])
            steps = f"{ours['full_steps']} of {run['steps']}"
            seconds = [each["seconds"] for each in (ours, theirs)]
            cells = (run["preset"], cache, steps, *(f"{s:.2f}" for s in seconds), f"{seconds[0] / seconds[1]:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def conversion(run: dict[str, Any]) -> str:
    """Return memory and time of a run of stream_checkpoint.py."""
    sizes = run["checkpoint_bytes"]  # of each model, or of the one that was converted
    read = sum(sizes.values()) if isinstance(sizes, dict) else sizes
    memory, seconds = run["peak_resident_bytes"] / 1e9, run["cpu_seconds"]
    return f"{read / 1e9:.1f} GB to {run['written_bytes'] / 1e9:.1f}; peak {memory:.1f} GB, {seconds:.0f} s of CPU"


def by_layers(steps: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs in bfloat16, and those with linears in float8."""
    return [run for run in steps if not in_float8(run)], [run for run in steps if in_float8(run)]


def in_float8(run: dict[str, Any]) -> bool:
    return run.get("layers") == "float8"  # files of before --float8 do not say


def step_goal(run: dict[str, Any]) -> str:
    """Return the goal of a run, of torch.compile; "" without one."""
    goal = FLOAT8_GOAL if in_float8(run) else GOALS.get(run["preset"])
    return str(goal or "")


def compiled(runs: list[dict[str, Any]], preset: str, form: str) -> str:
    """Return the row beside torch.compile of a preset's run, in the format `form`; "" without one."""
    rows = [{**run, **row} for run in runs if run["preset"] == preset for row in run["engines"]]
    row = next((row for row in rows if "compile" in row["engine"]), None)
    return "" if row is None else form.format(**row)


def parameters(preset: str) -> str:
    """Return the billions of parameters of a preset's transformer and text encoders."""
    import torch

    counts = {}
    for name, config in PRESETS[preset].models.items():
        if name == "transformer" or name.startswith("text_encoder"):
            with torch.device("meta"):
                counts[name] = sum(p.numel() for p in build_model(class_name(config), config).parameters()) / 1e9
    encoders = " + ".join(f"{count:.2f}" for name, count in counts.items() if name != "transformer")
    return f"{counts['transformer']:.2f} billion; text encoders {encoders}"


def table_rows(path: Path) -> list[list[str]]:
    """Return the cells of the tables of a page."""
    lines = [line.strip().strip("|") for line in path.read_text().splitlines() if " | " in line]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def floor_table(runs: list[dict[str, Any]], folder: Path) -> str:
    """Return the table of steps and floors. `folder`: files of transformer_floor.py."""
    lines = ["model | floor ms | ours ms | floor / torch.compile | ours / torch.compile | goal", "--- | " * 5 + "---"]
    for run in runs:
        path = folder / f"{run['preset']}_{run['pixels']}.json"
        row = next((row for row in run["engines"] if "compile" in row["engine"]), None)
        if row is None or not (in_float8(run) or path.is_file()):
            continue
        name, floors = f"{run['preset']}, float8", ["", ""]  # the floors are those of bfloat16
        if not in_float8(run):
            floor = json.loads(path.read_text())["floor_ms"]
            name, floors = run["preset"], [f"{floor:.1f}", f"{floor / row['device_ms']:.3f}"]
        times = [floors[0], f"{row['ours_ms']:.1f}", floors[1], f"{row['ours_ratio']:.3f}"]
        lines.append(" | ".join([name, *times, step_goal(run)]))
    return "\n".join(lines)


def section(run: dict[str, Any]) -> str:
    """The part of the page about one run."""
    machine, versions = run["machine"], run["versions"]
    name = ", ".join(machine.get("gpus") or [machine["cpu"]])
    lines = [
        f"\n## {run['preset']}, {run['pixels']} x {run['pixels']}, {run['rows']} row{'s' * (run['rows'] > 1)}"
        f"{', linears in float8' * in_float8(run)}\n",
        f"{name}; {', '.join(f'{key} {value}' for key, value in versions.items())}; commit {run['commit'][:8]}.\n",
        "engine | queued | ours | ratio | goal | ready s | other size s | error",
        "--- | --- | --- | --- | --- | --- | --- | ---",
    ]
    for row in run["engines"]:
        error = None if in_float8(run) else run["errors"].get(row["engine"])  # its ranges are not measured
        goal = step_goal(run) if "compile" in row["engine"] else ""
        ours = [f"{row['ours_ms']:.1f}", f"{row['ours_ratio']:.3f}"] if "ours_ms" in row else ["", ""]
        shown = f"{error:.1e}" if error else ""
        first = f"{row['other_size_s']:.2f}" if "other_size_s" in row else ""
        cells = [row["engine"], f"{row['device_ms']:.1f}", *ours, goal, str(row["ready_s"]), first, shown]
        lines.append(" | ".join(cells))
    return "\n".join([*lines, *roofline(run), ""])


def image_section(runs: list[dict[str, Any]]) -> str:
    """The section of the page about images."""
    lines = [IMAGES, "model | steps | engine | its s | ours s | ratio | goal | PSNR", "--- | " * 7 + "---"]
    for run in runs:
        for row in run["engines"]:
            goal = str(IMAGE_GOALS.get(run["preset"], "")) if "compile" in row["engine"] else ""
            cells = [
                f"{row['theirs_s']:.3f}",
                f"{row['ours_s']:.3f}",
                f"{row['ratio']:.3f}",
                goal,
                f"{row['psnr_db']:.1f} dB",
            ]
            lines.append(" | ".join([run["preset"], str(run["steps"]), row["engine"], *cells]))
    lines.append("")
    for run in runs:
        name = ", ".join(run["machine"].get("gpus") or [run["machine"]["cpu"]])
        first = f"folder made in {run['optimize_s']:.0f} s, first image with tuning {run['first_image_s']:.0f} s"
        lines.append(f"{run['preset']}: {name}, commit {run['commit'][:8]}; {first}.")
    return "\n".join([*lines, ""])


def roofline(run: dict[str, Any]) -> list[str]:
    """Lines with the milliseconds by kernel class, and the floor of the arithmetic."""
    profiles = {row["engine"]: row["profile"]["classes_ms"] for row in run["engines"] if "profile" in row}
    if not profiles:
        return []
    classes = sorted({each for classes in profiles.values() for each in classes})
    lines = [
        "\nms of kernels by class:\n", " | ".join(["class", *profiles]), " | ".join(["---"] * (len(profiles) + 1)),
    ]  # fmt: skip
    for each in classes:
        lines.append(" | ".join([each, *(f"{times.get(each, 0):.2f}" for times in profiles.values())]))
    lines.append(" | ".join(["sum", *(f"{sum(times.values()):.2f}" for times in profiles.values())]))
    rate, total = run["limits"].get("matrix_tflops"), sum(run["tflop"].values())
    if rate:
        attention = sum(value for name, value in run["tflop"].items() if "attention" in name)
        lines.append(
            f"\nArithmetic: {total:.1f} TFLOP, of it attention {attention:.1f}; at the {rate:.0f} TFLOP/s of an 8192 x "
            f"8192 x 8192 product on this card {1e3 * total / rate:.1f} ms."
        )
    return lines


if __name__ == "__main__":
    main()
