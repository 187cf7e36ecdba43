"""The installed diffusers and sd-ort generate the same images from the same weights, seed and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import diffusers
import pytest
import torch

import sd_ort
from scripts.fixtures import parity_pairs
from scripts.fixtures.parity_models import Models
from scripts.fixtures.parity_pairs import ARGUMENTS, FAILS_IN_DIFFUSERS, FAMILIES, REFUSED, Pair, seeded, tensor

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:::diffusers", "ignore:__array_wrap__:DeprecationWarning"),
]

# Every pair: scripts/checks/parity.py. Those of Qwen-Image-Edit run beside its other tests, which share its export.
PAIRS = [pair for pair in parity_pairs.pairs(every=False) if pair.family != "qwen_edit"]
OWN = {"prompt_syntax", "progress"}  # arguments that diffusers' classes have not


@pytest.fixture(scope="module")
def models(shared_exports: None, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("parity"))


def test_names_are_unique() -> None:
    names = [str(pair) for pair in PAIRS]
    assert len(set(names)) == len(names) > 300


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_same_image(models: Models, pair: Pair) -> None:
    outcome = parity_pairs.compare(models, pair)
    expected = next((v for names, v in EXPECTED.items() if str(pair).endswith(names)), "equal")
    assert outcome.verdict == expected, outcome
    if expected == "refused":
        assert next(reason for name, reason in REFUSED.items() if str(pair).endswith(name)) in str(outcome.reason)


EXPECTED = dict.fromkeys(FAILS_IN_DIFFUSERS, "fails in diffusers") | dict.fromkeys(REFUSED, "refused")


@pytest.mark.parametrize("kind", FAMILIES)
def test_signature(kind: str) -> None:
    """Arguments, their order and defaults are those of diffusers; each has a pair, or none by intention."""
    theirs = list(parity_pairs.parameters(kind).values())
    ours = list(inspect.signature(getattr(sd_ort, kind).__call__).parameters.values())[1:]
    assert [p.name for p in ours if p.name not in OWN] == [p.name for p in theirs]
    for mine, other in zip((p for p in ours if p.name not in OWN), theirs, strict=True):
        assert mine.kind == other.kind, other.name
        default = None if other.default is inspect.Parameter.empty and other.name != "kwargs" else other.default
        assert _plain(mine.default) == _plain(default), other.name
        assert mine.annotation is not inspect.Parameter.empty, other.name
    assert [p.name for p in theirs if p.name not in ARGUMENTS] == []


@pytest.mark.parametrize("kind", FAMILIES)
def test_callback_tensors(kind: str) -> None:
    names = {"denoised"}  # an intermediate result of LCMScheduler, which a linear schedule has not
    theirs = set(getattr(diffusers, kind)._callback_tensor_inputs)
    assert set(getattr(sd_ort, kind)._callback_tensor_inputs) == theirs - names


@pytest.mark.parametrize("kind", FAMILIES)
def test_callback_tensor_values(models: Models, kind: str) -> None:
    """Every tensor of `_callback_tensor_inputs` has diffusers' values after the first step."""
    family, seen = FAMILIES[kind][0], list[dict[str, Any]]()
    arguments = {"prompt": "a", "num_inference_steps": 4, "output_type": "latent", "height": 64, "width": 64}
    arguments |= parity_pairs.images_of(parity_pairs.parameters(kind))
    arguments = {name: value for name, value in arguments.items() if name in parity_pairs.parameters(kind)}
    names = getattr(sd_ort, kind)._callback_tensor_inputs
    for pipeline in (models.ours(family, kind), models.theirs(family, kind)):

        def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(dict(tensors))
            return {}

        call = {"callback_on_step_end": keep, "callback_on_step_end_tensor_inputs": list(names)}
        pipeline(**arguments, **call, generator=seeded())
    first, expected = seen[0], seen[len(seen) // 2]
    assert sorted(first) == sorted(expected) == sorted(names)
    for name in names:
        torch.testing.assert_close(first[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["sd", "xl", "refiner"])
def test_encode_prompt(models: Models, family: str) -> None:
    kind = FAMILIES_BY_KIND[family]
    arguments: dict[str, Any] = {"device": "cpu", "num_images_per_prompt": 2, "do_classifier_free_guidance": True}
    arguments |= {"prompt": ["a", "b"], "negative_prompt": ["c", "d"]}
    pipelines = models.ours(family, kind), models.theirs(family, kind)
    for mine, other in zip(*(pipeline.encode_prompt(**arguments) for pipeline in pipelines), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["StableDiffusionPipeline", "StableDiffusionXLPipeline"])
def test_prepare_latents(models: Models, kind: str) -> None:
    family = FAMILIES[kind][0]
    latents = []
    for pipeline in (models.ours(family, kind), models.theirs(family, kind)):
        pipeline.scheduler.set_timesteps(4)
        latents.append(pipeline.prepare_latents(2, 4, 64, 80, torch.float32, "cpu", [seeded(1), seeded(2)]))
        latents.append(pipeline.prepare_latents(1, 4, 64, 64, torch.float32, "cpu", None, tensor(1, 4, 8, 8)))
    torch.testing.assert_close(latents[:2], latents[2:])


@pytest.mark.parametrize("kind", ["StableDiffusionImg2ImgPipeline", "StableDiffusionXLImg2ImgPipeline"])
@pytest.mark.parametrize("generators", [1, 2])
def test_prepare_latents_of_an_image(models: Models, kind: str, generators: int) -> None:
    family = FAMILIES[kind][0]
    latents = []
    for pipeline in (models.ours(family, kind), models.theirs(family, kind)):
        pipeline.scheduler.set_timesteps(4)
        timestep = pipeline.scheduler.timesteps[1:2].repeat(2)
        generator: Any = [seeded(1), seeded(2)] if generators == 2 else seeded(1)
        for image in (tensor(1, 3, 64, 64), tensor(1, 4, 8, 8)):
            latents.append(pipeline.prepare_latents(image, timestep, 1, 2, torch.float32, "cpu", generator))
    torch.testing.assert_close(latents[:2], latents[2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline"])
@pytest.mark.parametrize("is_strength_max", [True, False])
def test_prepare_latents_of_a_masked_image(models: Models, kind: str, is_strength_max: bool) -> None:
    family = FAMILIES[kind][0]
    named: dict[str, Any] = {"image": tensor(1, 3, 64, 64), "is_strength_max": is_strength_max}
    results = []
    for pipeline in (models.ours(family, kind), models.theirs(family, kind)):
        pipeline.scheduler.set_timesteps(4)
        named["timestep"] = pipeline.scheduler.timesteps[1:2].repeat(2)
        sizes = (2, 4, 64, 64, torch.float32, "cpu")
        results.append(
            pipeline.prepare_latents(*sizes, seeded(), **named, return_noise=True, return_image_latents=True)
        )
        results.append(pipeline.prepare_latents(*sizes, seeded(), tensor(2, 4, 8, 8), **named))
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-4, atol=1e-4)


FAMILIES_BY_KIND = {
    "sd": "StableDiffusionPipeline",
    "xl": "StableDiffusionXLPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
