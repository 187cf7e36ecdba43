"""An optimized pipeline from a checkpoint, with a LoRA: `python examples/checkpoint.py [MODEL] [OUT.png]`.

MODEL is `demo`, a diffusers folder, a .safetensors file or a hub id. For a ControlNet add `--controlnet FOLDER` to the
command, which needs the extra `export`, and call StableDiffusionControlNetPipeline with `image=`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import sd_ort
from sd_ort import StableDiffusionPipeline

model, out = [*sys.argv[1:], *("demo", "checkpoint.png")[len(sys.argv) - 1 :]]
lora = Path(sd_ort.__file__).parent / "demo/loras/gold.safetensors"

with tempfile.TemporaryDirectory() as work:
    folder = Path(work) / "fused"
    subprocess.run([sys.executable, "-m", "sd_ort", "optimize", model, folder, "--target", "cpu"], check=True)
    pipe = StableDiffusionPipeline.from_pretrained(folder, provider="cpu")
    pipe.load_lora_weights(lora, adapter_name="gold")
    pipe.set_adapters("gold", 0.8)
    pipe("a red circle on a blue background", num_inference_steps=8, generator=1).images[0].save(out)
print(out)
