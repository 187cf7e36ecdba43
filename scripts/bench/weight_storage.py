"""Weights in fewer bits (`optimize --weights`): quality and time on the demo model, memory of its session, and sizes.

Generates the same unseen prompts from the same seeds with each storage, reads the images back (`sd_ort.demo.fidelity`)
and compares each with that of float32. Seconds are the processor's of one thread. `session`: resident memory that
opening and running the U-Net adds to a process of its own. Sizes of the U-Nets of SD 1.5 and SDXL are those of the
package's templates with each storage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.step_cache import decibels, generate
from scripts.report import head, save, table
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core import metrics
from sd_ort.demo.fidelity import score, unseen_prompts
from sd_ort.export import templates
from sd_ort.optimize.weight_storage import WeightStorage, store_weights
from sd_ort.stages import optimize

STORAGES = {
    "float32": None, "int8, groups of 64": WeightStorage("int8", 64), "int4, groups of 64": WeightStorage("int4", 64),
    "int4, groups of 32": WeightStorage("int4", 32), "int4, groups of 64, asymmetric": WeightStorage("int4", 64, False),
    "float8": WeightStorage("float8"),
}  # fmt: skip
SESSION = """
import json, sys, numpy, psutil
from pathlib import Path
from sd_ort.runtime.session import Model, SessionOptions, create_session
folder = Path(sys.argv[1])
create_session(folder / "text_encoder" / "model.onnx", "cpu", SessionOptions(threads=1))
before = psutil.Process().memory_info().rss
model = Model(create_session(folder / "unet" / "model.onnx", "cpu", SessionOptions(threads=1)))
random = numpy.random.default_rng(0)
for _ in range(2):
    texts = random.normal(size=(2, 24, 128))
    model(sample=random.normal(size=(2, 4, 16, 16)), timestep=[500], encoder_hidden_states=texts)
print(json.dumps(psutil.Process().memory_info().rss - before))
"""


def template_bytes(preset: str, storage: WeightStorage | None) -> int:
    """Return the size of the weights of a preset's U-Net, from the exported graph."""
    source = open_preset(preset, 0)
    path = templates.find_template(templates.component_key(source, "unet", 20, "dynamo"))
    assert path is not None
    model = templates.Template(path).graph(lambda name: np.empty(0, np.float32))
    if storage is not None:
        store_weights(model, storage)
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


def page(report: dict[str, Any]) -> str:
    """Return the page of a report."""
    lines = [
        "# Weights in fewer bits", "",
        f"The demo model, {report['settings']['prompts']} unseen prompts, target cpu, one thread of a shared machine: "
        "seconds are the processor's. The VAE stays in float32. PSNR is that to the images of float32.", "",
    ]  # fmt: skip
    rows = (
        (row["label"], row["right"], decibels(row["psnr_db"]), f"{row['seconds']:.3f}", f"{row['bytes'] / 1e6:.1f} MB",
         f"{row['session_bytes'] / 1e6:.0f} MB")
        for row in report["rows"]
    )  # fmt: skip
    lines += table(("weights", "right", "median PSNR", "processor s an image", "U-Net on disk", "session"), rows)
    sizes = ((preset, *(f"{size / 1e9:.2f} GB" for size in each)) for preset, each in report["sizes"].items())
    lines += ["", *table(("U-Net", *STORAGES), sizes)]
    lines += ["", "Bytes of the U-Net's weights; float16 would have half of float32's.", ""]
    lines += [f"`{report['command']}` at {report['commit']}, {report['machine']['cpu']}", ""]
    return "\n".join(lines)


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="unseen prompts (200)")
    parser.add_argument("--batch", type=int, default=10, help="prompts drawn at once (10)")
    parser.add_argument("--work", type=Path, default=Path("out/weight_storage"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/weight_storage.json"), help="the result, and a page")
    arguments = parser.parse_args()
    settings = {"prompts": arguments.prompts, "batch": arguments.batch}
    report = head("scripts/bench/weight_storage.py") | {"rows": [], "settings": settings}
    report["sizes"] = {preset: [template_bytes(preset, s) for s in STORAGES.values()] for preset in ("sd15", "sdxl")}
    prompts = unseen_prompts(arguments.prompts, 0)
    reference: np.ndarray | None = None
    for number, (label, storage) in enumerate(STORAGES.items()):
        folder = arguments.work / str(number)
        if not folder.is_dir():
            optimize("demo", folder, target="cpu", weights=storage)
        pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu", threads=1)
        images, seconds = generate(pipeline, prompts, arguments.batch)
        del pipeline
        psnr = None if reference is None else median(map(metrics.psnr, images, reference))
        reference = images if reference is None else reference
        command = [sys.executable, "-c", SESSION, str(folder)]
        report["rows"].append({
            "label": label, "right": score(prompts, images).correct, "psnr_db": psnr, "seconds": seconds,
            "bytes": (folder / "unet" / "model.onnx.data").stat().st_size,
            "session_bytes": json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout),
        })  # fmt: skip
        print(report["rows"][-1], flush=True)
        save(arguments.out, report, page(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
