"""Distributes queued images to replicas in batches, and restarts replicas that die.

An idle replica takes the image that waits longest and others with the same settings. The images of a replica that died
are generated again, one at a time, since one of them may have ended the replica.

Batches have few sizes: a size that is new to a replica is tuned, compiled or captured first, which takes longer than an
image may wait.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Protocol

from sd_ort.core.errors import SdOrtError, describe_error
from sd_ort.serving.image_jobs import GenerationFailed, ImageJob, ModelInfo, ReplicaDied

log = logging.getLogger("sd_ort")
MAX_ATTEMPTS = 3  # failed batches of one image
LIVENESS_INTERVAL_S = 1.0  # between two checks whether an idle replica is alive
MAX_RESTART_DELAY_S = 30.0  # between two attempts to start a replica


class ReplicaProcess(Protocol):
    """Interface of a process with its own pipeline."""

    name: str

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises SdOrtError or ReplicaDied."""

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        """Return the PNG files of jobs with equal settings. Raises ReplicaDied, or SdOrtError on failure."""

    def stop(self) -> None:
        """End the process, whatever it does."""

    def is_alive(self) -> bool:
        """Return whether the started process exists."""


class QueueFull(SdOrtError):
    """The queue has no room for the images of a request."""


class ServerStopped(SdOrtError):
    """The server ends before the images of a request are generated."""

    def __init__(self) -> None:
        super().__init__("The server is being stopped: try again later.")


@dataclass
class QueuedImage:
    """An image that waits or is being generated. done: future of its PNG file. attempts: failed batches with it."""

    job: ImageJob
    done: asyncio.Future[bytes]
    attempts: int = 0


@dataclass
class Counts:
    """Generated images and batches, and restarts of replicas."""

    images: int = 0
    batches: int = 0
    restarts: int = 0


def batch_sizes(batch: int) -> list[int]:
    """Return the batch sizes to warm up: powers of two up to `batch`, and `batch`."""
    return [*(1 << power for power in range((batch - 1).bit_length())), batch]


def largest_size(sizes: Sequence[int], count: int) -> int:
    """Return the largest of the sorted `sizes` for `count` images; the smallest size is 1."""
    return sizes[bisect_right(sizes, count) - 1]


