"""Prompt lists: parsing, missing outputs, and that no image is generated twice or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_pipeline
from test_dispatch import FakeReplica

from sd_ort.core.errors import InputError
from sd_ort.serving.dispatch import Dispatcher
from sd_ort.serving.image_jobs import BatchSettings, GenerationFailed
from sd_ort.serving.prompt_lists import OutputTask, generate_with, output_tasks, read_prompts

SETTINGS = BatchSettings(64, 64, 2, 7.5)


def test_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes("\ufeffa red circle\r\n\n  é 東京 \n# no comment\n".encode())
    assert read_prompts(path) == ["a red circle", "é 東京", "# no comment"]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00a", None])
def test_invalid_lists(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"list\.txt"):
        read_prompts(tmp_path / "list.txt")


def test_file_names_and_seeds() -> None:
    tasks = output_tasks(["A red, red circle!", "東京"], "blue", SETTINGS, 7, 2, Path("out"))
    assert [(task.path.name, task.job.seed) for task in tasks] == [
        ("00001-a-red-red-circle-7.png", 7), ("00001-a-red-red-circle-8.png", 8),
        ("00002-image-9.png", 9), ("00002-image-10.png", 10),
    ]  # fmt: skip
    assert {task.job.negative for task in tasks} == {"blue"}


def test_replicas_that_die_lose_no_image() -> None:
    """Each image is generated once, of a list that is longer than the number of concurrent jobs."""
    replicas, done = [FakeReplica(), FakeReplica()], []
    tasks = output_tasks([str(i) for i in range(50)], "", SETTINGS, 0, 1, Path("out"))
    for replica in replicas:
        replica.gate.set()

    def on_image(task: OutputTask, file: bytes) -> None:
        assert file == task.job.prompt.encode()
        done.append(task)
        if len(done) == 10:
            replicas[0].running = False

    asyncio.run(asyncio.wait_for(generate_with(Dispatcher(replicas, batch=2), tasks, on_image), 60))
    assert sorted(done, key=tasks.index) == tasks
    assert not any(replica.running for replica in replicas)
    replica = FakeReplica()
    replica.gate.set()
    deadly = output_tasks(["deadly"], "", SETTINGS, 0, 1, Path("out"))
    with pytest.raises(GenerationFailed, match="3 replicas died"):
        asyncio.run(generate_with(Dispatcher([replica]), deadly, on_image))
    assert not replica.running


def test_generate_continues_an_interrupted_list(sd_ort: Callable[..., Any], tmp_path: Path, one_thread: None) -> None:
    folder, out, prompts = tiny_pipeline.write(tmp_path / "toy"), tmp_path / "out", tmp_path / "list.txt"
    prompts.write_text("one\ntwo\nthree\n")
    command = ["generate", "--prompts", prompts, "--model", folder, "--steps", 2, "--out", out, "--batch", 2]
    command += ["--provider", "cpu"]
    code, stdout, _ = sd_ort(*command)
    names = ["00001-one-0.png", "00002-two-1.png", "00003-three-2.png"]
    assert (code, [Path(line).name for line in stdout.split()]) == (0, names)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / names[1]).unlink()
    code, stdout, err = sd_ort(*command)
    assert (code, [Path(line).name for line in stdout.split()]) == (0, names[1:2])
    assert "2 of 3 images are there already" in err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert sd_ort(*command)[1] == ""
    code, _, err = sd_ort(*command, "--steps", 3)
    assert (code, "another image (its steps is '2')" in err) == (5, True)
    for invalid in (["a prompt"], ["--strength", 0.5], ["--out", tmp_path / "a.png"], ["--gpus", 2]):
        code, _, err = sd_ort(*command, *invalid)
        assert (code in (2, 3), err.strip().count("\n")) == (True, 0), err
    assert sd_ort("generate", "--model", folder)[0] == 2
