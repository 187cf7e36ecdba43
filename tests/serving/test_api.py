"""Requests of the image API: parsed completely, or rejected with one line and the invalid field."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from sd_ort.serving.api import InvalidRequest, Limits, error_body, parse_request, response_body
from sd_ort.serving.image_jobs import BatchSettings, ModelInfo

MODEL = ModelInfo(default_size=512, size_multiple=8, steps=25, guidance=7.5, train_timesteps=100)
LIMITS = Limits()
ALL_FIELDS = {
    "prompt": "a red circle", "negative_prompt": "blue", "n": 3, "size": "768x512", "steps": 4, "guidance": 2,
    "seed": 11, "response_format": "b64_json", "output_format": "png", "model": "sd", "user": "me",
}  # fmt: skip


def parse(**fields: Any) -> Any:
    return parse_request(json.dumps({"prompt": "a red circle", **fields}).encode(), MODEL, LIMITS)


def test_all_fields() -> None:
    jobs = parse(**ALL_FIELDS)
    assert [job.seed for job in jobs] == [11, 12, 13]
    assert {job.settings for job in jobs} == {BatchSettings(768, 512, 4, 2.0)}
    assert {(job.prompt, job.negative) for job in jobs} == {("a red circle", "blue")}


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(set(ALL_FIELDS) - {"prompt"}), {"size": "auto"}])
def test_defaults_are_the_models(fields: dict[str, Any]) -> None:
    (job,) = parse(**fields)
    assert job.settings == BatchSettings(512, 512, 25, 7.5)
    assert job.negative == ""
    assert 0 <= job.seed < 2**31


@pytest.mark.parametrize("prompt", ["", "é 東京 🙂", "x" * LIMITS.prompt, 'quotes " and \\ and \n'])
def test_any_text_is_a_prompt(prompt: str) -> None:
    assert parse(prompt=prompt)[0].prompt == prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("prompt", value) for value in (None, 1, True, [], ["a", "b"], {}, "x" * (LIMITS.prompt + 1), "\ud800")],
        *[("negative_prompt", value) for value in (1, [""], "x" * (LIMITS.prompt + 1), "\udfff")],
        *[("n", value) for value in (0, -1, 11, 1.0, "2", True, [], 10**30)],
        *[("steps", value) for value in (0, 101, 2.5, "25", False)],  # the model was trained with 100
        *[("seed", value) for value in (-1, 2**63, 2**64, 1.5, "1", True)],
        *[("guidance", value) for value in (-1, 101, "7", True, [7], 10**400)],
        *[("size", value) for value in ("", "512", "512x", "0x0", "0x512", "512x512x3", "-8x8", "513x512", "512X512",
                                        "4096x4096", "99999x8", "64x32768", "999999x8", " 512x512",
                                        "\uff15\uff11\uff12x512", 512, [512, 512])],
        ("response_format", "url"), ("output_format", "webp"), ("model", 1), ("user", {}),
        ("quality", "hd"), ("", 1), ("x" * 10000, 1),
    ],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
def test_invalid_fields(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**{field: value})
    assert error.value.status == 400
    assert error.value.field == field[:50]
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"1", b"[]", b'"a red circle"', b"{", b"{'prompt': 1}", b"\xff\xfe", b"[" * 50_000,
        b'{"a":' * 9000, b'{"prompt": "a", "guidance": NaN}', b'{"prompt": "a", "guidance": Infinity}',
        b'{"prompt": "a", "guidance": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: ascii(body)[:20],
)  # fmt: skip
def test_invalid_bodies(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_request(body, MODEL, LIMITS)
    assert error.value.status == 400
    assert "\n" not in str(error.value)


def test_a_prompt_of_a_megabyte_is_too_large() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(prompt="x" * 2**20)
    assert error.value.status == 413


def test_limits_are_configurable() -> None:
    small = Limits(pixels=512 * 512, images=1, steps=3)
    body = {"prompt": "a", "steps": 3, "size": "512x512"}
    assert parse_request(json.dumps(body).encode(), MODEL, small)
    for more in ({"n": 2}, {"steps": 4}, {"size": "520x512"}):
        with pytest.raises(InvalidRequest):
            parse_request(json.dumps(body | more).encode(), MODEL, small)


def test_responses_have_openais_format() -> None:
    content = response_body(parse(n=2, seed=5), [b"one", b"two"])
    assert [base64.b64decode(image["b64_json"]) for image in content["data"]] == [b"one", b"two"]
    assert [image["seed"] for image in content["data"]] == [5, 6]
    assert content["created"] > 0
    assert error_body("no", 400, "n")["error"]["type"] == "invalid_request_error"
    assert error_body("no", 503)["error"]["type"] == "server_error"


def test_variant_is_one_of_the_servers() -> None:
    model = replace(MODEL, variants=("raw", "torch"))
    for variant, expected in ((None, ""), ("", ""), ("torch", "torch")):
        (job,) = parse_request(json.dumps({"prompt": "a", "variant": variant}).encode(), model, LIMITS)
        assert job.settings.variant == expected
        assert job.png_text().get("variant", "") == expected
    for unknown in ("eager", 1, ["raw"]):
        with pytest.raises(InvalidRequest, match="compares with: raw, torch"):
            parse_request(json.dumps({"prompt": "a", "variant": unknown}).encode(), model, LIMITS)
    with pytest.raises(InvalidRequest, match="start the server with --compare NAME=FOLDER"):
        parse(variant="raw")


def test_loras_have_the_servers_names_and_defaults() -> None:
    model = replace(MODEL, loras=(("night", 1.0), ("gold", 0.5)))

    def scales(loras: Any) -> Any:
        (job,) = parse_request(json.dumps({"prompt": "a", "loras": loras}).encode(), model, LIMITS)
        return job.settings.loras

    assert scales(None) == model.loras
    assert scales({"gold": -1}) == (("night", 1.0), ("gold", -1.0))
    for wrong in ({"other": 1}, {"gold": "1"}, {"gold": True}, {"gold": 11}, ["gold"], "gold"):
        with pytest.raises(InvalidRequest) as caught:
            scales(wrong)
        assert caught.value.field == "loras"
    with pytest.raises(InvalidRequest, match="none; start the server with --lora"):
        parse(loras={"gold": 1})