@dataclass
class Dispatcher:
    """Distributes images to replicas, within one event loop.

    batch: the maximum number of images in a batch. queue: the maximum number of waiting images; None for no limit.
    timeout: seconds after which a replica that generates or loads counts as dead. sizes: the sizes of batches, sorted,
    from 1 to `batch`; by default `batch_sizes`.
    """

    replicas: Sequence[ReplicaProcess]
    batch: int = 4
    queue: int | None = None
    timeout: float = 600.0
    counts: Counts = field(default_factory=Counts)
    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.sizes = self.sizes or batch_sizes(self.batch)
        self.waiting: deque[QueuedImage] = deque()
        self.states = ["starting"] * len(self.replicas)  # then "idle", "drawing" or "restarting"
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def ready(self) -> int:
        """The number of replicas that are idle or generating."""
        return sum(state in ("idle", "drawing") for state in self.states)

    async def start(self) -> ModelInfo:
        """Start all replicas and return the first one's model. Raises SdOrtError if a replica does not start."""
        loads = [asyncio.ensure_future(self._load(replica)) for replica in self.replicas]
        try:
            models = await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
        self._tasks = [asyncio.create_task(self._serve_replica(index)) for index in range(len(self.replicas))]
        return models[0]

    async def warm_up(self, jobs: Sequence[ImageJob]) -> None:
        """Let each replica generate a batch of each size, of `jobs`, at least one, over and over.

        Raises SdOrtError or ReplicaDied.
        """
        for size in self.sizes:
            some = list(islice(cycle(jobs), size))
            await asyncio.gather(*(replica.generate(some) for replica in self.replicas))

    def submit(self, jobs: Sequence[ImageJob]) -> list[asyncio.Future[bytes]]:
        """Queue images and return the futures of their PNG files, which may raise SdOrtError.

        Cancelling a future removes its image from the queue. Raises QueueFull and queues none if too many would wait,
        and ServerStopped after `close`.
        """
        if self._closed:
            raise ServerStopped
        if self.queue is not None and len(self.waiting) + len(jobs) > self.queue:
            raise QueueFull(f"{len(self.waiting)} of at most {self.queue} images are waiting: try again later.")
        loop = asyncio.get_running_loop()
        images = [QueuedImage(job, loop.create_future()) for job in jobs]
        self.waiting.extend(images)
        self._arrived.set()
        return [image.done for image in images]

    def close(self) -> None:
        """Stop the replicas and fail the images that are not generated."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for replica in self.replicas:
            replica.stop()
        while self.waiting:
            fail(self.waiting.popleft(), ServerStopped())

    async def _load(self, replica: ReplicaProcess) -> ModelInfo:
        try:
            async with asyncio.timeout(self.timeout):
                return await replica.start()
        except TimeoutError:
            raise SdOrtError(f"Replica {replica.name} did not load within {self.timeout:g} seconds.") from None
        except ReplicaDied as error:
            raise SdOrtError(f"Replica {replica.name} ended while it loaded: {error}") from None

    async def _serve_replica(self, index: int) -> None:
        """Let one replica generate batches until the task is cancelled, and restart it whenever it dies."""
        replica = self.replicas[index]
        while True:
            self.states[index] = "idle"
            batch = await self._next_batch()
            self.states[index] = "drawing"
            try:
                if batch:
                    alive = await self._generate(replica, batch)
                elif not (alive := replica.is_alive()):
                    log.warning("replica %s died and is restarted.", replica.name)
            except asyncio.CancelledError:
                for image in batch:
                    fail(image, ServerStopped())
                raise
            if not alive:
                self.states[index] = "restarting"
                self.counts.restarts += 1
                await self._restart(replica)

    async def _next_batch(self) -> list[QueuedImage]:
        """Return the images of the next batch, or [] if none arrives within LIVENESS_INTERVAL_S seconds."""
        while True:
            while self.waiting and self.waiting[0].done.done():
                self.waiting.popleft()
            if self.waiting:
                break
            self._arrived.clear()
            try:
                async with asyncio.timeout(LIVENESS_INTERVAL_S):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        first = self.waiting[0]
        batch = [first]
        if not first.attempts:
            idle = self.states.count("idle")  # includes this replica; the idle ones share the images evenly
            batch = list(islice(filter(lambda image: self._can_batch(image, first), self.waiting), self.batch * idle))
            batch = batch[: largest_size(self.sizes, -(-len(batch) // idle))]
        ids = {id(image) for image in batch}
        self.waiting = deque(image for image in self.waiting if id(image) not in ids)
        return batch

    @staticmethod
    def _can_batch(image: QueuedImage, first: QueuedImage) -> bool:
        return image.job.settings == first.job.settings and not image.attempts and not image.done.done()

    async def _generate(self, replica: ReplicaProcess, batch: list[QueuedImage]) -> bool:
        """Generate a batch. Return whether the replica is still alive."""
        try:
            async with asyncio.timeout(self.timeout):
                files = await replica.generate([image.job for image in batch])
        except (ReplicaDied, TimeoutError) as error:
            reason = f"no answer within {self.timeout:g} seconds" if isinstance(error, TimeoutError) else str(error)
            log.warning("replica %s died and is restarted: %s", replica.name, reason)
            self._requeue(batch, GenerationFailed(f"{MAX_ATTEMPTS} replicas died while they generated it: {reason}"))
            return False
        except Exception as error:
            line, _ = describe_error(error)
            if len(batch) == 1:
                fail(batch[0], error if isinstance(error, SdOrtError) else GenerationFailed(line))
            else:  # one image may have caused the error
                self._requeue(batch, GenerationFailed(line))
            return True
        self.counts.batches += 1
        self.counts.images += len(batch)
        for image, file in zip(batch, files, strict=True):
            if not image.done.done():
                image.done.set_result(file)
        return True

    def _requeue(self, batch: list[QueuedImage], error: GenerationFailed) -> None:
        """Queue images again, alone and before all others. `error` is for images without attempts left."""
        for image in reversed(batch):
            image.attempts += 1
            if image.attempts >= MAX_ATTEMPTS:
                fail(image, error)
            else:
                self.waiting.appendleft(image)
        self._arrived.set()

    async def _restart(self, replica: ReplicaProcess) -> None:
        """Start a replica again; retry until it loads."""
        delay = 0.0
        while True:
            replica.stop()
            try:
                await self._load(replica)
                return
            except SdOrtError as error:
                delay = min(2 * delay + 1, MAX_RESTART_DELAY_S)
                log.warning("%s Retrying in %g s.", error, delay)
                await asyncio.sleep(delay)


def fail(image: QueuedImage, error: SdOrtError) -> None:
    """Set the error of an image, unless its future is done."""
    if not image.done.done():
        image.done.set_exception(error)
