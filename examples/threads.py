"""Generate from several threads, as a web server or a GUI does: `python examples/threads.py`.

One pipeline serves all threads, and each image is the one that a single thread draws.
"""

from concurrent.futures import ThreadPoolExecutor

from sd_ort import StableDiffusionPipeline

pipe = StableDiffusionPipeline.from_pretrained("demo")
prompts = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]


def generate(prompt: str) -> bytes:
    return pipe(prompt, num_inference_steps=8, generator=1, progress=False).images[0].tobytes()


with ThreadPoolExecutor(4) as pool:
    images = list(pool.map(generate, prompts))
assert images == [generate(prompt) for prompt in prompts]
print(f"{len(images)} images, each as one thread draws it")
