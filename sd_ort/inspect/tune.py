"""Tuning: runs every component at the shapes that will be used, and stores the fastest candidate of each operator.

A session with tuning on measures the candidates when a call meets a new shape, in the op library and in ONNX Runtime's
own tunable operators. One run of each component at each size therefore measures everything in its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.signatures import default_latents
from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent, random_inputs
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, ProviderError
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.graphs.load import load
from sd_ort.runtime import tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.op_library import build_command
from sd_ort.runtime.ort_wheel import import_onnxruntime
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session

PROMPT_TOKENS = 77  # of CLIP


def tune(
    folder: Path,
    provider: str,
    *,
    heights: Sequence[int] = (),
    widths: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    guidance: bool = True,
    components: Sequence[str] | None = None,
    library: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Path:
    """Measure every shape of a pipeline folder and return the tuning file.

    An interrupt saves what was measured.

    Args:
        heights, widths: image sizes in pixels, taken in pairs; default: the model's own size.
        batches: images per call; with `guidance` the UNet gets twice as many.
        library: op library to use instead of the installed one.

    Raises:
        ProviderError: if the provider has nothing to tune or is not available.
        InputError: for an invalid folder or size.
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
        on_progress(f"no op library for {provider}: only ONNX Runtime's own operators are tuned ({build}).")
    sizes = image_sizes(folder, heights, widths)
    version = import_onnxruntime().__version__
    tuning_file, names = None, pipeline_folder.select_components(folder, components)
    try:
        for name in names:
            path = pipeline_folder.check_component(folder, name)
            session = create_session(path, provider, SessionOptions(tuning=True, library=library or False))
            axis_sizes = latent_sizes(folder, name, sizes, batches, guidance)
            run_shapes(OrtModel(session), folder, name, axis_sizes, on_progress)
            tuning_file = tuning.save([session], source, version) or tuning_file
    except KeyboardInterrupt:
        if tuning_file := tuning.save([], source, version) or tuning_file:
            on_progress(f"{tuning_file} has what was measured: the same command measures the rest.")
        raise
    if tuning_file is None and (tuning_file := tuning.find(tuning.validators_of(source, version))):
        on_progress("nothing new was measured: these sizes were tuned before, or the folder has no operator to tune.")
    if tuning_file is None:
        raise InputError(f"{folder} has no operator that the {provider} provider could tune: optimize it for one.")
    return tuning_file


def image_sizes(folder: Path, heights: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (height, width) of the images in pixels. Raises InputError if they do not pair up."""
    step = pixels_per_latent(folder)
    if not heights and not widths:
        side = default_latents(component_config(folder, "unet")) * step
        return [(side, side)]
    heights, widths = heights or widths, widths or heights
    if len(heights) != len(widths):
        raise InputError(f"{len(heights)} heights and {len(widths)} widths: give as many of one as of the other.")
    for pixels in (*heights, *widths):
        if pixels <= 0 or pixels % step:
            raise InputError(f"{pixels} pixels is no size of an image: give a multiple of {step}.")
    return list(zip(heights, widths, strict=True))


def latent_sizes(
    folder: Path, component: str, sizes: Sequence[tuple[int, int]], batches: Sequence[int], guidance: bool
) -> list[dict[str, int]]:
    """Return the distinct axis sizes of a component for `random_inputs`; text encoders have no image sizes."""
    step = pixels_per_latent(folder)
    rows = 2 if guidance and component.startswith(("unet", "controlnet")) else 1
    axis_sizes = []
    for height, width in [(step, step)] if component.startswith("text_encoder") else sizes:
        for batch in batches:
            size = {"batch": batch * rows, "sequence": PROMPT_TOKENS, "height": height // step, "width": width // step}
            if size not in axis_sizes:
                axis_sizes.append(size)
    return axis_sizes


def run_shapes(
    model: OrtModel, folder: Path, component: str, sizes: Sequence[dict[str, int]], on_progress: ProgressCallback
) -> None:
    """Run a component once at each size, on synthetic inputs."""
    inputs = list(load(folder / component / pipeline_folder.MODEL).graph.inputs)
    config = component_config(folder, component)
    for size in sizes:
        on_progress(f"{component}: {' '.join(f'{axis} {count}' for axis, count in size.items())}")
        model(**random_inputs(component, inputs, config, size))
