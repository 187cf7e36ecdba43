"""The server: responses without Ray, and two CPU replicas in Ray processes, of which one is killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_pipeline
from cli_type import Cli
from PIL import Image
from test_dispatch import MODEL, FakeReplica, run_tasks

from sd_ort.cli.model_options import load_adapters
from sd_ort.core.interrupts import INTERRUPTED
from sd_ort.core.metrics import psnr
from sd_ort.demo import MODEL_DIR
from sd_ort.serving import server
from sd_ort.serving.api import Limits
from sd_ort.serving.dispatch import Dispatcher
from sd_ort.serving.image_jobs import BatchSettings, ImageJob
from sd_ort.serving.replica import PipelineReplica, ReplicaConfig
from sd_ort.serving.server import PAGE, PAGE_HEADERS, Service, bind_socket, serve

JSON = {"content-type": "application/json"}
IMAGES = "/v1/images/generations"
PAGE_FOLDER = Path(server.__file__).parent / "page"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline.write(tmp_path_factory.mktemp("toy") / "model")


async def request(
    app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, *,
    disconnect: bool = False,
) -> Any:  # fmt: skip
    """Send a request to an ASGI app and return (status, content). disconnect: the client does not wait."""
    messages, sent = [{"type": "http.request", "body": body, "more_body": False}], []
    if disconnect:
        messages.insert(0, {"type": "http.disconnect"})

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    encoded = [(key.encode(), value.encode()) for key, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": encoded, "query_string": b""}
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], content


def test_responses() -> None:
    async def test() -> None:
        dispatcher = Dispatcher([replica := FakeReplica()], batch=1, queue=3)
        await dispatcher.start()
        app = Service(dispatcher, MODEL, Limits(body=1000), token="secret").app()
        allowed = {**JSON, "authorization": "Bearer secret"}

        async def status(body: Any, headers: dict[str, str] = allowed, path: str = IMAGES, method: str = "POST") -> int:
            code, content = await request(app, method, path, json.dumps(body).encode(), headers)
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
        await run_tasks()
        assert await status({**hello, "n": 2}) == 503
        assert (await request(app, "POST", IMAGES, b'{"prompt": "gone"}', allowed, disconnect=True))[0] == 499
        replica.gate.set()
        assert await waiting == [200] * 3
        assert replica.batches == [["hello"]] * 3
        assert await status({"prompt": "poison"}) == 400
        assert await status({"prompt": "bug"}) == 500

        assert (await request(app, "GET", "/metrics"))[0] == 401
        code, text = await request(app, "GET", "/metrics", headers=allowed)
        assert code == 200
        assert b"sd_ort_images_total 3.0" in text
        assert b'sd_ort_requests_total{status="503"} 1.0' in text
        code, content = await request(app, "GET", "/health")
        assert (code, json.loads(content)["status"]) == (200, "ok")
        replica.gate.clear()
        waiting = asyncio.gather(*(status(hello) for _ in range(2)))
        await run_tasks()
        assert (len(replica.batches[-1]), len(dispatcher.waiting)) == (1, 1)
        dispatcher.close()
        assert [*await waiting, await status(hello)] == [503] * 3
        dispatcher.states[0] = "restarting"
        assert (await request(app, "GET", "/health"))[0] == 503

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "127.0.0.1:8000"}, 200), ({"host": "[::1]:8000"}, 200), ({"host": "localhost"}, 200), ({}, 200),
        ({"host": "gpu1.lan:8000"}, 200), ({"host": "evil.example"}, 403), ({"host": "["}, 403), ({"host": ""}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200), ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost:1", "origin": "http://evil.example"}, 403), ({"origin": "http://localhost"}, 403),
    ],
)  # fmt: skip
def test_only_requests_addressed_to_this_server_are_answered(headers: dict[str, str], expected: int) -> None:
    async def test() -> None:
        dispatcher = Dispatcher([FakeReplica()])
        await dispatcher.start()
        await run_tasks()
        app = Service(dispatcher, MODEL, names=("GPU1.lan",)).app()
        assert (await request(app, "GET", "/health", headers=headers))[0] == expected
        dispatcher.close()

    asyncio.run(test())


def test_the_page_is_of_this_server_alone() -> None:
    """Its files name no other host, and the browser may load nothing else."""

    async def test() -> None:
        dispatcher = Dispatcher([FakeReplica()])
        await dispatcher.start()
        model = replace(MODEL, loras=(("night", 0.5),))
        app = Service(dispatcher, model, token="secret", title="demo on cpu").app()
        for path, (name, _) in PAGE.items():
            code, content = await request(app, "GET", path)  # without a token: the page asks for it
            assert (code, content) == (200, (PAGE_FOLDER / name).read_bytes())
            assert b"//" not in content.replace(b"// ", b"")
            assert b"style=" not in content
        assert (await request(app, "GET", "/page.html"))[0] == 404
        assert "default-src 'none'" in PAGE_HEADERS["Content-Security-Policy"]
        assert (await request(app, "GET", "/v1/model"))[0] == 401
        code, content = await request(app, "GET", "/v1/model", headers={"authorization": "Bearer secret"})
        assert (code, json.loads(content)) == (200, {
            "title": "demo on cpu", "default_size": 64, "size_multiple": 8, "steps": 25, "guidance": 7.5,
            "loras": [{"name": "night", "scale": 0.5}], "variants": [],
        })  # fmt: skip
        dispatcher.close()

    asyncio.run(test())


def test_a_replica_scales_its_loras_when_they_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReplicaConfig(folder, {"provider": "cpu", "threads": 1}, loras=(("night", 1.0), ("gold", 0.5)))
    replica, calls = PipelineReplica(config), list[Any]()
    assert replica.model.loras == config.loras
    monkeypatch.setattr(replica.pipeline, "set_adapters", lambda *arguments: calls.append(arguments))
    for loras in ((), (("night", 0.0), ("gold", 0.5)), (("night", 0.0), ("gold", 0.5)), ()):
        replica.generate([ImageJob("a", "", 1, BatchSettings(64, 64, 1, 1.0, loras))])
    assert calls == [(["night", "gold"], [0.0, 0.5]), (["night", "gold"], [1.0, 0.5])]


def test_variants(demo_folder: Path, one_thread: None) -> None:
    """A request may name another pipeline, ONNX graphs or torch weights that diffusers runs: the image is the same."""
    variants = (("again", demo_folder), ("torch", MODEL_DIR))
    setup = functools.partial(load_adapters, (f"{MODEL_DIR.parent}/loras/night.safetensors:0.5",), (), names=["night"])
    options = {"provider": "cpu", "threads": 1}
    config = ReplicaConfig(demo_folder, options, setup=setup, loras=(("night", 0.5),), variants=variants)
    replica = PipelineReplica(config)
    assert replica.model.variants == ("again", "torch")
    for loras in ((("night", 0.5),), (("night", 0.0),)):
        images = []
        for variant in ("", "again", "torch"):
            (file,) = replica.generate([ImageJob("a red circle", "", 1, BatchSettings(64, 64, 2, 3.0, loras, variant))])
            images.append(np.asarray(Image.open(io.BytesIO(file))))
        assert np.array_equal(images[0], images[1])
        assert psnr(images[0], images[2]) > 50


def test_variants_are_checked_before_anything_is_loaded(sd_ort: Cli, folder: Path) -> None:
    for text in ("raw", "=x", f"raw={folder.parent / 'none'}"):
        code, _, error = sd_ort("serve", folder, "--compare", text)
        assert code == 2
        assert error.strip() == f"sd-ort: --compare {text} is not NAME=FOLDER, of a diffusers or a pipeline folder."


@pytest.mark.parametrize("timeout", [1e-3, 1e9])
def test_unfinished_requests_deny_service_to_nobody(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """300 connections with unfinished headers are closed when their time is over, or to make room for others."""
    monkeypatch.setattr("sd_ort.serving.connections.HEADER_TIMEOUT_S", timeout)

    async def test() -> None:
        dispatcher = Dispatcher([FakeReplica()])
        listener = bind_socket("127.0.0.1", 0)
        ready = asyncio.Event()
        address = listener.getsockname()
        serving = asyncio.create_task(
            serve(dispatcher, listener, lambda model: Service(dispatcher, model), lambda model: ready.set())
        )
        await ready.wait()
        unfinished = []
        for _ in range(300):
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.suppress(ConnectionResetError):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x")
            unfinished.append((reader, writer))
        if timeout > 1:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await reader.read()
            writer.close()
        for reader, _ in unfinished if timeout < 1 else unfinished[:230]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, writer in unfinished:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 300))


def test_an_image_does_not_depend_on_its_batch(folder: Path, one_thread: None) -> None:
    """On a CPU in float32, other prompts, negative prompts and seeds in the batch change no byte."""
    replica = PipelineReplica(ReplicaConfig(folder, {"provider": "cpu", "threads": 1}))
    settings = BatchSettings(64, 64, 2, 7.5)
    jobs = [ImageJob(f"prompt {seed}", "x" * seed, seed, settings) for seed in range(4)]
    files = replica.generate(jobs)
    assert files == [replica.generate([job])[0] for job in jobs]
    assert len(set(files)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "2", "--provider", "cpu"], "takes no --gpus"),
        (["--gpus", "64", "--provider", "cuda"], "the cuda provider is not in the installed onnxruntime wheel"),
        (["--gpus", "1", "--replicas", "2", "--provider", "cpu"], "pass one"),
        (["--scheduler", "nope", "--provider", "cpu"], "'nope' is no diffusers scheduler"),
        (["--host", "no such host", "--provider", "cpu"], "is not an address"),
        (["--host", "192.0.2.77", "--provider", "cpu"], "Cannot serve at"),
        (["--token", " "], "token is empty"),
        (["--token", "gehéim"], "not printable ASCII"),
        (["--timeout", "nan"], "--timeout"),
        (["--replicas", "1000000"], "--replicas"),
        (["--threads", "1000000"], "--threads"),
    ],
)
def test_invalid_options(sd_ort: Callable[..., Any], folder: Path, arguments: list[str], message: str) -> None:
    code, _, err = sd_ort("serve", folder, *arguments)
    assert code in (2, 3)
    assert message in err
    assert len(err.splitlines()) == 1 or "Usage" in err


def test_a_port_in_use_a_missing_folder_another_model_and_missing_ray(
    sd_ort: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        code, _, err = sd_ort("serve", folder, "--provider", "cpu", "--port", listener.getsockname()[1])
    assert (code, "choose another --port" in err, len(err.splitlines())) == (2, True, 1)
    code, _, err = sd_ort("serve", folder / "no")
    assert (code, "no such file" in err) == (2, True)
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    code, _, err = sd_ort("serve", other, "--provider", "cpu", "--port", 0)
    assert (code, "holds a FluxPipeline" in err, "Give one PROMPT" in err, len(err.splitlines())) == (2, True, True, 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = sd_ort("serve", folder, "--provider", "cpu", "--port", 0)
    assert (code, "pip install 'sd-ort[ray]'" in err, len(err.splitlines())) == (2, True, 1)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `sd-ort serve` with two replicas; yield the process and its address."""
    command = [sys.executable, "-m", "sd_ort", "serve", str(folder), "--replicas", "2", "--port", "0", "--queue", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, next(line for line in process.stdout if "http://" in line).split()[-1]
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for child in [process, *children]:
                child.kill()


def post(address: str, fields: dict[str, Any]) -> Sequence[bytes]:
    request = urllib.request.Request(address + IMAGES, json.dumps(fields).encode(), JSON)
    with urllib.request.urlopen(request, timeout=600) as response:
        return [base64.b64decode(image["b64_json"]) for image in json.load(response)["data"]]


def test_no_image_is_lost_when_a_replica_dies(server: tuple[subprocess.Popen[str], str], folder: Path) -> None:
    """Also: replicas have the server's priority, every port is on the loopback interface, and SIGTERM ends all
    processes with exit code 130."""
    process, address = server
    replicas = [child for child in psutil.Process(process.pid).children(recursive=True) if "ray::Actor" in child.name()]
    assert [replica.nice() for replica in replicas] == [psutil.Process(process.pid).nice()] * 2
    every = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    sockets = [socket for each in every for socket in each.net_connections("inet") if socket.status == "LISTEN"]
    assert {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets} == {"127.0.0.1"}  # Ray's too
    with ThreadPoolExecutor(16) as pool:
        fields = [{"prompt": f"image {i}", "seed": i, "n": 1 + i % 3, "steps": 2 + i % 2} for i in range(60)]
        answers = [pool.submit(post, address, request_fields) for request_fields in fields]
        answers[0].result()
        replicas[0].kill()
        files = [answer.result() for answer in answers]
    assert [len(images) for images in files] == [1 + i % 3 for i in range(60)]
    reference = PipelineReplica(ReplicaConfig(folder, {"provider": "cpu", "threads": 1}))
    for i in (0, 31, 59):
        settings = BatchSettings(64, 64, 2 + i % 2, 7.5)
        jobs = [ImageJob(f"image {i}", "", i + j, settings) for j in range(1 + i % 3)]
        assert files[i] == [reference.generate([job])[0] for job in jobs]
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130
    assert psutil.wait_procs(processes, timeout=120)[1] == []


def test_nothing_of_ray_outlives_a_killed_server(server: tuple[subprocess.Popen[str], str]) -> None:
    """The watchdog ends when all others have: no process is waited for that would have ended later by itself."""
    process, _ = server
    children = psutil.Process(process.pid).children(recursive=True)
    (watchdog,) = [child for child in children if any("ray_watchdog" in word for word in child.cmdline())]
    folder = Path(watchdog.cmdline()[-1])
    assert folder.is_dir()
    process.kill()
    assert psutil.wait_procs([watchdog], timeout=600)[1] == []
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()


@pytest.mark.parametrize("moment", ["ray", "load"])
def test_an_interrupt_while_replicas_start(folder: Path, moment: str) -> None:
    """The server interrupts itself. Its output ends when the watchdog does, after all processes of Ray.

    While replicas load, Ray itself is left out: it gives up a start of 30 s, as on a busy machine.
    """
    code = (
        "import asyncio, os, ray, signal, sys; from sd_ort import cli\n"
        "from sd_ort.serving.ray_replicas import RayReplica\n"
        "init, (moment, *sys.argv) = ray.init, sys.argv[1:]\n"
        "def interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
        "def start_ray(**options):\n"
        "    print(options['_temp_dir'], flush=True)\n"
        "    if moment == 'ray': interrupt(); init(**options)\n"
        "async def load(replica): interrupt(); await asyncio.sleep(600)\n"
        "ray.init, RayReplica.start = start_ray, load\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.main()"
    )
    command = [moment, "sd-ort", "serve", str(folder), "--provider", "cpu", "--replicas", "2", "--port", "0"]
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip().splitlines()) == (130, [INTERRUPTED])
    (of_ray,) = result.stdout.splitlines()
    assert not Path(of_ray).exists()
    assert [each for each in psutil.process_iter(["cmdline"]) if of_ray in " ".join(each.info["cmdline"] or [])] == []
