"""The HTTP server: `POST /v1/images/generations`, `GET /health`, `GET /metrics`.

Starlette and uvicorn carry the requests, `api` reads them, `dispatch` has them drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.serving import api
from sd_ort.serving.api import Limits, Refusal
from sd_ort.serving.dispatch import Dispatcher, QueueFull
from sd_ort.serving.metrics import Metrics
from sd_ort.serving.pictures import Model, Picture

BODY_s = 30.0  # in which a client must have sent its request
GONE = 499  # what proxies write of a client that did not wait for its answer


@dataclass
class Service:
    """What answers: `token`, which requests must carry, None for any; `timeout`: seconds for a request's images."""

    dispatcher: Dispatcher
    model: Model
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.dispatcher)

    def app(self) -> Starlette:
        """The routes, as an ASGI application."""
        routes = [
            Route("/v1/images/generations", self.generate, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route, Exception: _bug})

    async def generate(self, request: Request) -> Response:
        """Draw what a request asks for."""
        start = time.perf_counter()
        response = await self._answered(request)
        self.metrics.count(response.status_code, time.perf_counter() - start)
        return response

    async def health(self, request: Request) -> Response:
        """200 while a replica is ready, else 503; no token is asked for, and nothing of a request is shown."""
        ready = self.dispatcher.ready
        replicas = [
            {"name": replica.name, "state": state}
            for replica, state in zip(self.dispatcher.replicas, self.dispatcher.states, strict=True)
        ]
        status = "ok" if ready == len(replicas) else "degraded" if ready else "unavailable"
        content = {"status": status, "ready": ready, "waiting": len(self.dispatcher.waiting), "replicas": replicas}
        return JSONResponse(content, status_code=200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        if refused := self._unknown_client(request):
            return refused
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answered(self, request: Request) -> Response:
        if refused := self._unknown_client(request):
            return refused
        try:
            pictures = api.pictures_asked(await self._body(request), self.model, self.limits)
            files = await self._drawn(request, pictures)
        except Refusal as refusal:
            return _error(str(refusal), refusal.status, refusal.field)
        except QueueFull as full:
            return _error(str(full), 503, headers={"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=GONE)
        except TimeoutError:
            return _error(f"not drawn within {self.timeout:g} seconds.", 504)
        except InputError as error:  # what only the pipeline can tell
            return _error(str(error), 400)
        except SdOrtError as error:
            return _error(str(error), 500)
        return JSONResponse(api.answer(pictures, files))

    async def _drawn(self, request: Request, pictures: Sequence[Picture]) -> list[bytes]:
        """PNG files of pictures. Raises ClientDisconnect, and draws what was not begun no more, when nobody waits."""
        files = asyncio.gather(*self.dispatcher.submit(pictures))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.wait((files, gone), return_when=asyncio.FIRST_COMPLETED)
            if not files.done():
                raise ClientDisconnect
            return list(files.result())
        finally:
            gone.cancel()
            files.cancel()
            await asyncio.gather(files, gone, return_exceptions=True)

    async def _body(self, request: Request) -> bytes:
        """The body, read no further than its limit. Raises Refusal: 413, 415, or 408 for one that does not come."""
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            # A page in a browser can send other types to a server on the user's machine without being asked.
            raise Refusal("Content-Type is not application/json.", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_s):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body:
                        break  # `pictures_asked` says so
        except TimeoutError:
            raise Refusal(f"the request was not sent within {BODY_s:g} seconds.", status=408) from None
        return bytes(body)

    def _unknown_client(self, request: Request) -> Response | None:
        if self.token is None:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return None
        message = "the token is missing or wrong: send Authorization: Bearer TOKEN."
        return _error(message, 401, headers={"WWW-Authenticate": "Bearer"})


async def _disconnected(request: Request) -> None:
    """Return when the client has gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(message: str, status: int, field: str | None = None, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(api.error(" ".join(message.split()), status, field), status_code=status, headers=headers)


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return _error(f"{request.method} {request.url.path[:100]}: {error.detail}.", error.status_code, headers=headers)


async def _bug(request: Request, error: Exception) -> Response:
    return _error(f"a bug in sd-ort, please report it: {type(error).__name__}: {first_line(error)}", 500)


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not yet listening; port 0 for any free one.

    Raises InputError for a port in use, or an address that is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host} is no address: {first_line(error)}.") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise InputError(
            f"cannot serve at {host}:{port}: {error.strerror}; choose another --port or --host."
        ) from error
    return found


class _Server(uvicorn.Server):
    """uvicorn, whose open requests are answered at once when it is stopped."""

    dispatcher: Dispatcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.dispatcher.close()
        await super().shutdown(sockets)


async def serve(
    dispatcher: Dispatcher,
    listener: socket.socket,
    make: Callable[[Model], Service],
    ready: Callable[[Model], object],
) -> None:
    """Load the replicas, then answer requests until Ctrl-C or SIGTERM, which is raised again as KeyboardInterrupt.

    `ready` is called once requests are taken. Raises SdOrtError when a replica does not load.
    """
    try:
        model = await dispatcher.start()
        config = uvicorn.Config(
            make(model).app(), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1,
            timeout_keep_alive=15, server_header=False, limit_concurrency=(dispatcher.queue or 64) + 64,
        )  # fmt: skip
        server = _Server(config)
        server.dispatcher = dispatcher
        listener.listen(128)
        ready(model)
        await server.serve(sockets=[listener])
    finally:
        dispatcher.close()
        with contextlib.suppress(OSError):
            listener.close()
