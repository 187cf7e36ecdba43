"""The server: its answers without Ray, and two replicas on the CPU in Ray's processes, one of them killed."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy
from test_dispatch import MODEL, Fake, settled

from sd_ort.serving.api import Limits
from sd_ort.serving.dispatch import Dispatcher
from sd_ort.serving.pictures import Picture, Settings
from sd_ort.serving.replica import Opening, Replica
from sd_ort.serving.server import Service

JSON = {"content-type": "application/json"}
IMAGES = "/v1/images/generations"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "model")


async def ask(
    app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, *, goes: bool = False
) -> Any:
    """(status, content) of a request, as an ASGI server would hand it on; the client waits, or `goes` at once."""
    parts, sent = [{"type": "http.request", "body": body, "more_body": False}], []
    if goes:
        parts.insert(0, {"type": "http.disconnect"})

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    encoded = [(key.encode(), value.encode()) for key, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": encoded, "query_string": b""}
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], content


def test_answers() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([one := Fake()], batch=1, queue=3)
        await dispatcher.start()
        app = Service(dispatcher, MODEL, Limits(body=1000), token="secret").app()
        allowed = {**JSON, "authorization": "Bearer secret"}

        async def status(body: Any, headers: dict[str, str] = allowed, path: str = IMAGES, method: str = "POST") -> int:
            code, content = await ask(app, method, path, json.dumps(body).encode(), headers)
            assert code == 200 or len(json.loads(content)["error"]["message"].splitlines()) == 1
            return int(code)

        hello = {"prompt": "hello"}
        assert await status(hello, JSON) == 401
        assert await status(hello, {**JSON, "authorization": "Bearer wrong"}) == 401
        assert await status(hello, {**allowed, "content-type": "text/plain"}) == 415
        assert await status({"prompt": "x" * 2**20}) == 413
        assert await status({}) == 400
        assert await status(hello, path="/v1/images/edits") == 404
        assert await status(hello, method="GET") == 405
        waiting = asyncio.gather(*(status(hello) for _ in range(3)))
        await settled()
        assert await status({**hello, "n": 2}) == 503
        assert (await ask(app, "POST", IMAGES, b'{"prompt": "gone"}', allowed, goes=True))[0] == 499
        one.gate.set()
        assert await waiting == [200] * 3
        assert one.batches == [["hello"]] * 3
        assert await status({"prompt": "poison"}) == 400
        assert await status({"prompt": "bug"}) == 500

        assert (await ask(app, "GET", "/metrics"))[0] == 401
        code, text = await ask(app, "GET", "/metrics", headers=allowed)
        assert code == 200
        assert b"sd_ort_images_total 3.0" in text
        assert b'sd_ort_requests_total{status="503"} 1.0' in text
        code, content = await ask(app, "GET", "/health")
        assert (code, json.loads(content)["status"]) == (200, "ok")
        dispatcher.states[0] = "restarting"
        assert (await ask(app, "GET", "/health"))[0] == 503
        dispatcher.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_picture_is_the_same_beside_others(folder: Path, one_thread: None) -> None:
    """Bytes, on a CPU in float32: other prompts, negatives and seeds in the batch change nothing."""
    replica = Replica(Opening(folder, {"provider": "cpu", "threads": 1}))
    settings = Settings(64, 64, 2, 7.5)
    pictures = [Picture(f"prompt {seed}", "x" * seed, seed, settings) for seed in range(4)]
    together = replica.draw(pictures)
    assert together == [replica.draw([picture])[0] for picture in pictures]
    assert len(set(together)) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "2"], "takes no --gpus"),
        (["--gpus", "64", "--provider", "cuda"], "64 GPUs were asked for"),
        (["--gpus", "1", "--replicas", "2"], "give one"),
        (["--host", "no such host"], "is no address"),
        (["--host", "192.0.2.77"], "cannot serve at"),
        (["--token", " "], "token is empty"),
    ],
)
def test_bad_options(sd_ort: Callable[..., Any], folder: Path, arguments: list[str], words: str) -> None:
    code, _, err = sd_ort("serve", folder, *arguments)
    assert code in (2, 3)
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_port_in_use_and_what_is_not_there(
    sd_ort: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = sd_ort("serve", folder, "--port", taken.getsockname()[1])
    assert (code, "choose another --port" in err, len(err.splitlines())) == (2, True, 1)
    code, _, err = sd_ort("serve", folder / "no")
    assert (code, "is not a folder" in err) == (2, True)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = sd_ort("serve", folder, "--port", 0)
    assert (code, "pip install 'sd-ort[ray]'" in err, len(err.splitlines())) == (2, True, 1)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sd-ort serve` with two replicas, and its address."""
    command = [sys.executable, "-m", "sd_ort", "serve", str(folder), "--replicas", "2", "--port", "0", "--queue", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, next(line for line in process.stdout if "http://" in line).split()[-1]
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for each in [process, *children]:
                each.kill()


def post(address: str, fields: dict[str, Any]) -> Sequence[bytes]:
    request = urllib.request.Request(address + IMAGES, json.dumps(fields).encode(), JSON)
    with urllib.request.urlopen(request, timeout=600) as response:
        return [base64.b64decode(each["b64_json"]) for each in json.load(response)["data"]]


def test_a_replica_dies_and_nothing_is_lost(server: tuple[subprocess.Popen[str], str], folder: Path) -> None:
    """Also: the end that SIGTERM brings, and what it leaves."""
    process, address = server
    replicas = [each for each in psutil.Process(process.pid).children(recursive=True) if "ray::Actor" in each.name()]
    assert len(replicas) == 2
    with ThreadPoolExecutor(16) as pool:
        fields = [{"prompt": f"picture {i}", "seed": i, "n": 1 + i % 3, "steps": 2 + i % 2} for i in range(60)]
        answers = [pool.submit(post, address, each) for each in fields]
        answers[0].result()
        replicas[0].kill()
        files = [answer.result() for answer in answers]
    assert [len(each) for each in files] == [1 + i % 3 for i in range(60)]
    alone = Replica(Opening(folder, {"provider": "cpu", "threads": 1}))
    for i in (0, 31, 59):
        expected = [Picture(f"picture {i}", "", i + j, Settings(64, 64, 2 + i % 2, 7.5)) for j in range(1 + i % 3)]
        assert files[i] == [alone.draw([picture])[0] for picture in expected]
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130
    assert psutil.wait_procs(processes, timeout=120)[1] == []
