"""Replicas of a pipeline folder as what MLPerf drives: those of `sd-ort serve` and its dispatcher, without HTTP."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from sd_ort.benchmark.engines.interface import Engine, Settings
from sd_ort.core.errors import InputError
from sd_ort.serving import replica
from sd_ort.serving.dispatch import Dispatcher, ReplicaProcess
from sd_ort.serving.image_jobs import BatchSettings, ImageJob
from sd_ort.serving.ray_replicas import RayCluster


def openings(engine: Engine, settings: Settings, gpus: int | None, count: int | None) -> list[replica.ReplicaConfig]:
    """What the replicas of an engine load: one on each of `gpus`, else `count` of them.

    Raises InputError for an engine that is no pipeline folder, or as `replica.replica_configs`.
    """
    if engine.engine != "onnxruntime":
        raise InputError(f"replicas draw with pipeline folders, not {engine.label}: leave it out of --engines.")
    ours = engine.stage == "optimize" or engine.make[:1] == ("ours",)
    loading = {
        "provider": settings.provider,
        "graph": True if engine.graph else None if ours else False,
        "tuning": settings.tuning,
        "allow_fallback": settings.allow_fallback,
        "library": engine.library,
    }
    config = replica.ReplicaConfig(Path(engine.directory), loading)
    return replica.replica_configs(config, gpus, count, settings.threads)


class Replicas:
    """Draws prompts by number on replicas, and keeps the last image of each; `callers` threads keep them all busy.

    `batch`: images that a replica draws at once, at most. Used in a `with` block.
    """

    def __init__(
        self, cluster: AbstractContextManager[Any], prompts: Sequence[str], settings: Settings, batch: int
    ) -> None:
        """`cluster`: in its block it has `replicas` (see `dispatch.ReplicaProcess`), not yet loaded."""
        self.cluster, self.prompts, self.settings, self.batch = cluster, prompts, settings, batch
        self.images: dict[int, np.ndarray] = {}
        self.drawn = (0, 0)  # pictures and batches that `mean_batch` has told of
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        """Start and load the replicas. Raises SdOrtError when one cannot."""
        found: Sequence[ReplicaProcess] = self.cluster.__enter__().replicas
        self.dispatcher = Dispatcher(found, self.batch)
        self.callers = 2 * self.batch * len(found)  # as many images wait as are drawn
        self.thread.start()
        try:
            self._result(self.dispatcher.start())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        async def closed() -> None:
            self.dispatcher.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*left, return_exceptions=True)

        self._result(closed())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.cluster.__exit__(kind, value, at)

    def warm_up(self) -> None:
        """Let each replica draw one image, and the largest batch."""

        async def drawn() -> None:
            for count in dict.fromkeys((1, self.batch)):
                pictures = [self._picture(i % len(self.prompts)) for i in range(count)]
                await asyncio.gather(*(each.generate(pictures) for each in self.dispatcher.replicas))

        self._result(drawn())

    def __call__(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Draw prompts, uint8 images (H, W, 3); threads may call at once. Raises SdOrtError where none could."""

        async def drawn() -> list[bytes]:
            return await asyncio.gather(*self.dispatcher.submit([self._picture(number) for number in numbers]))

        images = [_pixels(file) for file in self._result(drawn())]
        self.images |= dict(zip(numbers, images, strict=True))
        return images

    def mean_batch(self) -> float:
        """Images a batch of what was drawn since this was last asked."""
        before, counts = self.drawn, self.dispatcher.counts
        self.drawn = counts.images, counts.batches
        return (self.drawn[0] - before[0]) / max(1, self.drawn[1] - before[1])

    def _picture(self, number: int) -> ImageJob:
        asked = self.settings
        drawing = BatchSettings(asked.width, asked.height, asked.steps, asked.guidance)
        return ImageJob(self.prompts[number], "", asked.seed + (0 if asked.one_latent else number), drawing)

    def _result(self, work: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result()


def on_ray(engine: Engine, prompts: Sequence[str], settings: Settings, gpus: int | None, count: int | None) -> Replicas:
    """Replicas in Ray's actors, which `with` starts. Raises InputError as `openings`, or when Ray is not installed."""
    return Replicas(RayCluster(openings(engine, settings, gpus, count)), prompts, settings, max(settings.batches))


def _pixels(file: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
