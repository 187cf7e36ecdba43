"""Pipelines of diffusion transformers have the arguments of diffusers, in the same order and with the same defaults."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest

import sd_ort

KINDS = [f"{family}{task}Pipeline" for family in ("StableDiffusion3", "Flux") for task in ("", "Img2Img", "Inpaint")]
KINDS += [f"QwenImage{task}Pipeline" for task in ("Img2Img", "Inpaint", "Edit", "EditPlus")]
KINDS += [
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "ZImagePipeline",
    "QwenImagePipeline",
    "FluxKontextPipeline",
    "Krea2Pipeline",
]
OWN = {"progress", "unsupported"}  # arguments that diffusers' classes have not


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("kind", KINDS)
def test_signature(kind: str) -> None:
    theirs = list(inspect.signature(getattr(diffusers, kind).__call__).parameters.values())[1:]
    parameters = list(inspect.signature(getattr(sd_ort, kind).__call__).parameters.values())[1:]
    ours = [p for p in parameters if p.name not in OWN]
    assert [p.name for p in ours] == [p.name for p in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        default = None if other.default is inspect.Parameter.empty else other.default
        assert (mine.kind, plain(mine.default)) == (other.kind, plain(default)), other.name
        assert mine.annotation is not inspect.Parameter.empty, other.name


@pytest.mark.parametrize("kind", KINDS)
def test_callback_tensors(kind: str) -> None:
    assert set(getattr(sd_ort, kind)._callback_tensor_inputs) == set(getattr(diffusers, kind)._callback_tensor_inputs)
