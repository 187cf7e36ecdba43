"""Generate an image from a prompt: `python examples/generate.py [MODEL] [OUT.png]`.

MODEL is `demo`, a diffusers folder, a .safetensors file, a hub id or an optimized folder.
A checkpoint is optimized once.
"""

import sys

from sd_ort import StableDiffusionPipeline

model, out = [*sys.argv[1:], *("demo", "image.png")[len(sys.argv) - 1 :]]
pipe = StableDiffusionPipeline.from_pretrained(model)
image = pipe("a red circle on a blue background", generator=1).images[0]
image.save(out)
print(out)
