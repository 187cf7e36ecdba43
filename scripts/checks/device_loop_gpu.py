#!/usr/bin/env python3
"""On a GPU: the loop on the device beside the loop on the host, of one folder and one provider.

    device_loop_gpu.py FOLDER --provider sdcuda [--steps 1 2 5 50] [--size 512]

Latents are compared, relative to their largest number, with the prompt's texts encoded on the device and with
embeddings given, uncaptured and captured: which of them differ says where a fault lies. Fails above --bound.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sd_ort import StableDiffusionPipeline  # noqa: E402

PROMPT = "a red circle left of a small blue square on a white background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="sdcuda")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 5, 50])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--bound", type=float, default=0.05)
    options = parser.parse_args()

    def pipeline(**more: Any) -> Any:
        return StableDiffusionPipeline.from_pretrained(options.folder, options.provider, **more)

    on_host = pipeline(graph=False, device_loop=False)
    on_device = {"uncaptured": pipeline(graph=False, device_loop=True), "captured": pipeline(device_loop=True)}
    positive, negative = on_host.encode_prompt(PROMPT)[:2]
    embeddings = {"prompt_embeds": positive, "negative_prompt_embeds": negative}
    texts = {"prompt": {"prompt": PROMPT}, "embeddings": embeddings}
    worst = 0.0
    for steps, (name, given) in itertools.product(options.steps, texts.items()):
        arguments = {**given, "num_inference_steps": steps, "height": options.size, "width": options.size}
        arguments |= {"generator": 0, "output_type": "latent", "progress": False}
        wanted = on_host(**arguments).images.numpy()
        for kind, drawn in on_device.items():
            difference = np.abs(drawn(**arguments).images.numpy() - wanted).max() / np.abs(wanted).max()
            worst = max(worst, float(difference))
            print(f"{steps:3} steps, {name:10} {kind:10} differs by {difference:.1e}", flush=True)
    sys.exit(f"the loops differ by {worst:.1e}, above {options.bound}" if worst > options.bound else 0)


if __name__ == "__main__":
    main()
