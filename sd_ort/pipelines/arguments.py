"""Checks of the arguments of a pipeline that hold for any model, before anything is loaded or generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from sd_ort.core.errors import InputError

SIDE_LIMIT = 16_384  # pixels of an image's side
IMAGES_LIMIT = 4096  # images of one call
SEEDS = range(-(1 << 63), 1 << 64)  # torch's


class DefaultNumber:
    """Default of an argument in diffusers; the folder's own takes its place (`demo_defaults`)."""


class DefaultInt(int, DefaultNumber):
    """Default number of steps."""


class DefaultFloat(float, DefaultNumber):
    """Default guidance scale."""


STEPS, GUIDANCE, XL_GUIDANCE = DefaultInt(50), DefaultFloat(7.5), DefaultFloat(5.0)
# Tensors that callbacks may change in most of diffusers' classes of SD, of SDXL from text, and of SDXL from images.
GUIDED_TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
_XL = (*GUIDED_TENSORS, "add_text_embeds", "add_time_ids", "negative_pooled_prompt_embeds")
XL_TENSORS, XL_IMAGE_TENSORS = (*_XL, "negative_add_time_ids"), (*_XL, "add_neg_time_ids")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of NumPy too, and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, of NumPy too, and no boolean."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can be
        return False


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check_all(value: Any) -> bool:
        is_sequence = isinstance(value, (list, tuple, range)) or getattr(value, "ndim", 0) == 1
        return is_sequence and all(map(check, value.tolist() if hasattr(value, "tolist") else value))

    return check_all


def _is_array(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# A part of an annotation of a data class -> whether a value is of it. Other annotations are not checked.
KINDS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "int": is_integer,
    "float": is_finite,
    "str": _is_text,
    "bool": lambda value: isinstance(value, (bool, int)),
    "Prompt": lambda value: isinstance(value, (str, list, tuple)),
    "Size": lambda value: _all(is_integer)(value) and len(value) == 2,
    "torch.Tensor": _is_array,
    "np.ndarray": _is_array,
    "Sequence[int]": _all(is_integer),
    "Sequence[float]": _all(is_finite),
    "Sequence[str]": _all(_is_text),
    "Mapping[str, float]": lambda value: isinstance(value, Mapping) and _all(is_finite)([*value.values()]),
    "StepCallback": callable,
}


# A part of an annotation -> its words in a message. Other parts stand for themselves.
WORDS = {
    "int": "an integer",
    "float": "a finite number",
    "str": "a text",
    "bool": "True or False",
    "Prompt": "a text or a list of texts",
    "Size": "two integers",
    "torch.Tensor": "a tensor",
    "np.ndarray": "an array",
    "Sequence[int]": "a list of integers",
    "Sequence[float]": "a list of finite numbers",
    "Sequence[str]": "a list of texts",
    "Mapping[str, float]": "a dict of finite numbers",
    "StepCallback": "a function",
}


def check_type(name: str, annotation: str, value: Any) -> None:
    """Raise InputError for a value that is not of its annotation; numbers are finite. Others than KINDS pass."""
    kinds = annotation.split(" | ")
    if KINDS.keys() >= set(kinds) and not any(KINDS[kind](value) for kind in kinds):
        words = " or ".join(WORDS.get(kind, kind) for kind in kinds)
        raise InputError(f"{name} must be {words}, got {str(value)[:80]!r}.")


def check_types(arguments: Any) -> None:
    """Raise InputError for a field of a data class whose value is not of its annotation, as in `check_type`."""
    for field in fields(arguments):
        if field.init:
            check_type(field.name, str(field.type), getattr(arguments, field.name, None))


THREADS_LIMIT = 1024


def check_load_options(provider: Any, threads: Any, **flags: Any) -> None:
    """Raise InputError for options of `from_pretrained` of another type, or more threads than a machine has."""
    if not isinstance(provider, str):
        raise InputError(f"provider must be a string such as 'cpu', got {str(provider)[:80]!r}.")
    if threads is not None and not (is_integer(threads) and 1 <= threads <= THREADS_LIMIT):
        raise InputError(f"threads must be an integer between 1 and {THREADS_LIMIT}, got {str(threads)[:80]!r}.")
    for name, flag in flags.items():
        if not isinstance(flag, (bool, type(None))):
            raise InputError(f"{name} must be True, False or None, got {str(flag)[:80]!r}.")


def check_text(texts: Sequence[object]) -> None:
    """Raise InputError for a prompt that is no text, such as bytes that a terminal could not decode."""
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"a prompt is a text, or a list of them, not {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the prompt holds characters that are no text: write it in UTF-8.") from error


def check_numbers(height: int | None, width: int | None, images: int, **scales: float | None) -> None:
    """Raise InputError for sizes in pixels, numbers of images and scales that no model supports."""
    for name, side in (("height", height), ("width", width)):
        if side is not None and not 1 <= side <= SIDE_LIMIT:
            raise InputError(f"{name} {side} is not between 1 and {SIDE_LIMIT} pixels.")
    if not 1 <= images <= IMAGES_LIMIT:
        raise InputError(f"{images} images are not between 1 and {IMAGES_LIMIT}: generate them in several calls.")
    for name, scale in scales.items():
        if scale is not None and not math.isfinite(scale):
            raise InputError(f"{name} {scale} is no scale: give one such as 7.5.")


def check_seeds(first: int, count: int) -> None:
    """Raise InputError for seeds that torch's generators do not take."""
    last = first + count - 1
    if first not in SEEDS or last not in SEEDS:
        raise InputError(f"seeds from {first} to {last} are not between {SEEDS[0]} and {SEEDS[-1]}.")
