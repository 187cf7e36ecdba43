"""Lists of prompts: what is read, what is left to draw, and that nothing is drawn twice or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy
from test_dispatch import Fake

from sd_ort.core.errors import InputError
from sd_ort.serving.dispatch import Dispatcher
from sd_ort.serving.pictures import NotDrawn, Settings
from sd_ort.serving.prompts import Task, drawn, read_prompts, tasks

SETTINGS = Settings(64, 64, 2, 7.5)


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes("\ufeffa red circle\r\n\n  é 東京 \n# no comment\n".encode())
    assert read_prompts(path) == ["a red circle", "é 東京", "# no comment"]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00a", None])
def test_no_list(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"list\.txt"):
        read_prompts(tmp_path / "list.txt")


def test_names_and_seeds_count_up() -> None:
    found = tasks(["A red, red circle!", "東京"], "blue", SETTINGS, 7, 2, Path("out"))
    assert [(task.path.name, task.picture.seed) for task in found] == [
        ("00001-a-red-red-circle-7.png", 7), ("00001-a-red-red-circle-8.png", 8),
        ("00002-image-9.png", 9), ("00002-image-10.png", 10),
    ]  # fmt: skip
    assert {task.picture.negative for task in found} == {"blue"}


def test_replicas_that_die_lose_nothing() -> None:
    """Each picture is done once; a list longer than what is asked for at once is drawn to its end."""
    both, found = [Fake(), Fake()], []
    asked = tasks([str(i) for i in range(50)], "", SETTINGS, 0, 1, Path("out"))
    for fake in both:
        fake.gate.set()

    def done(task: Task, file: bytes) -> None:
        assert file == task.picture.prompt.encode()
        found.append(task)
        if len(found) == 10:
            both[0].living = False

    asyncio.run(asyncio.wait_for(drawn(Dispatcher(both, batch=2), asked, done), 60))
    assert sorted(found, key=asked.index) == asked
    assert not any(fake.living for fake in both)
    one = Fake()
    one.gate.set()
    with pytest.raises(NotDrawn, match="3 replicas died"):
        asyncio.run(drawn(Dispatcher([one]), tasks(["deadly"], "", SETTINGS, 0, 1, Path("out")), done))
    assert not one.living


def test_generate_goes_on_where_it_stopped(sd_ort: Callable[..., Any], tmp_path: Path, one_thread: None) -> None:
    folder, out, prompts = toy.write(tmp_path / "toy"), tmp_path / "out", tmp_path / "list.txt"
    prompts.write_text("one\ntwo\nthree\n")
    command = ["generate", "--prompts", prompts, "--model", folder, "--steps", 2, "--out", out, "--batch", 2]
    code, shown, _ = sd_ort(*command)
    names = ["00001-one-0.png", "00002-two-1.png", "00003-three-2.png"]
    assert (code, [Path(line).name for line in shown.split()]) == (0, names)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / names[1]).unlink()
    code, shown, err = sd_ort(*command)
    assert (code, [Path(line).name for line in shown.split()]) == (0, names[1:2])
    assert "2 of 3 images are there already" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert sd_ort(*command)[1] == ""
    code, _, err = sd_ort(*command, "--steps", 3)
    assert (code, "another image (steps is '2' there)" in err) == (5, True)
    for wrong in (["a prompt"], ["--strength", 0.5], ["--out", tmp_path / "a.png"], ["--gpus", 2]):
        code, _, err = sd_ort(*command, *wrong)
        assert (code in (2, 3), err.strip().count("\n")) == (True, 0), err
    assert sd_ort("generate", "--model", folder)[0] == 2
