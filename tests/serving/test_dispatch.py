"""Who draws what: batches, deaths, refusals and full queues, with replicas that are no processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.serving import dispatch
from sd_ort.serving.dispatch import Dispatcher, QueueFull
from sd_ort.serving.pictures import Model, NotDrawn, Picture, ReplicaDied, Settings

MODEL = Model(side=64, multiple=8, guidance=7.5, trained_steps=1000)
SMALL, LARGE = Settings(64, 64, 2, 7.5), Settings(128, 128, 2, 7.5)
# "deadly" ends whoever draws it, "poison" cannot be drawn; the others are their own files.


@dataclass
class Fake:
    """Draws when `gate` is open. `fails`: errors of the next starts."""

    name: str = "fake"
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[list[str]] = field(default_factory=list)
    fails: list[Exception] = field(default_factory=list)
    starts: int = 0
    living: bool = False

    async def start(self) -> Model:
        self.starts += 1
        if self.fails:
            raise self.fails.pop(0)
        self.living = True
        return MODEL

    async def draw(self, pictures: Sequence[Picture]) -> list[bytes]:
        prompts = [picture.prompt for picture in pictures]
        self.batches.append(prompts)
        await self.gate.wait()
        if "deadly" in prompts:
            self.living = False
            raise ReplicaDied("gone")
        if "poison" in prompts:
            raise InputError("that is no prompt")
        if "bug" in prompts:
            raise ZeroDivisionError
        return [prompt.encode() for prompt in prompts]

    def stop(self) -> None:
        self.living = False

    def alive(self) -> bool:
        return self.living


def pictures(*prompts: str, settings: Settings = SMALL) -> list[Picture]:
    return [Picture(prompt, "", seed, settings) for seed, prompt in enumerate(prompts)]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def settled() -> None:
    """Let every task go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_waits_is_drawn_together_if_it_fits() -> None:
    async def test() -> None:
        one = Fake()
        dispatcher = Dispatcher([one], batch=3)
        assert await dispatcher.start() == MODEL
        first = dispatcher.submit(pictures("a"))
        await settled()
        rest = [
            *dispatcher.submit(pictures("b", settings=LARGE)),
            *dispatcher.submit(pictures("c", "d", "e", "f")),
            *dispatcher.submit(pictures("g", settings=LARGE)),
        ]
        one.gate.set()
        assert await asyncio.gather(*first, *rest) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
        assert one.batches == [["a"], ["b", "g"], ["c", "d", "e"], ["f"]]
        assert (dispatcher.counts.pictures, dispatcher.counts.batches) == (7, 4)
        dispatcher.close()

    run(test)


def test_free_replicas_share_a_request() -> None:
    async def test() -> None:
        both = [Fake(), Fake()]
        dispatcher = Dispatcher(both, batch=4)
        await dispatcher.start()
        await settled()
        done = dispatcher.submit(pictures("a", "b", "c", "d"))
        await settled()
        assert [fake.batches for fake in both] == [[["a", "b"]], [["c", "d"]]]
        assert dispatcher.ready == 2
        for fake in both:
            fake.gate.set()
        await asyncio.gather(*done)
        dispatcher.close()

    run(test)


def test_what_a_dead_replica_drew_is_drawn_again_alone() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=4)
        one.gate.set()
        await dispatcher.start()
        deadly, *others = dispatcher.submit(pictures("deadly", "a", "b"))
        assert await asyncio.gather(*others) == [b"a", b"b"]
        with pytest.raises(NotDrawn, match="3 replicas died"):
            await deadly
        assert one.batches == [["deadly", "a", "b"], ["deadly"], ["deadly"], ["a"], ["b"]]
        assert one.starts == 4
        assert dispatcher.counts.restarts == 3
        assert await dispatcher.submit(pictures("c"))[0] == b"c"
        dispatcher.close()

    run(test)


def test_one_picture_that_cannot_be_drawn_leaves_the_others() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=4)
        one.gate.set()
        await dispatcher.start()
        a, poison, bug, b = dispatcher.submit(pictures("a", "poison", "bug", "b"))
        assert await asyncio.gather(a, b) == [b"a", b"b"]
        with pytest.raises(InputError, match="that is no prompt"):
            await poison
        with pytest.raises(NotDrawn, match="ZeroDivisionError"):
            await bug
        assert dispatcher.counts.restarts == 0
        dispatcher.close()

    run(test)


def test_a_full_queue_takes_nothing_of_a_request() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=1, queue=3)
        await dispatcher.start()
        done = dispatcher.submit(pictures("a"))
        await settled()
        done += dispatcher.submit(pictures("b", "c"))
        with pytest.raises(QueueFull, match="try again later"):
            dispatcher.submit(pictures("d", "e"))
        done += dispatcher.submit(pictures("f"))
        one.gate.set()
        assert await asyncio.gather(*done) == [b"a", b"b", b"c", b"f"]
        dispatcher.close()

    run(test)


def test_pictures_nobody_waits_for_are_not_drawn() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=2)
        await dispatcher.start()
        first = dispatcher.submit(pictures("a"))
        await settled()
        b, c, d = dispatcher.submit(pictures("b", "c", "d"))
        b.cancel()
        c.cancel()
        one.gate.set()
        assert await asyncio.gather(*first, d) == [b"a", b"d"]
        assert one.batches == [["a"], ["d"]]
        dispatcher.close()

    run(test)


def test_a_replica_that_does_not_answer_is_dead() -> None:
    async def test() -> None:
        stuck, other = Fake("stuck"), Fake("other")
        other.gate.set()
        dispatcher = Dispatcher([stuck, other], batch=1, timeout=0.05)
        await dispatcher.start()
        await settled()
        stuck.fails = [SdOrtError("no memory.")]
        assert await asyncio.gather(*dispatcher.submit(pictures("a", "b"))) == [b"a", b"b"]
        assert stuck.batches == [["a"]]
        dispatcher.close()

    run(test)


def test_one_that_died_without_work_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BEAT_s", 0.0)
    monkeypatch.setattr(dispatch, "PATIENCE_s", 0.0)

    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()])
        await dispatcher.start()
        one.gate.set()
        one.living = False
        one.fails = [SdOrtError("no memory now."), ReplicaDied("again")]
        while one.starts < 4:
            await asyncio.sleep(0)
        assert await dispatcher.submit(pictures("a"))[0] == b"a"
        dispatcher.close()

    run(test)


def test_a_model_that_does_not_load_is_said_at_once() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([Fake(), Fake(fails=[InputError("it is broken")])])
        with pytest.raises(InputError, match="it is broken"):
            await dispatcher.start()
        dispatcher = Dispatcher([Fake("2", fails=[ReplicaDied("out of memory")])])
        with pytest.raises(SdOrtError, match="replica 2 ended while it loaded: out of memory"):
            await dispatcher.start()

    run(test)


def test_closing_fails_what_waits_and_what_is_drawn() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=1)
        await dispatcher.start()
        done = dispatcher.submit(pictures("a", "b"))
        await settled()
        dispatcher.close()
        found = await asyncio.gather(*done, return_exceptions=True)
        assert [type(each) for each in found] == [NotDrawn, NotDrawn]
        assert not one.living

    run(test)
