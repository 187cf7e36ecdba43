"""Tune: run every component at the shapes that will be used, and keep the fastest candidate of each operator met.

The op library measures a call when a session with tuning on meets its shape for the first time; ONNX Runtime's own
tunable operators do the same. So one run of each component at each size measures all that its graph contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.signatures import default_latents
from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, ProviderError
from sd_ort.graphs.load import load
from sd_ort.runtime import tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.op_library import build_command
from sd_ort.runtime.ort_wheel import runtime
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import Model, create_session

PROMPT_TOKENS = 77  # CLIP's


def tune(
    directory: Path,
    provider: str,
    *,
    heights: Sequence[int] = (),
    widths: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    guidance: bool = True,
    components: Sequence[str] | None = None,
    library: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Measure every shape that a pipeline folder meets; returns the file with the results.

    `heights` and `widths` are pixels, taken in pairs (the model's own size when empty); `batches` images drawn at once.
    With `guidance` the UNet meets twice the batch. `library`: op library to use instead of the one found.

    Raises ProviderError for a provider that has nothing to tune or is not there, InputError for a folder or size that
    cannot be used.
    """
    library = library or library_path()
    entry = provider_named(provider)
    if not entry.tuning and entry.ep not in tuning.GPU_LIBRARIES:
        raise ProviderError(
            f"the {provider} provider has nothing to tune: its kernels have one candidate each. Tuning is for GPUs: "
            "use --provider cuda, rocm, hip or sdcuda on a machine with one."
        )
    source = tuning.gpu_ops(provider, library)
    build = build_command(provider)
    if source is None and not entry.tuning:
        raise ProviderError(f"no op library for {provider}, whose kernels are all there is to tune: {build}.")
    if source is None:
        say(f"no op library for {provider}: only ONNX Runtime's own operators are tuned ({build}).")
    sizes = image_sizes(directory, heights, widths)
    saved = None
    for name in components or pipeline_folder.components(directory):
        path = pipeline_folder.check_component(directory, name)
        session = create_session(path, provider, tuning=True, library=library or False)
        run_shapes(Model(session), directory, name, latent_sizes(directory, name, sizes, batches, guidance), say)
        saved = tuning.save([session], source, runtime().__version__) or saved
    if saved is None:
        raise InputError(f"{directory} has no operator that the {provider} provider could tune: optimize it for one.")
    return saved


def image_sizes(directory: Path, heights: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int]]:
    """(height, width) in pixels of the images to tune for. Raises InputError when they do not pair up."""
    if not heights and not widths:
        side = default_latents(component_config(directory, "unet")) * pixels_per_latent(directory)
        return [(side, side)]
    heights, widths = heights or widths, widths or heights
    if len(heights) != len(widths):
        raise InputError(f"{len(heights)} heights and {len(widths)} widths: give as many of one as of the other.")
    step = pixels_per_latent(directory)
    for number in (*heights, *widths):
        if number <= 0 or number % step:
            raise InputError(f"{number} pixels is no size of an image: give a multiple of {step}.")
    return list(zip(heights, widths, strict=True))


def latent_sizes(
    directory: Path, component: str, sizes: Sequence[tuple[int, int]], batches: Sequence[int], guidance: bool
) -> list[dict[str, int]]:
    """What `random_inputs` takes: latent pixels, batch and tokens, each once. Text encoders know no image sizes."""
    step = pixels_per_latent(directory)
    found = []
    for height, width in sizes:
        for batch in batches:
            doubled = guidance and component.startswith(("unet", "controlnet"))
            size = {"batch": batch * (2 if doubled else 1), "sequence": PROMPT_TOKENS}
            size |= {"height": height // step, "width": width // step}
            if component.startswith("text_encoder"):
                size |= {"height": 1, "width": 1}
            if size not in found:
                found.append(size)
    return found


def run_shapes(
    model: Model, directory: Path, component: str, sizes: Sequence[dict[str, int]], say: Callable[[str], None]
) -> None:
    """Run a component once at each size, on made-up numbers."""
    inputs = list(load(directory / component / pipeline_folder.MODEL).graph.inputs)
    config = component_config(directory, component)
    for size in sizes:
        say(f"{component}: {' '.join(f'{key} {number}' for key, number in size.items())}")
        model(**random_inputs(component, inputs, config, size))
