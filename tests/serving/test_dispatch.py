"""The dispatcher: batches, replicas that die, failures and full queues, with fake replicas in this process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.serving import dispatch
from sd_ort.serving.dispatch import Dispatcher, QueueFull, ServerStopped
from sd_ort.serving.image_jobs import BatchSettings, GenerationFailed, ImageJob, ModelInfo, ReplicaDied

MODEL = ModelInfo(default_size=64, size_multiple=8, steps=25, guidance=7.5, train_timesteps=1000)
SMALL, LARGE = BatchSettings(64, 64, 2, 7.5), BatchSettings(128, 128, 2, 7.5)


@dataclass
class FakeReplica:
    """A replica that generates when `gate` is set. start_errors: raised by the next starts.

    The prompt "deadly" ends the replica, "poison" raises InputError, "bug" another error. Other files are the prompts.
    """

    name: str = "fake"
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[list[str]] = field(default_factory=list)
    start_errors: list[Exception] = field(default_factory=list)
    starts: int = 0
    running: bool = False

    async def start(self) -> ModelInfo:
        self.starts += 1
        if self.start_errors:
            raise self.start_errors.pop(0)
        self.running = True
        return MODEL

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        prompts = [job.prompt for job in jobs]
        self.batches.append(prompts)
        await self.gate.wait()
        if "deadly" in prompts:
            self.running = False
            raise ReplicaDied("gone")
        if "poison" in prompts:
            raise InputError("that is no prompt")
        if "bug" in prompts:
            raise ZeroDivisionError
        return [prompt.encode() for prompt in prompts]

    def stop(self) -> None:
        self.running = False

    def is_alive(self) -> bool:
        return self.running


def jobs(*prompts: str, settings: BatchSettings = SMALL) -> list[ImageJob]:
    return [ImageJob(prompt, "", seed, settings) for seed, prompt in enumerate(prompts)]


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop, a minute at most."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


async def run_tasks() -> None:
    """Run every task until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@in_event_loop
async def test_waiting_images_with_equal_settings_share_a_batch() -> None:
    replica = FakeReplica()
    dispatcher = Dispatcher([replica], batch=3)
    assert await dispatcher.start() == MODEL
    first = dispatcher.submit(jobs("a"))
    await run_tasks()
    rest = [
        *dispatcher.submit(jobs("b", settings=LARGE)),
        *dispatcher.submit(jobs("c", "d", "e", "f")),
        *dispatcher.submit(jobs("g", settings=LARGE)),
    ]
    replica.gate.set()
    assert await asyncio.gather(*first, *rest) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    assert replica.batches == [["a"], ["b", "g"], ["c", "d", "e"], ["f"]]
    assert (dispatcher.counts.images, dispatcher.counts.batches) == (7, 4)
    dispatcher.close()


@in_event_loop
async def test_idle_replicas_share_a_request() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    dispatcher = Dispatcher(replicas, batch=4)
    await dispatcher.start()
    await run_tasks()
    done = dispatcher.submit(jobs("a", "b", "c", "d"))
    await run_tasks()
    assert [replica.batches for replica in replicas] == [[["a", "b"]], [["c", "d"]]]
    assert dispatcher.ready == 2
    for replica in replicas:
        replica.gate.set()
    await asyncio.gather(*done)
    dispatcher.close()


@pytest.mark.parametrize(
    ("batch", "sizes", "expected"),
    [
        (6, (), [["a", "b", "c", "d"], ["e"]]),
        (5, (), [["a", "b", "c", "d", "e"]]),
        (4, (1, 3, 4), [["a", "b", "c", "d"], ["e"]]),
        (3, (1, 3), [["a", "b", "c"], ["d"], ["e"]]),
    ],
)
@in_event_loop
async def test_batches_have_sizes_that_were_warmed_up(batch: int, sizes: Sequence[int], expected: list) -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch, sizes=sizes)
    await dispatcher.start()
    replica.gate.set()
    await dispatcher.warm_up(jobs("u", "v"))
    warm = [len(each) for each in replica.batches]
    assert warm == list(sizes or dispatch.batch_sizes(batch))
    await asyncio.gather(*dispatcher.submit(jobs("a", "b", "c", "d", "e")))
    assert replica.batches[len(warm) :] == expected
    dispatcher.close()


def test_sizes_of_batches() -> None:
    assert [dispatch.batch_sizes(batch) for batch in (1, 2, 3, 4, 7, 8)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 7], [1, 2, 4, 8]
    ]  # fmt: skip


