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
from scripts.fixtures.parity_pairs import ARGUMENTS, FAILS_IN_DIFFUSERS, FAMILIES, REFUSED, Pair

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:::diffusers", "ignore:__array_wrap__:DeprecationWarning"),
]

PAIRS = list(parity_pairs.pairs())
OWN = {"prompt_syntax", "progress"}  # arguments that diffusers' classes have not


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
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


@pytest.mark.parametrize("family", ["sd", "xl", "refiner"])
def test_encode_prompt(models: Models, family: str) -> None:
    kind = FAMILIES_BY_KIND[family]
    given: dict[str, Any] = {"device": "cpu", "num_images_per_prompt": 2, "do_classifier_free_guidance": True}
    given |= {"prompt": ["a", "b"], "negative_prompt": ["c", "d"]}
    pipelines = models.ours(family, kind), models.theirs(family, kind)
    for mine, other in zip(*(pipeline.encode_prompt(**given) for pipeline in pipelines), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


FAMILIES_BY_KIND = {
    "sd": "StableDiffusionPipeline",
    "xl": "StableDiffusionXLPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
