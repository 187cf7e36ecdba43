"""Requests of the image API, in the format of OpenAI's: parsed and checked before anything is generated.

    {"prompt": "a red circle", "n": 2, "size": "512x512", "response_format": "b64_json",
     "negative_prompt": "", "steps": 25, "guidance": 7.5, "seed": 1, "loras": {"style": 0.8}, "variant": ""}

Only the prompt is required. The fields of the second line are not OpenAI's.
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
from sd_ort.pipelines.arguments import SIDE_LIMIT, check_text
from sd_ort.serving.image_jobs import BatchSettings, ImageJob, ModelInfo

FIELDS = (
    "prompt", "negative_prompt", "n", "size", "steps", "guidance", "seed", "loras", "variant", "response_format",
    "output_format", "model", "user",
)  # fmt: skip
FIXED_FIELDS = {"response_format": "b64_json", "output_format": "png"}  # fields with one allowed value
LORA_LIMIT = 10  # scale of a LoRA
SEED_LIMIT = 2**63  # exceeds the random seeds of clients


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    body: bytes. prompt: characters. images, steps: counts. pixels: of one image. guidance: the maximum scale.
    """

    body: int = 64 * 1024
    prompt: int = 4000
    images: int = 10
    steps: int = 150
    pixels: int = 2048 * 2048
    guidance: float = 100.0


class InvalidRequest(InputError):
    """A rejected request, with the HTTP `status` and the invalid `field`, if there is one."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.status = field, status


def parse_request(body: bytes, model: ModelInfo, limits: Limits) -> list[ImageJob]:
    """Return the image jobs of a request body, in order; image i has seed + i.

    Raises InvalidRequest: 413 for a body that is too long, 400 for one that is no valid request.
    """
    if len(body) > limits.body:
        raise InvalidRequest(f"The request has more than {limits.body} bytes: send less.", status=413)
    fields = _fields(body)
    prompt, negative = _text(fields, "prompt", limits), _text(fields, "negative_prompt", limits)
    if fields.get("prompt") is None:
        raise InvalidRequest("The prompt is missing: describe the image.", "prompt")
    for name, value in FIXED_FIELDS.items():
        if fields.get(name) not in (None, value):
            raise InvalidRequest(f"{name} must be {value!r}.", name)
    for name in ("model", "user"):  # sent by clients, without effect: there is one model, and users are not recorded
        if not isinstance(fields.get(name), str | None):
            raise InvalidRequest(f"{name} is not a string.", name)
    count = _integer(fields, "n", 1, 1, limits.images)
    first = _integer(fields, "seed", random.randrange(2**31), 0, SEED_LIMIT - count)
    width, height = _size(fields, model, limits)
    settings = BatchSettings(
        width,
        height,
        steps=_integer(fields, "steps", min(model.steps, limits.steps), 1, min(limits.steps, model.train_timesteps)),
        guidance=_guidance(fields, model, limits),
        loras=_loras(fields, model),
        variant=_variant(fields, model),
    )
    return [ImageJob(prompt, negative, seed, settings) for seed in range(first, first + count)]


def response_body(jobs: Sequence[ImageJob], files: Sequence[bytes]) -> dict[str, Any]:
    """Return the response: for each image its PNG file in base64, and the seed that reproduces it."""
    data = [
        {"b64_json": base64.b64encode(file).decode(), "seed": job.seed} for job, file in zip(jobs, files, strict=True)
    ]
    return {"created": int(time.time()), "output_format": "png", "data": data}


def error_body(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """Return the body of an error response, in the format of OpenAI's API."""
    error_type = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": error_type, "param": field, "code": status}}


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise InvalidRequest('The request is not JSON: send {"prompt": "..."}.') from None
    if not isinstance(fields, dict):
        raise InvalidRequest('The request is not a JSON object: send {"prompt": "..."}.')
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(f"{name[:50]!r} is not a field: the fields are {', '.join(FIELDS)}.", name[:50])
    return fields


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _text(fields: dict[str, Any], name: str, limits: Limits) -> str:
    text = fields.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is not a string.", name)
    if len(text) > limits.prompt:
        raise InvalidRequest(f"{name} has {len(text)} characters, more than {limits.prompt}.", name)
    try:
        check_text([text])
    except InputError as error:
        raise InvalidRequest(str(error), name) from None
    return text


def _integer(fields: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer between {low} and {high}.", name)
    return value


def _guidance(fields: dict[str, Any], model: ModelInfo, limits: Limits) -> float:
    value = fields.get("guidance")
    if value is None:
        return model.guidance
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= limits.guidance:
        raise InvalidRequest(f"guidance must be a number between 0 and {limits.guidance:g}.", "guidance")
    return float(value)


def _loras(fields: dict[str, Any], model: ModelInfo) -> tuple[tuple[str, float], ...]:
    """Return the scales of all LoRAs of the model: those of the request, else the defaults."""
    requested = fields.get("loras")
    if requested is None:
        return model.loras
    defaults = dict(model.loras)
    if not isinstance(requested, dict) or not requested.keys() <= defaults.keys():
        names = ", ".join(defaults) or "none; start the server with --lora FILE"
        raise InvalidRequest(f"loras must be an object with a scale for each LoRA of the server: {names}.", "loras")
    for scale in requested.values():
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not abs(scale) <= LORA_LIMIT:
            raise InvalidRequest(
                f"The scale of a LoRA must be a number between -{LORA_LIMIT} and {LORA_LIMIT}.", "loras"
            )
    return tuple((name, float(requested.get(name, scale))) for name, scale in defaults.items())


def _variant(fields: dict[str, Any], model: ModelInfo) -> str:
    variant = fields.get("variant") or ""
    if variant not in ("", *model.variants):
        names = ", ".join(model.variants) or "none; start the server with --compare NAME=FOLDER"
        raise InvalidRequest(f"variant must be a pipeline that the server compares with: {names}.", "variant")
    return str(variant)


def _size(fields: dict[str, Any], model: ModelInfo, limits: Limits) -> tuple[int, int]:
    """Return width and height in pixels."""
    size = fields.get("size")
    if size in (None, "auto"):
        return model.default_size, model.default_size
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size) if isinstance(size, str) else None
    if not match:
        raise InvalidRequest('size must be "auto", or width and height in pixels as in "512x512".', "size")
    width, height = int(match[1]), int(match[2])
    if not width or not height or width % model.size_multiple or height % model.size_multiple:
        raise InvalidRequest(f"The width and height of size must be multiples of {model.size_multiple}.", "size")
    if width * height > limits.pixels or max(width, height) > SIDE_LIMIT:
        raise InvalidRequest(
            f"size {size} has more than {limits.pixels} pixels, or {SIDE_LIMIT} a side: request a smaller image.",
            "size",
        )
    return width, height
