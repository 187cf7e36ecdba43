"""UNet and VAE decoder as folders from before torch 2 hold them: attention without SDPA, through TorchScript.

    python scripts/export_old_style.py OUT

writes OUT/sd15-tiny-eager-17 and OUT/sd15-tiny-half-17 (all in float16, as the old conversion scripts' --fp16), from
which scripts/make_graph_fixtures.py makes the graphs in tests/graphs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from diffusers.models.attention_processor import AttnProcessor

from sd_ort import models
from sd_ort.export import NOISY, TRACE, example, export_torchscript
from sd_ort.modules import wrap
from sd_ort.sources import open_source, quiet

OPSET = 17


def export_old_style(folder: Path, component: str, half: bool) -> None:
    """One component of the preset sd15-tiny in `folder`, its attention written as baddbmm, softmax and bmm."""
    source = open_source(None, "sd15-tiny", True, 0)
    name = models.MODEL_OF.get(component, component)
    config, model = source.configs[name], source.load(name)
    model.set_attn_processor(AttnProcessor())  # type: ignore[operator]
    module = wrap(component, model, sdxl=False, controlnet=False)
    signature = models.signature(component, config)
    inputs = [example(tensor, TRACE, config, 0) for tensor in signature.inputs]
    if half:
        module = module.half()
        inputs = [x.half() if t.name != "timestep" else x for x, t in zip(inputs, signature.inputs, strict=True)]
    (folder / component).mkdir(parents=True)
    with torch.no_grad(), quiet(*NOISY):
        export_torchscript(module, inputs, signature, OPSET, folder / component)
    (folder / component / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(source.index))


if __name__ == "__main__":
    for component in ("unet", "vae_decoder"):
        for name, half in (("eager", False), ("half", True)):
            export_old_style(Path(sys.argv[1]) / f"sd15-tiny-{name}-{OPSET}", component, half)
