"""The HTTP server: `POST /v1/images/generations`, `GET /v1/model`, `GET /health`, `GET /metrics`, and a page at `/`.

Starlette and uvicorn receive the requests, `api` parses them, `dispatch` has the images generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.serving import api
from sd_ort.serving.api import InvalidRequest, Limits
from sd_ort.serving.connections import MAX_IDLE, LimitedConnection, address_error
from sd_ort.serving.dispatch import Dispatcher, QueueFull, ServerStopped
from sd_ort.serving.image_jobs import ImageJob, ModelInfo
from sd_ort.serving.metrics import Metrics

BODY_TIMEOUT_S = 10.0  # for a client to send its request
# Files of the page by path, with their types. The page loads nothing else, and no other site can embed it.
PAGE = {
    "/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript"),
}  # fmt: skip
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's status if a client disconnects before the response


@dataclass
class Service:
    """Request handlers.

    token: required in requests; None for none. timeout: seconds for the images of a request. names: names of this
    server, besides localhost and IP addresses. title: what is served, for the page.
    """

    dispatcher: Dispatcher
    model: ModelInfo
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    timeout: float = 600.0
    names: Collection[str] = ()
    title: str = ""

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.dispatcher)

    def app(self) -> ASGIApp:
        """Return the routes as an ASGI application, for requests that are addressed to this server."""
        routes = [
            Route("/v1/images/generations", self.generate, methods=["POST"]),
            Route("/v1/model", self.get_model, methods=["GET"]),
            *(Route(path, _page, methods=["GET"]) for path in PAGE),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.get_metrics, methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _bug})

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            error = address_error(headers.get("host"), headers.get("origin"), self.names)
            await (_error(error, 403) if error else app)(scope, receive, send)

        return checked

    async def generate(self, request: Request) -> Response:
        """Generate the images of a request, and count the request."""
        start = time.perf_counter()
        response = await self._respond(request)
        self.metrics.count(response.status_code, time.perf_counter() - start)
        return response

    async def health(self, request: Request) -> Response:
        """Return 200 if a replica is ready, else 503. Needs no token, and shows nothing of requests."""
        ready = self.dispatcher.ready
        replicas = [
            {"name": replica.name, "state": state}
            for replica, state in zip(self.dispatcher.replicas, self.dispatcher.states, strict=True)
        ]
        status = "ok" if ready == len(replicas) else "degraded" if ready else "unavailable"
        content = {"status": status, "ready": ready, "waiting": len(self.dispatcher.waiting), "replicas": replicas}
        return JSONResponse(content, status_code=200 if ready else 503)

    async def get_model(self, request: Request) -> Response:
        """Return the defaults of the model."""
        if unauthorized := self._reject_client(request):
            return unauthorized
        model, loras = self.model, [{"name": name, "scale": scale} for name, scale in self.model.loras]
        content = {"title": self.title, "default_size": model.default_size, "size_multiple": model.size_multiple,
                   "steps": model.steps, "guidance": model.guidance, "loras": loras,
                   "variants": model.variants}  # fmt: skip
        return JSONResponse(content)

    async def get_metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        if unauthorized := self._reject_client(request):
            return unauthorized
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _respond(self, request: Request) -> Response:
        if unauthorized := self._reject_client(request):
            return unauthorized
        try:
            jobs = api.parse_request(await self._body(request), self.model, self.limits)
            files = await self._generate(request, jobs)
        except InvalidRequest as error:
            return _error(str(error), error.status, error.field)
        except (QueueFull, ServerStopped) as error:
            return _error(str(error), 503, headers={"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except TimeoutError:
            return _error(f"The images were not generated within {self.timeout:g} seconds.", 504)
        except InputError as error:  # found by the pipeline
            return _error(str(error), 400)
        except SdOrtError as error:
            return _error(str(error), 500)
        return JSONResponse(api.response_body(jobs, files))

    async def _generate(self, request: Request, jobs: Sequence[ImageJob]) -> list[bytes]:
        """Return the PNG files of jobs. If the client disconnects, cancel waiting jobs and raise ClientDisconnect."""
        files = asyncio.gather(*self.dispatcher.submit(jobs))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.wait((files, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not files.done():
                raise ClientDisconnect
            return list(files.result())
        finally:
            disconnect.cancel()
            files.cancel()
            await asyncio.gather(files, disconnect, return_exceptions=True)

    async def _body(self, request: Request) -> bytes:
        """Return the body, read up to its limit. Raises InvalidRequest: 415 for another type, 408 after a timeout."""
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            # A web page can send other content types to a local server without a preflight request.
            raise InvalidRequest("Content-Type is not application/json.", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.body:
                        break  # `parse_request` raises the error
        except TimeoutError:
            raise InvalidRequest(
                f"The request was not received within {BODY_TIMEOUT_S:g} seconds.", status=408
            ) from None
        return bytes(body)

    def _reject_client(self, request: Request) -> Response | None:
        if self.token is None:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode()):
            return None
        message = "The token is missing or wrong: send Authorization: Bearer TOKEN."
        return _error(message, 401, headers={"WWW-Authenticate": "Bearer"})


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(message: str, status: int, field: str | None = None, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(api.error_body(" ".join(message.split()), status, field), status_code=status, headers=headers)


async def _page(request: Request) -> Response:
    name, media_type = PAGE[request.url.path]
    content = (Path(__file__).parent / "page" / name).read_bytes()
    return Response(content, media_type=media_type, headers=PAGE_HEADERS)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return _error(f"{request.method} {request.url.path[:100]}: {error.detail}.", error.status_code, headers=headers)


async def _bug(request: Request, error: Exception) -> Response:
    return _error(f"This is a bug in sd-ort, please report it: {type(error).__name__}: {first_line(error)}", 500)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not yet listening; port 0 binds any free port.

    Raises InputError for a port in use or an address of another machine.
    """
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket_type, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host} is not an address: {first_line(error)}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InputError(
            f"Cannot serve at {host}:{port}: {error.strerror}; choose another --port or --host."
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn server that fails open requests immediately at shutdown."""

    dispatcher: Dispatcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.dispatcher.close()
        await super().shutdown(sockets)


async def serve(
    dispatcher: Dispatcher,
    listener: socket.socket,
    create_service: Callable[[ModelInfo], Service],
    on_ready: Callable[[ModelInfo], object],
) -> None:
    """Load the replicas, then answer requests until Ctrl-C or SIGTERM, which raises KeyboardInterrupt.

    `on_ready` is called when the server accepts requests. Raises SdOrtError if a replica does not load.
    """
    try:
        model = await dispatcher.start()
        config = uvicorn.Config(
            create_service(model).app(), log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=1, timeout_keep_alive=15, server_header=False,
            limit_concurrency=(dispatcher.queue or 64) + 64 + MAX_IDLE, http=LimitedConnection, ws="none",
        )  # fmt: skip
        server = _Server(config)
        server.dispatcher = dispatcher
        listener.listen(128)
        on_ready(model)
        await server.serve(sockets=[listener])
    finally:
        dispatcher.close()
        with contextlib.suppress(OSError):
            listener.close()
