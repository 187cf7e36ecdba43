"""LoadGen backend that generates on replicas of a pipeline folder: those of `sd-ort serve`, without HTTP."""

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

from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.core.errors import InputError
from sd_ort.serving import replica
from sd_ort.serving.dispatch import Dispatcher, ReplicaProcess
from sd_ort.serving.image_jobs import BatchSettings, ImageJob
from sd_ort.serving.ray_replicas import RayCluster


def replica_configs(
    engine: Engine, settings: BenchmarkSettings, gpus: int | None, count: int | None
) -> list[replica.ReplicaConfig]:
    """Return the configurations of an engine's replicas: one on each of `gpus` GPUs, else `count` of them.

    Raises:
        InputError: if the engine is no pipeline folder, or as `serving.replica.replica_configs`.
    """
    if engine.engine != "onnxruntime":
        raise InputError(f"replicas run pipeline folders, not {engine.label}: leave it out of --engines.")
    options = {
        "provider": settings.provider,
        "graph": engine.pipeline_graph,
        "tuning": settings.tuning,
        "allow_fallback": settings.allow_fallback,
        "library": engine.library,
    }
    config = replica.ReplicaConfig(Path(engine.directory), options)
    return replica.replica_configs(config, gpus, count, settings.threads)


class ReplicaBackend:
    """Generates prompts by index on replicas; `images`: the last image of each prompt. A context manager.

    A replica generates 1 image or as many of `sizes` per call. `callers`: threads that keep all replicas busy.
    """

    def __init__(
        self,
        cluster: AbstractContextManager[Any],
        prompts: Sequence[str],
        settings: BenchmarkSettings,
        sizes: Sequence[int],
    ) -> None:
        """`cluster`: on entry it has `replicas` (see `dispatch.ReplicaProcess`), not loaded yet."""
        self.cluster, self.prompts, self.settings = cluster, prompts, settings
        self.sizes = sorted({1, *sizes})
        self.batch = self.sizes[-1]
        self.images: dict[int, np.ndarray] = {}
        self.counted = (0, 0)  # images and batches at the last call of mean_batch
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        """Start and load the replicas. Raises SdOrtError if one fails."""
        replicas: Sequence[ReplicaProcess] = self.cluster.__enter__().replicas
        self.dispatcher = Dispatcher(replicas, self.batch, sizes=self.sizes)
        self.callers = 2 * self.batch * len(replicas)  # as many images wait as are in work
        self.thread.start()
        try:
            self._result(self.dispatcher.start())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        async def close() -> None:
            self.dispatcher.close()
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*pending, return_exceptions=True)

        self._result(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.cluster.__exit__(kind, value, at)

    def warm_up(self) -> None:
        """Let each replica generate a batch of each size."""
        jobs = [self._job(index) for index in range(min(self.batch, len(self.prompts)))]
        self._result(self.dispatcher.warm_up(jobs))

    def __call__(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Generate uint8 images (H, W, 3); thread-safe. Raises SdOrtError if no replica could."""

        async def generate() -> list[bytes]:
            return await asyncio.gather(*self.dispatcher.submit([self._job(index) for index in indices]))

        images = [_pixels(file) for file in self._result(generate())]
        self.images |= dict(zip(indices, images, strict=True))
        return images

    def mean_batch(self) -> float:
        """Return the mean batch size since the last call."""
        before, counts = self.counted, self.dispatcher.counts
        self.counted = counts.images, counts.batches
        return (self.counted[0] - before[0]) / max(1, self.counted[1] - before[1])

    def _job(self, index: int) -> ImageJob:
        settings = self.settings
        batch = BatchSettings(settings.width, settings.height, settings.steps, settings.guidance)
        return ImageJob(self.prompts[index], "", settings.seed + (0 if settings.one_latent else index), batch)

    def _result(self, work: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result()


def on_ray(
    engine: Engine, prompts: Sequence[str], settings: BenchmarkSettings, gpus: int | None, count: int | None
) -> ReplicaBackend:
    """Return a backend of Ray actors. Raises InputError as `replica_configs`, or if Ray is not installed."""
    cluster = RayCluster(replica_configs(engine, settings, gpus, count))
    return ReplicaBackend(cluster, prompts, settings, settings.batches)


def _pixels(file: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
