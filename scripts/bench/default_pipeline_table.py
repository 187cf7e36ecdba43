#!/usr/bin/env python3
"""Write table.md beside the JSON files of default_pipeline.py.

    default_pipeline_table.py [--folder results/default_pipeline]

Reads sd15.json, sdxl.json and fidelity.json, those that exist.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sd_ort.core.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[2]

NAMES = {"sd15": "SD 1.5, 512², 50 steps", "sdxl": "SDXL, 1024², 30 steps"}
ENGINES = {
    "diffusers eager, channels last": "diffusers, eager, channels last",
    "diffusers torch.compile": "diffusers, U-Net and VAE decode by torch.compile",
    "graph=False, device_loop=False": "ours with latents and scheduler on the host (`graph=False, device_loop=False`)",
    "graph=False, waited for": "+ the loop on the device, one stream, every call waited for (`graph=False`)",
    "graph=False": "+ queued, nothing waited for but the picture",
    "waited for": "captured U-Net and glue, every call waited for",
    "the plain call": "**captured and queued: the plain call**",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "default_pipeline")
    folder: Path = parser.parse_args().folder
    images = {preset: read_json(path) for preset in NAMES if (path := folder / f"{preset}.json").is_file()}
    lines = ["# Whole images by the pipeline with default options", ""]
    for preset, found in images.items():
        gpus = ", ".join(found["machine"]["gpus"])
        lines.append(f"`{preset}.json`: {gpus}, commit {found['commit']}, {found.get('when', 'no time noted')}.  ")
    lines += ["float16, random weights, one process, in turn; medians.", "", *whole_images(images)]
    if (path := folder / "fidelity.json").is_file():
        lines += ["", fidelity(read_json(path))]
    write_text(folder / "table.md", "\n".join(lines) + "\n")


def whole_images(images: dict[str, Any]) -> list[str]:
    """A row an engine; the last one is what the U-Net's calls alone take."""
    names = [f"{NAMES[preset]} | of torch.compile" for preset in images]
    lines = [f"| change | {' | '.join(names)} |", "|---" * (1 + 2 * len(names)) + "|"]
    for engine, words in ENGINES.items():
        cells = []
        for found in images.values():
            seconds = {name: row["median_s"] for name, row in found["engines"].items()}
            peer = seconds.get("diffusers torch.compile")
            share = f"{seconds[engine] / peer:.2f}" if engine in seconds and peer else ""
            cells += [f"{seconds[engine]:.3f} s" if engine in seconds else "", share]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    alone = [found["parts"]["unet_calls_alone_ms"] / 1e3 for found in images.values()]
    lines.append(f"| its U-Net calls, alone and queued | {' | '.join(f'{each:.3f} s |' for each in alone)} |")
    lines.append("")
    for preset, found in images.items():
        parts = found["parts"]
        steps = ", ".join(f"{task} {ms:.2f} ms" for task, ms in parts["step_ms"].items())
        firsts = ", ".join(f"{first['image_s']:.1f} s" for first in found["first_images"])
        lines.append(f"{NAMES[preset]}: a step of {steps}. First image in a new process: {firsts}.")
        if "unet_calls" in parts:
            calls = f"{parts['unet_calls']} U-Net calls queued alone"
            lines.append(f"Of {parts['image_ms']:.1f} ms, {parts['not_in_unet_ms']:.1f} ms are not in {calls}.")
        if "held_MB" in parts:
            lines.append(
                f"Buffers of one kind of drawing: {parts['held_MB']:.1f} MB; at most {parts['kept']} are kept."
            )
    return lines


def fidelity(found: dict[str, Any]) -> str:
    """How many of the demo model's unseen prompts each side draws right, and how far apart their pictures are."""
    right = ", ".join(f"{name} {count}" for name, count in found["right"].items())
    psnr = found["psnr_db"]
    return (
        f"Fidelity (`fidelity.json`, commit {found['commit']}, {found['when']}), the demo model, float16, by the plain "
        f"call: of {found['prompts']} unseen prompts drawn right: {right}; PSNR to torch in float32: median "
        f"{psnr['median']:.1f} dB, lowest {psnr['min']:.1f}."
    )


if __name__ == "__main__":
    main()
