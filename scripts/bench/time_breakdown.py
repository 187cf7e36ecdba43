#!/usr/bin/env python3
"""Where the time of the plain call goes, on the host and on the device.

    where_time_goes.py FOLDER --provider cuda --steps 50 --side 512 --out results/default_pipeline/where_sd15.json

Of a process: seconds of imports, of every session and of every first run over buffers (with the capture), up to the
first image. Of a warm image: when, after the call began, the first run is queued and the first of the UNet, when all is
queued and when the last one is waited for; what each part of an image takes by itself, waited for, and what the parts
of a step take queued; and which Python functions take longest. All in milliseconds.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import cProfile  # noqa: E402
import json  # noqa: E402
import pstats  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

PROMPT = "a red circle left of a small blue square on a white background"
Record = tuple[str, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from sd_ort import StableDiffusionPipeline

    found: dict[str, Any] = {}
    records: list[Record] = []
    imported = time.perf_counter()
    loading = cProfile.Profile()
    with watched(records):
        pipeline = loading.runcall(
            StableDiffusionPipeline.from_pretrained, options.folder, options.provider, device_loop=True
        )
        loaded = time.perf_counter()

        def draw() -> None:
            size = {"height": options.side, "width": options.side}
            pipeline(PROMPT, **size, num_inference_steps=options.steps, generator=0, progress=False)

        draw()
        drawn = time.perf_counter()
        found["process"] = {"imports": imported - STARTED, "load": loaded - imported, "first image": drawn - loaded}
        found["process"] = {name: 1e3 * seconds for name, seconds in found["process"].items()}
        found["first"] = [[name, 1e3 * (start - STARTED), 1e3 * took] for name, start, took in records if took > 2e-3]
        draw()
        found["warm"] = [of_image(draw, records) for _ in range(options.rounds)]
    found["parts"] = of_parts(pipeline)
    profile = cProfile.Profile()
    profile.runcall(draw)
    found["python"] = {"loading": longest(loading, 30), "an image": longest(profile, 60)}
    show(found)
    if options.out:
        from sd_ort.core.files import write_text
        from sd_ort.runtime import machine

        where = {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit()}
        write_text(options.out, json.dumps({**where, **found}, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    print("process, ms:", {name: round(took) for name, took in found["process"].items()})
    for name, start, took in found["first"]:
        print(f"  {start:8.0f} {took:8.1f}  {name}")
    for row in found["warm"]:
        print("warm image, ms:", {name: round(took, 2) for name, took in row.items()})
    for name, took in found["parts"].items():
        print(f"  {took:8.3f}  {name}")
    for what, rows in found["python"].items():
        print(f"Python of {what}, ms: calls, own, with what it calls")
        for name, calls, own, whole in rows:
            print(f"  {calls:6} {own:8.2f} {whole:8.2f}  {name}")


def longest(profile: cProfile.Profile, count: int) -> list[list[Any]]:
    """The functions that take longest, with what they call: name, calls, milliseconds by themselves and in all."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [[f"{Path(key[0]).name}:{key[2]}", row[1], 1e3 * row[2], 1e3 * row[3]] for key, row in stats.items()]
    return sorted(rows, key=lambda row: -row[3])[:count]


@contextmanager
def watched(records: list[Record]) -> Iterator[None]:
    """Record sessions that are opened, and first and later runs: name, start, seconds."""
    import onnxruntime

    from sd_ort.runtime import gpu_graphs

    runs: Any = gpu_graphs.BoundShapes
    session, make, run = onnxruntime.InferenceSession, runs.__init__, runs.run

    def noted(name: Callable[..., str], function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            made = function(*given, **more)
            records.append((name(*given), start, time.perf_counter() - start))
            return made

        return call

    def outputs(bound: Any, *_: Any) -> str:
        return ", ".join(sorted(value.name for value in bound.session.get_outputs())[:2])

    def opened(source: Any, *_: Any) -> str:
        return f"session {len(source)} bytes" if isinstance(source, bytes) else f"session {Path(source).parent.name}"

    onnxruntime.InferenceSession = noted(opened, session)
    runs.__init__ = noted(lambda b, s, *_: "bind " + outputs(b), make)
    runs.run = noted(lambda b, *_: "run " + outputs(b), run)
    try:
        yield
    finally:
        onnxruntime.InferenceSession = session
        runs.__init__, runs.run = make, run


def of_image(draw: Callable[[], None], records: list[Record]) -> dict[str, float]:
    """Milliseconds from the beginning of a call to what happens in it."""
    records.clear()
    start = time.perf_counter()
    draw()
    end = time.perf_counter()
    runs = [record for record in records if record[0].startswith("run ")]
    unet = [record for record in runs if record[0] == "run out_sample"]
    found = {"first run queued": runs[0][1], "UNet first queued": unet[0][1], "UNet last queued": unet[-1][1],
             "last run queued": runs[-1][1], "last run returned": sum(runs[-1][1:]), "image": end}  # fmt: skip
    return {name: 1e3 * (when - start) for name, when in found.items()}


def of_parts(pipeline: Any) -> dict[str, float]:
    """What each bound part takes waited for, and a step's parts queued, as many as there are steps, up to 50."""
    found: dict[str, float] = {}
    buffers = next(reversed(pipeline.loop.kept.values()))
    steps = buffers.steps[1]
    stream, count = pipeline.loop.models.stream, min(50, len(steps.schedule.timesteps))
    named: list[tuple[str, Any]] = [(f"text {i}", part) for i, part in enumerate(buffers.texts.parts)]
    named += [(f"before {i}", part) for i, part in enumerate(steps.before)]
    named += [(f"step {i}", part) for i, part in enumerate(steps.every)]
    named += [(f"end {i}", part) for part_list in buffers.ends.values() for i, part in enumerate(part_list)]
    first = steps.before[-1].run  # counts the steps from 0 again
    with pipeline.loop.models.lock:
        for name, part in named:
            label = f"{name}: {', '.join(list(part.outputs)[:3])}"
            found[f"{label}, waited for"] = each(first, part.run)
            if stream is not None and not name.startswith("end"):
                found[f"{label}, queued, each of {count}"] = queued(first, [part], count, stream)
        if stream is not None:
            found[f"a whole step queued, each of {count}"] = queued(first, list(steps.every), count, stream)
    return found


def each(first: Callable[[], Any], run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(7):
        first()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)


def queued(first: Callable[[], Any], parts: list[Any], count: int, stream: Any) -> float:
    first()
    stream.reserve(2)
    stream.record(0)
    for _ in range(count):
        for part in parts:
            part.run(False)
    stream.record(1)
    stream.wait(1)
    return 1e3 * float(stream.seconds(0, 1)) / count


if __name__ == "__main__":
    main()