@in_event_loop
async def test_images_of_a_dead_replica_are_generated_again_alone() -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch=3)
    replica.gate.set()
    await dispatcher.start()
    deadly, *others = dispatcher.submit(jobs("deadly", "a", "b"))
    assert await asyncio.gather(*others) == [b"a", b"b"]
    with pytest.raises(GenerationFailed, match="3 replicas died"):
        await deadly
    assert replica.batches == [["deadly", "a", "b"], ["deadly"], ["deadly"], ["a"], ["b"]]
    assert replica.starts == 4
    assert dispatcher.counts.restarts == 3
    assert await dispatcher.submit(jobs("c"))[0] == b"c"
    dispatcher.close()


@in_event_loop
async def test_one_image_that_fails_does_not_fail_the_others() -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch=4)
    replica.gate.set()
    await dispatcher.start()
    a, poison, bug, b = dispatcher.submit(jobs("a", "poison", "bug", "b"))
    assert await asyncio.gather(a, b) == [b"a", b"b"]
    with pytest.raises(InputError, match="that is no prompt"):
        await poison
    with pytest.raises(GenerationFailed, match="ZeroDivisionError"):
        await bug
    assert dispatcher.counts.restarts == 0
    dispatcher.close()


@in_event_loop
async def test_a_full_queue_rejects_the_whole_request() -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch=1, queue=3)
    await dispatcher.start()
    done = dispatcher.submit(jobs("a"))
    await run_tasks()
    done += dispatcher.submit(jobs("b", "c"))
    with pytest.raises(QueueFull, match="try again later"):
        dispatcher.submit(jobs("d", "e"))
    done += dispatcher.submit(jobs("f"))
    replica.gate.set()
    assert await asyncio.gather(*done) == [b"a", b"b", b"c", b"f"]
    dispatcher.close()


@in_event_loop
async def test_cancelled_images_are_not_generated() -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch=2)
    await dispatcher.start()
    first = dispatcher.submit(jobs("a"))
    await run_tasks()
    b, c, d = dispatcher.submit(jobs("b", "c", "d"))
    b.cancel()
    c.cancel()
    replica.gate.set()
    assert await asyncio.gather(*first, d) == [b"a", b"d"]
    assert replica.batches == [["a"], ["d"]]
    dispatcher.close()


@in_event_loop
async def test_a_replica_that_does_not_answer_is_restarted() -> None:
    stuck, other = FakeReplica("stuck"), FakeReplica("other")
    other.gate.set()
    dispatcher = Dispatcher([stuck, other], batch=1, timeout=0.05)
    await dispatcher.start()
    await run_tasks()
    stuck.start_errors = [SdOrtError("no memory.")]
    assert await asyncio.gather(*dispatcher.submit(jobs("a", "b"))) == [b"a", b"b"]
    assert stuck.batches == [["a"]]
    dispatcher.close()


@in_event_loop
async def test_an_idle_replica_that_died_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LIVENESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(dispatch, "MAX_RESTART_DELAY_S", 0.0)
    dispatcher = Dispatcher([replica := FakeReplica()])
    await dispatcher.start()
    replica.gate.set()
    replica.running = False
    replica.start_errors = [SdOrtError("no memory now."), ReplicaDied("again")]
    while replica.starts < 4:
        await asyncio.sleep(0)
    assert await dispatcher.submit(jobs("a"))[0] == b"a"
    dispatcher.close()


@in_event_loop
async def test_a_model_that_does_not_load_fails_the_start() -> None:
    dispatcher = Dispatcher([FakeReplica(), FakeReplica(start_errors=[InputError("it is broken")])])
    with pytest.raises(InputError, match="it is broken"):
        await dispatcher.start()
    dispatcher = Dispatcher([FakeReplica("2", start_errors=[ReplicaDied("out of memory")])])
    with pytest.raises(SdOrtError, match="Replica 2 ended while it loaded: out of memory"):
        await dispatcher.start()


@in_event_loop
async def test_closing_fails_waiting_and_running_images() -> None:
    dispatcher = Dispatcher([replica := FakeReplica()], batch=1)
    await dispatcher.start()
    done = dispatcher.submit(jobs("a", "b"))
    await run_tasks()
    dispatcher.close()
    results = await asyncio.gather(*done, return_exceptions=True)
    assert [type(result) for result in results] == [ServerStopped, ServerStopped]
    with pytest.raises(ServerStopped):
        dispatcher.submit(jobs("c"))
    assert not replica.running
