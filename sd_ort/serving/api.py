"""What a request for images may say, in the shape of OpenAI's images API: read and checked before anything is drawn.

    {"prompt": "a red circle", "n": 2, "size": "512x512", "response_format": "b64_json",
     "negative_prompt": "", "steps": 25, "guidance": 7.5, "seed": 1}

Only the prompt is needed; the second line is ours.
"""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sd_ort.core.errors import InputError
from sd_ort.pipeline.arguments import check_text
from sd_ort.serving.pictures import Model, Picture, Settings

KNOWN = (
    "prompt", "negative_prompt", "n", "size", "steps", "guidance", "seed", "response_format", "output_format", "model",
    "user",
)  # fmt: skip
ONLY = {"response_format": "b64_json", "output_format": "png"}  # fields that can say one thing
SEEDS = 2**63  # more than any client's own random numbers


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for: bytes of its body, characters of a prompt, images, steps, and pixels of an
    image. `guidance` is the largest scale."""

    body: int = 64 * 1024
    prompt: int = 4000
    images: int = 10
    steps: int = 150
    pixels: int = 2048 * 2048
    guidance: float = 100.0


class Refusal(InputError):
    """A request that is not answered: the HTTP `status`, and `field`, the one at fault."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


def pictures_asked(body: bytes, model: Model, limits: Limits) -> list[Picture]:
    """The pictures that a request's body asks for, in order; picture i is drawn from seed + i.

    Raises Refusal: 413 for a body that is too long, 400 for one that is no such request.
    """
    if len(body) > limits.body:
        raise Refusal(f"the request has more than {limits.body} bytes: ask for less.", status=413)
    fields = _fields(body)
    prompt, negative = _text(fields, "prompt", limits), _text(fields, "negative_prompt", limits)
    if fields.get("prompt") is None:
        raise Refusal("there is no prompt: say what to draw.", "prompt")
    for name, value in ONLY.items():
        if fields.get(name) not in (None, value):
            raise Refusal(f"{name} can be {value!r} alone.", name)
    for name in ("model", "user"):  # clients send them; there is one model, and nothing is kept of users
        if not isinstance(fields.get(name), str | None):
            raise Refusal(f"{name} is not a text.", name)
    count = _integer(fields, "n", 1, 1, limits.images)
    first = _integer(fields, "seed", random.randrange(2**31), 0, SEEDS - count)
    width, height = _size(fields, model, limits)
    settings = Settings(
        width,
        height,
        steps=_integer(fields, "steps", 25, 1, min(limits.steps, model.trained_steps)),
        guidance=_guidance(fields, model, limits),
    )
    return [Picture(prompt, negative, seed, settings) for seed in range(first, first + count)]


def answer(pictures: Sequence[Picture], files: Sequence[bytes]) -> dict[str, Any]:
    """The response: a PNG file for each picture, base64, and the seed that draws it again."""
    data = [
        {"b64_json": base64.b64encode(file).decode(), "seed": picture.seed}
        for picture, file in zip(pictures, files, strict=True)
    ]
    return {"created": int(time.time()), "output_format": "png", "data": data}


def error(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's API words it."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Refusal('the request is not JSON: send {"prompt": "..."}.') from None
    if not isinstance(fields, dict):
        raise Refusal('the request is not a JSON object: send {"prompt": "..."}.')
    for name in fields:
        if name not in KNOWN:
            raise Refusal(f"{name[:50]!r} is not known: the fields are {', '.join(KNOWN)}.", name[:50])
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _text(fields: dict[str, Any], name: str, limits: Limits) -> str:
    text = fields.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise Refusal(f"{name} is not a text.", name)
    if len(text) > limits.prompt:
        raise Refusal(f"{name} has {len(text)} characters, more than {limits.prompt}.", name)
    try:
        check_text([text])
    except InputError as fault:
        raise Refusal(str(fault), name) from None
    return text


def _integer(fields: dict[str, Any], name: str, otherwise: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Refusal(f"{name} is not a whole number between {low} and {high}.", name)
    return value


def _guidance(fields: dict[str, Any], model: Model, limits: Limits) -> float:
    value = fields.get("guidance")
    if value is None:
        return model.guidance
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= limits.guidance:
        raise Refusal(f"guidance is not a number between 0 and {limits.guidance:g}.", "guidance")
    return float(value)


def _size(fields: dict[str, Any], model: Model, limits: Limits) -> tuple[int, int]:
    """Width and height in pixels."""
    size = fields.get("size")
    if size in (None, "auto"):
        return model.side, model.side
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size) if isinstance(size, str) else None
    if not found:
        raise Refusal('size is not of the form "512x512", width and height in pixels, nor "auto".', "size")
    width, height = int(found[1]), int(found[2])
    if not width or not height or width % model.multiple or height % model.multiple:
        raise Refusal(f"width and height of size must be multiples of {model.multiple}.", "size")
    if width * height > limits.pixels:
        raise Refusal(f"size {size} has more than {limits.pixels} pixels: ask for a smaller image.", "size")
    return width, height
