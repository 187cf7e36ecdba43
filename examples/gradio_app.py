"""A small Gradio app, whose threads share one pipeline: `pip install gradio; python examples/gradio_app.py`.

`--check` generates from four threads without opening a page, and needs no Gradio.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from PIL.Image import Image

from sd_ort import StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained("demo")


def generate(prompt: str, steps: int = 25, seed: int = 1) -> Image:
    """Return an image; Gradio calls this from changing threads."""
    image: Image = pipe(prompt, num_inference_steps=int(steps), generator=int(seed), progress=False).images[0]
    return image


def app() -> None:
    """Open the page."""
    import gradio

    inputs = [
        gradio.Textbox("a red circle on a blue background", label="Prompt"),
        gradio.Slider(1, 50, 25, step=1, label="Steps"),
        gradio.Number(1, precision=0, label="Seed"),
    ]
    gradio.Interface(generate, inputs, gradio.Image(label="Image")).queue(default_concurrency_limit=4).launch()


if "--check" in sys.argv:
    prompts = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda prompt: generate(prompt, 2).tobytes(), prompts))
    assert images == [generate(prompt, 2).tobytes() for prompt in prompts]
    print(f"{len(images)} images from four threads")
elif __name__ == "__main__":
    app()
