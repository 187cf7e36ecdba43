#!/usr/bin/env python3
"""Sizes of the weights of diffusion transformers in 16, 8 and 4 bits: writes results/transformer_weights.md.

    python scripts/bench/transformer_weights.py

The package's templates are optimized for our provider in bfloat16 with every storage of `optimize --weights`, and the
sizes of their initializers added up. No weight is read or computed: those that passes look at are a constant.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from fusion_passes import weight_recipes
from sd_ort.checkpoints.presets import open_preset
from sd_ort.export import DEFAULT_OPSET
from sd_ort.export.templates import Template, component_key, find_template
from sd_ort.optimize.optimizer import rewrite
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.unoptimized import UnoptimizedComponent
from sd_ort.optimize.weight_storage import STORED_COMPONENTS, WeightStorage
from sd_ort.runtime import machine

MODELS = ("flux-dev", "flux2-klein-4b", "flux2-dev", "sd35-medium", "z-image-turbo", "qwen-image", "krea2")
STORAGES = {"bfloat16": None, "int8": WeightStorage("int8"), "int4": WeightStorage("int4")}
HEAD = """# Weights of diffusion transformers in memory

Written by `scripts/bench/transformer_weights.py` at {commit}: templates of full size, target `gpu`, in GB of 10^9
bytes. `before`: what runs before the loop, once a prompt or schedule. `in the loop`: what a step reads. Beside them a
call takes its activations, in 8 and 4 bits the largest weight in 16, the VAE's 0.2 GB and the driver's 0.5. With
`--low-memory` the text encoders are gone before the transformer is opened.

model | weights | text encoders | before | in the loop | sum | largest at once with `--low-memory`
--- | --- | --- | --- | --- | --- | ---
"""


def sizes(name: str, path: Path, storage: WeightStorage | None) -> dict[str, int]:
    """Return the bytes of the weights of a component's parts."""
    template = Template(path)
    shapes = {
        source: weight_recipes.source_shape(template.recipes[tensor.name], tuple(tensor.dims))
        for tensor in template.proto.graph.initializer
        if tensor.name in template.recipes
        for source in weight_recipes.sources(template.recipes[tensor.name])
    }

    def read(source: str) -> np.ndarray:
        return np.broadcast_to(np.float32(0.01), shapes[source] or ())

    component = UnoptimizedComponent(name, lambda: template.graph(read), lambda: template.config, template.bytes)
    no_calibration: Any = lambda _: None  # noqa: E731
    hoisted = name == "transformer"
    parts, _ = rewrite(component, name, TARGETS["gpu"], "bfloat16", no_calibration, hoisted, weights=storage)
    return {
        part: sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        for part, model in parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=MODELS, help="[default: one of each family]")
    parser.add_argument("--out", type=Path, default=Path("results/transformer_weights.md"))
    options = parser.parse_args()
    text = HEAD.format(commit=machine.commit())
    for preset in options.presets:
        checkpoint = open_preset(preset, 0)
        names = sorted(STORED_COMPONENTS & checkpoint.configs.keys())
        paths = {name: find_template(component_key(checkpoint, name, DEFAULT_OPSET, "dynamo")) for name in names}
        for storage, weights in STORAGES.items():
            parts: dict[str, int] = {}
            for name, path in paths.items():
                assert path is not None, f"{preset} has no template of {name}"
                parts |= sizes(name, path, weights)
            step = parts.pop("transformer")
            encoders = sum(size for part, size in parts.items() if part.startswith("text_encoder"))
            before = sum(parts.values()) - encoders
            numbers = (encoders, before, step, encoders + before + step, max(encoders, before + step))
            cells = [f"{number / 1e9:.1f}" for number in numbers]
            text += " | ".join([preset, storage, *cells]) + "\n"
            print(text.splitlines()[-1], flush=True)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
