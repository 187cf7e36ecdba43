"""One pipeline, four styles: the demo model without a LoRA, with two LoRAs, and with a mixture of them.

`python examples/loras.py [OUT.png]` writes the four images side by side.
"""

import sys
from pathlib import Path

from PIL import Image

import sd_ort
from sd_ort import StableDiffusionPipeline

loras = Path(sd_ort.__file__).parent / "demo/loras"
pipe = StableDiffusionPipeline.from_pretrained("demo")
prompt = "a green square left of a red circle"
images = [pipe(prompt, generator=1).images[0]]
for name in ("night", "gold"):
    pipe.load_lora_weights(loras / f"{name}.safetensors", adapter_name=name)
for strengths in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]):
    pipe.set_adapters(["night", "gold"], strengths)
    images.append(pipe(prompt, generator=1).images[0])
pipe.unload_lora_weights()
assert pipe(prompt, generator=1).images[0].tobytes() == images[0].tobytes()

row = Image.new("RGB", (sum(image.width for image in images), images[0].height))
for index, image in enumerate(images):
    row.paste(image, (index * image.width, 0))
out = sys.argv[1] if len(sys.argv) > 1 else "loras.png"
row.save(out)
print(out)
