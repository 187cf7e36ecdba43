"""What a request may say: all of it read, or refused with one line and the field at fault."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from sd_ort.serving.api import Limits, Refusal, answer, error, pictures_asked
from sd_ort.serving.pictures import Model, Settings

MODEL = Model(side=512, multiple=8, guidance=7.5, trained_steps=100)
LIMITS = Limits()
WHOLE = {
    "prompt": "a red circle", "negative_prompt": "blue", "n": 3, "size": "768x512", "steps": 4, "guidance": 2,
    "seed": 11, "response_format": "b64_json", "output_format": "png", "model": "sd", "user": "me",
}  # fmt: skip


def asked(**fields: Any) -> Any:
    return pictures_asked(json.dumps({"prompt": "a red circle", **fields}).encode(), MODEL, LIMITS)


def test_all_fields() -> None:
    pictures = asked(**WHOLE)
    assert [picture.seed for picture in pictures] == [11, 12, 13]
    assert {picture.settings for picture in pictures} == {Settings(768, 512, 4, 2.0)}
    assert {(picture.prompt, picture.negative) for picture in pictures} == {("a red circle", "blue")}


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(set(WHOLE) - {"prompt"}), {"size": "auto"}])
def test_defaults_are_the_models(fields: dict[str, Any]) -> None:
    (picture,) = asked(**fields)
    assert picture.settings == Settings(512, 512, 25, 7.5)
    assert picture.negative == ""
    assert 0 <= picture.seed < 2**31


@pytest.mark.parametrize("prompt", ["", "é 東京 🙂", "x" * LIMITS.prompt, 'quotes " and \\ and \n'])
def test_any_text_is_a_prompt(prompt: str) -> None:
    assert asked(prompt=prompt)[0].prompt == prompt


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
                                        "4096x4096", "99999x8", "999999x8", " 512x512", "\uff15\uff11\uff12x512", 512,
                                        [512, 512])],
        ("response_format", "url"), ("output_format", "webp"), ("model", 1), ("user", {}),
        ("quality", "hd"), ("", 1), ("x" * 10000, 1),
    ],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(Refusal) as refused:
        asked(**{field: value})
    assert refused.value.status == 400
    assert refused.value.field == field[:50]
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"1", b"[]", b'"a red circle"', b"{", b"{'prompt': 1}", b"\xff\xfe", b"[" * 50_000,
        b'{"a":' * 9000, b'{"prompt": "a", "guidance": NaN}', b'{"prompt": "a", "guidance": Infinity}',
        b'{"prompt": "a", "guidance": 1e999}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: ascii(body)[:20],
)  # fmt: skip
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        pictures_asked(body, MODEL, LIMITS)
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


def test_a_prompt_of_a_megabyte_is_too_large() -> None:
    with pytest.raises(Refusal) as refused:
        asked(prompt="x" * 2**20)
    assert refused.value.status == 413


def test_limits_are_what_they_are_set_to() -> None:
    small = Limits(pixels=512 * 512, images=1, steps=3)
    body = {"prompt": "a", "steps": 3, "size": "512x512"}
    assert pictures_asked(json.dumps(body).encode(), MODEL, small)
    for more in ({"n": 2}, {"steps": 4}, {"size": "520x512"}):
        with pytest.raises(Refusal):
            pictures_asked(json.dumps(body | more).encode(), MODEL, small)


def test_answers_have_the_shape_of_openais() -> None:
    pictures = asked(n=2, seed=5)
    content = answer(pictures, [b"one", b"two"])
    assert [base64.b64decode(each["b64_json"]) for each in content["data"]] == [b"one", b"two"]
    assert [each["seed"] for each in content["data"]] == [5, 6]
    assert content["created"] > 0
    assert error("no", 400, "n")["error"]["type"] == "invalid_request_error"
    assert error("no", 503)["error"]["type"] == "server_error"
