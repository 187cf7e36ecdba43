"""An optimized pipeline from a checkpoint, with a LoRA and a ControlNet.

    python examples/checkpoint.py [MODEL] [OUT.png] [CONTROLNET]

MODEL is `demo`, a diffusers folder, a .safetensors file or a hub id. CONTROLNET is a folder of diffusers weights, and
needs the extra `export`; without it the image comes from the text alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import sd_ort
from sd_ort import StableDiffusionControlNetPipeline, StableDiffusionPipeline

model, out, controlnet = [*sys.argv[1:], *("demo", "checkpoint.png", "")[len(sys.argv) - 1 :]]
lora = Path(sd_ort.__file__).parent / "demo/loras/gold.safetensors"
prompt = "a red circle on a blue background"


def optimize(folder: Path, *options: str) -> None:
    """Write the optimized pipeline."""
    command = [sys.executable, "-m", "sd_ort", "optimize", model, folder, "--target", "cpu", *options]
    subprocess.run(command, check=True)


with tempfile.TemporaryDirectory() as work:
    optimize(Path(work) / "fused")
    pipe = StableDiffusionPipeline.from_pretrained(Path(work) / "fused", provider="cpu")
    pipe.load_lora_weights(lora, adapter_name="gold")
    pipe.set_adapters("gold", 0.8)
    image = pipe(prompt, num_inference_steps=8, generator=1).images[0]
    if controlnet:
        optimize(Path(work) / "controlled", "--controlnet", controlnet)
        controlled = StableDiffusionControlNetPipeline.from_pretrained(Path(work) / "controlled", provider="cpu")
        controlled.load_lora_weights(lora, adapter_name="gold")
        # A real program gives the ControlNet edges, depth or a pose; here it is the first image.
        image = controlled(prompt, image=image, num_inference_steps=8, generator=1).images[0]
    image.save(out)
print(out)
