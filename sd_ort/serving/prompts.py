"""A list of prompts drawn by several replicas, or by this process: files that are there already are not drawn again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.paths import words_of
from sd_ort.pipeline.arguments import check_seeds, check_text
from sd_ort.serving.dispatch import Dispatcher
from sd_ort.serving.pictures import Picture, Settings
from sd_ort.serving.replica import Opening, Replica

FILE_LIMIT = 64 << 20  # bytes of a list


@dataclass(frozen=True)
class Task:
    """A picture and the file that it becomes."""

    picture: Picture
    path: Path


Done = Callable[[Task, bytes], object]  # called with each PNG file, in the order in which they are drawn


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text file, one a line; empty lines are none. Raises InputError for a file that is no list."""
    try:
        if path.stat().st_size > FILE_LIMIT:
            raise InputError(f"{path} has more than {FILE_LIMIT >> 20} MiB: draw it in parts.")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8: give one prompt a line.") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"{path} holds no prompt: give one a line.")
    check_text(prompts)
    return prompts


def tasks(prompts: Sequence[str], negative: str, settings: Settings, first: int, images: int, out: Path) -> list[Task]:
    """`images` pictures of each prompt, of seeds that count up from `first`, and their files in the folder `out`.

    Raises InputError for a file in the folder's place, or seeds that there are not.
    """
    if out.suffix.lower() == ".png" or out.is_file():
        raise InputError(f"--out {out} is one file: give a folder for several images.")
    check_seeds(first, len(prompts) * images)
    seeds = count(first)
    found = []
    for number, prompt in enumerate(prompts, 1):
        words = words_of(prompt)
        for seed in islice(seeds, images):
            found.append(Task(Picture(prompt, negative, seed, settings), out / f"{number:05d}-{words}-{seed}.png"))
    return found


def left(asked: Sequence[Task], text: Mapping[str, str]) -> list[Task]:
    """Those whose files are not there yet. `text`: what the files say besides how they were drawn.

    Raises OutputError for a file that was drawn otherwise.
    """
    from sd_ort.pipeline.png import read_png_text

    missing = []
    for task in asked:
        if not task.path.exists():
            missing.append(task)
            continue
        there, wanted = read_png_text(task.path), {**task.picture.text(), **text}
        if other := next((key for key, value in wanted.items() if there.get(key) != value), None):
            reason = f"{other} is {there[other]!r} there" if other in there else f"it does not say its {other}"
            raise OutputError(f"{task.path} is another image ({reason}): choose another --out or pass --overwrite.")
    return missing


def draw_here(opening: Opening, asked: Sequence[Task], batch: int, done: Done) -> None:
    """Draw in this process, without Ray. Raises SdOrtError at the first picture that cannot be drawn."""
    replica = Replica(opening)
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        for task, file in zip(part, replica.draw([task.picture for task in part]), strict=True):
            done(task, file)


def draw_on_replicas(openings: Sequence[Opening], asked: Sequence[Task], batch: int, done: Done) -> None:
    """Draw on Ray's replicas. Raises SdOrtError at the first picture that cannot be drawn."""
    from sd_ort.serving.on_ray import Cluster

    with Cluster(openings) as cluster:
        asyncio.run(drawn(Dispatcher(cluster.replicas, batch), asked, done))


async def drawn(dispatcher: Dispatcher, asked: Sequence[Task], done: Done) -> None:
    """Draw on the dispatcher's replicas, which are ended. Raises SdOrtError as `draw_on_replicas`."""
    upcoming = iter(asked)

    async def ask() -> None:
        for task in upcoming:
            done(task, await dispatcher.submit([task.picture])[0])

    try:
        await dispatcher.start()
        # As many as are drawn and as many that wait, so that no replica does, however long the list is.
        await asyncio.gather(*(ask() for _ in range(2 * dispatcher.batch * len(dispatcher.replicas))))
    finally:
        dispatcher.close()
