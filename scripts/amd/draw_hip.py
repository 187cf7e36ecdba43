"""Programs that run_hip.py starts: `python draw_hip.py PROGRAM MODEL FOLDER PROVIDER` draws images into FOLDER."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image

from sd_ort import StableDiffusionPipeline

PROMPT = "a red circle on a blue background"
LORA = Path(__file__).resolve().parents[2] / "sd_ort/demo/loras/gold.safetensors"
STEPS = 2
GUIDANCE = 3.0


class Artist:
    """A pipeline whose images are written to a folder."""

    def __init__(self, model: Path, folder: Path, provider: str) -> None:
        self.pipeline = StableDiffusionPipeline.from_pretrained(model, provider=provider)
        self.folder = folder

    def draw(self, name: str, height: int = 64, width: int = 64, seeds: tuple[int, ...] = (0,)) -> None:
        """Write NAME-SEED.png for each seed, generated as one batch."""
        request: dict[str, Any] = {
            "height": height,
            "width": width,
            "num_inference_steps": STEPS,
            "guidance_scale": GUIDANCE,
        }
        images: list[Image.Image] = self.pipeline([PROMPT] * len(seeds), generator=list(seeds), **request).images
        for seed, image in zip(seeds, images, strict=True):
            image.save(self.folder / f"{name}-{seed}.png")


def sizes(artist: Artist) -> None:
    """Two sizes and a batch of two, then the first size again: each has a captured graph of its own."""
    artist.draw("square")
    artist.draw("wide", width=128)
    artist.draw("batch", seeds=(0, 1))
    artist.draw("again")


def threads(artist: Artist) -> None:
    """Generate two sizes in two threads while a second pipeline is opened and generates."""
    failures: list[BaseException] = []

    def attempt(function: Any, *arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except BaseException as error:
            failures.append(error)

    def open_another() -> None:
        Artist(artist.pipeline.folder, artist.folder, sys.argv[4]).draw("second")

    jobs = [
        threading.Thread(target=attempt, args=(artist.draw, "square")),
        threading.Thread(target=attempt, args=(artist.draw, "wide"), kwargs={"width": 128}),
        threading.Thread(target=attempt, args=(open_another,)),
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if failures:
        raise failures[0]


def lora(artist: Artist) -> None:
    """A LoRA loaded, scaled and unloaded."""
    artist.draw("before")
    artist.pipeline.load_lora_weights(LORA, adapter_name="gold")
    artist.draw("full")
    artist.pipeline.set_adapters(["gold"], [0.5])
    artist.draw("half")
    artist.pipeline.unload_lora_weights()
    artist.draw("after")


PROGRAMS = {function.__name__: function for function in (sizes, threads, lora)}

if __name__ == "__main__":
    name, model, folder, provider = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    PROGRAMS[name](Artist(Path(model), Path(folder), provider))
