"""Who draws what: pictures that wait, batches of those that fit together, replicas that die.

A replica that is free takes the picture that waits longest and those that share its settings. What a dead replica was
drawing is drawn again, each picture alone, since one of them may be what ended it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from sd_ort.core.errors import SdOrtError, explained
from sd_ort.serving.pictures import Model, NotDrawn, Picture, ReplicaDied

log = logging.getLogger("sd_ort")
ATTEMPTS = 3  # of a picture whose replica died
BEAT_s = 1.0  # between two looks at whether an idle replica is still there
PATIENCE_s = 30.0  # at most between two attempts to start a replica


class Replica(Protocol):
    """A process with a pipeline of its own."""

    name: str

    async def start(self) -> Model:
        """Begin the process and load the model. Raises SdOrtError when that cannot be."""

    async def draw(self, pictures: Sequence[Picture]) -> list[bytes]:
        """PNG files of pictures with equal settings. Raises ReplicaDied, or SdOrtError for what cannot be drawn."""

    def stop(self) -> None:
        """End the process, whatever it does."""

    def alive(self) -> bool:
        """Whether the process that was started is still there."""


class QueueFull(SdOrtError):
    """As many pictures wait as may: try again later."""


@dataclass
class Job:
    """A picture that waits or is drawn; `done` is its PNG file. `attempts`: replicas that it did not survive."""

    picture: Picture
    done: asyncio.Future[bytes]
    attempts: int = 0


@dataclass
class Counts:
    """What happened so far."""

    pictures: int = 0
    batches: int = 0
    restarts: int = 0


@dataclass
class Dispatcher:
    """Hands pictures to replicas. `batch`: pictures drawn at once; `queue`: pictures that may wait, None for all;
    `timeout`: seconds after which a replica that draws, or loads, counts as dead. Used within one event loop.
    """

    replicas: Sequence[Replica]
    batch: int = 4
    queue: int | None = None
    timeout: float = 600.0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.waiting: deque[Job] = deque()
        self.states = ["starting"] * len(self.replicas)  # then "idle", "drawing" or "restarting"
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> int:
        """Replicas that draw, or could."""
        return sum(state in ("idle", "drawing") for state in self.states)

    async def start(self) -> Model:
        """Start all replicas at once; what the first says of its model. Raises SdOrtError when one cannot start."""
        loads = [asyncio.ensure_future(self._load(replica)) for replica in self.replicas]
        try:
            models = await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
        self._tasks = [asyncio.create_task(self._work(place)) for place in range(len(self.replicas))]
        return models[0]

    def submit(self, pictures: Sequence[Picture]) -> list[asyncio.Future[bytes]]:
        """A PNG file for each picture, some time. Raises QueueFull, and takes none, when too many would wait.

        A future that is cancelled before its picture's turn comes leaves the queue. Others may raise SdOrtError.
        """
        if self.queue is not None and len(self.waiting) + len(pictures) > self.queue:
            raise QueueFull(f"{len(self.waiting)} images wait, and {self.queue} may: try again later.")
        loop = asyncio.get_running_loop()
        jobs = [Job(picture, loop.create_future()) for picture in pictures]
        self.waiting.extend(jobs)
        self._arrived.set()
        return [job.done for job in jobs]

    def close(self) -> None:
        """End replicas and fail what is not drawn."""
        for task in self._tasks:
            task.cancel()
        for replica in self.replicas:
            replica.stop()
        while self.waiting:
            fail(self.waiting.popleft(), NotDrawn("the server is being stopped."))

    async def _load(self, replica: Replica) -> Model:
        try:
            async with asyncio.timeout(self.timeout):
                return await replica.start()
        except TimeoutError:
            raise SdOrtError(f"replica {replica.name} has not loaded within {self.timeout:g} seconds.") from None
        except ReplicaDied as death:
            raise SdOrtError(f"replica {replica.name} ended while it loaded: {death}") from None

    async def _work(self, place: int) -> None:
        """Draw with one replica for as long as there is work, and bring it back when it dies."""
        replica = self.replicas[place]
        while True:
            self.states[place] = "idle"
            jobs = await self._take()
            self.states[place] = "drawing"
            try:
                if jobs:
                    alive = await self._draw(replica, jobs)
                elif not (alive := replica.alive()):
                    log.warning("replica %s died, and is started again.", replica.name)
            except asyncio.CancelledError:
                for job in jobs:
                    fail(job, NotDrawn("the server is being stopped."))
                raise
            if not alive:
                self.states[place] = "restarting"
                self.counts.restarts += 1
                await self._revive(replica)

    async def _take(self) -> list[Job]:
        """The next jobs of one batch; none when none came within BEAT_s seconds."""
        while True:
            while self.waiting and self.waiting[0].done.done():
                self.waiting.popleft()
            if self.waiting:
                break
            self._arrived.clear()
            try:
                async with asyncio.timeout(BEAT_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        first = self.waiting[0]
        taken = [first]
        if not first.attempts:
            free = self.states.count("idle")  # this one included: pictures are shared out, none is left idle
            taken = list(islice(filter(lambda job: self._fits(job, first), self.waiting), self.batch * free))
            taken = taken[: min(self.batch, -(-len(taken) // free))]
        chosen = {id(job) for job in taken}
        self.waiting = deque(job for job in self.waiting if id(job) not in chosen)
        return taken

    @staticmethod
    def _fits(job: Job, first: Job) -> bool:
        return job.picture.settings == first.picture.settings and not job.attempts and not job.done.done()

    async def _draw(self, replica: Replica, jobs: list[Job]) -> bool:
        """Draw a batch; False when the replica died of it."""
        try:
            async with asyncio.timeout(self.timeout):
                files = await replica.draw([job.picture for job in jobs])
        except (ReplicaDied, TimeoutError) as death:
            reason = f"no answer within {self.timeout:g} seconds" if isinstance(death, TimeoutError) else str(death)
            log.warning("replica %s died, and is started again: %s", replica.name, reason)
            self._again(jobs, NotDrawn(f"{ATTEMPTS} replicas died while they drew it: {reason}"))
            return False
        except Exception as error:
            line, _ = explained(error)
            if len(jobs) == 1:
                fail(jobs[0], error if isinstance(error, SdOrtError) else NotDrawn(line))
            else:  # one of them may be at fault
                self._again(jobs, NotDrawn(line))
            return True
        self.counts.batches += 1
        self.counts.pictures += len(jobs)
        for job, file in zip(jobs, files, strict=True):
            if not job.done.done():
                job.done.set_result(file)
        return True

    def _again(self, jobs: list[Job], error: NotDrawn) -> None:
        """Let pictures be drawn once more, alone and before all others; `error` for those that had all attempts."""
        for job in reversed(jobs):
            job.attempts += 1
            if job.attempts >= ATTEMPTS:
                fail(job, error)
            else:
                self.waiting.appendleft(job)
        self._arrived.set()

    async def _revive(self, replica: Replica) -> None:
        """Start a replica again, as often as it takes."""
        pause = 0.0
        while True:
            replica.stop()
            try:
                await self._load(replica)
                return
            except SdOrtError as error:
                pause = min(2 * pause + 1, PATIENCE_s)
                log.warning("%s It is tried again in %g s.", error, pause)
                await asyncio.sleep(pause)


def fail(job: Job, error: SdOrtError) -> None:
    """Give up a picture."""
    if not job.done.done():
        job.done.set_exception(error)
