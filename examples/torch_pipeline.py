"""Replace the modules of a diffusers pipeline by fused ones, without an export: `python examples/torch_pipeline.py`.

It needs the extra `export`. On a GPU the kernels are ours; on a CPU this shows that images stay the same.
"""

import numpy as np
import torch

from sd_ort.benchmark.engines.pytorch import torch_pipeline
from sd_ort.torch import optimize, restore

pipe = torch_pipeline("demo")  # with a checkpoint: diffusers.DiffusionPipeline.from_pretrained(...)


def generate() -> np.ndarray:
    generator = torch.Generator().manual_seed(1)
    return pipe("a red circle", num_inference_steps=8, generator=generator, output_type="np").images[0]


before = generate()
optimize(pipe)
after = generate()
restore(pipe)
print(f"largest difference {np.abs(after - before).max():.1e} of 1")
assert np.abs(after - before).max() < 1e-3
