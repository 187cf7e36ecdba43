"""The first cases of every target of scripts/checks/fuzz.py: no raw exception, no bug, no changed input, no hang."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_pipeline

from scripts.checks import fuzz

CHUNK = 50  # cases of one test


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> fuzz.Inputs:
    work = tmp_path_factory.mktemp("fuzz")
    return fuzz.open_inputs(tiny_pipeline.write(work / "source"), work)


@pytest.fixture(autouse=True)
def quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


CHUNKS = [
    pytest.param(target, range(start, min(start + CHUNK, count)), id=f"{target.__name__}-{start}")
    for target, count in fuzz.TARGETS.items()
    for start in range(0, count, CHUNK)
]


@pytest.mark.parametrize(("target", "numbers"), CHUNKS)
def test_cases(inputs: fuzz.Inputs, target: fuzz.Target, numbers: range) -> None:
    wrong = {number: fuzz.run_case(target, number, inputs) for number in numbers}
    assert {number: reason for number, reason in wrong.items() if reason} == {}


REGRESSIONS = {
    fuzz.folder_json: (21037, 62447, 74216),
    fuzz.folder_stages: (64082, 77764),
    fuzz.graph: (65102, 76371),
    fuzz.single_file: (200559,),
}


@pytest.mark.parametrize(
    ("target", "number"), [(t, number) for t, numbers in REGRESSIONS.items() for number in numbers]
)
def test_cases_that_longer_runs_found(inputs: fuzz.Inputs, target: fuzz.Target, number: int) -> None:
    assert fuzz.run_case(target, number, inputs) is None


def test_there_are_enough_cases() -> None:
    assert sum(fuzz.TARGETS.values()) >= 1500


def test_a_raw_exception_a_bug_and_a_changed_input_are_found(
    inputs: fuzz.Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(rng: object, inputs: fuzz.Inputs, work: Path) -> None:
        raise KeyError("x")

    def changes(rng: object, inputs: fuzz.Inputs, work: Path) -> None:
        (inputs.source / "new").touch()

    def works(rng: object, inputs: fuzz.Inputs, work: Path) -> None:
        sum(range(1000))

    assert "KeyError" in str(fuzz.run_case(raises, 0, inputs))
    assert fuzz.run_case(works, 0, inputs) is None
    monkeypatch.setattr(fuzz, "LIMIT_S", -1.0)
    assert "s" in str(fuzz.run_case(works, 0, inputs))
    monkeypatch.setattr(fuzz, "LIMIT_S", 10.0)
    assert fuzz.run_case(changes, 0, inputs) == "an input file was changed"
    (inputs.source / "new").unlink()
