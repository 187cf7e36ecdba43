"""Time limits of HTTP connections, and the check of the Host header.

uvicorn waits for the headers of a request for ever. Here a connection without a complete request is closed after
HEADER_TIMEOUT_S, and the oldest such connection makes room for a new one: unfinished requests deny service to nobody.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0
MAX_IDLE = 64  # connections without a request that is being answered


class LimitedConnection(H11Protocol):
    """A connection of uvicorn whose request has to arrive in time."""

    deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        others = [each for each in self.connections if isinstance(each, LimitedConnection) and each.is_idle]
        if len(others) >= MAX_IDLE:
            min(others, key=lambda each: each.opened).transport.abort()
        self.opened = self.loop.time()
        super().connection_made(transport)
        self.deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_idle and self.deadline is None:  # a further request has begun
            self.deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        self.deadline = None
        if self.is_idle and self.timeout_keep_alive_task is None:
            self.transport.abort()


def address_error(host: str | None, origin: str | None, names: Collection[str]) -> str | None:
    """Return why a request with these headers is rejected, or None.

    A page in a browser may have its own name resolve to this machine (DNS rebinding): besides `names` and localhost
    only literal IP addresses are accepted. A page of another origin may not read answers.
    """
    if host is not None:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if name not in ("localhost", *(allowed.lower() for allowed in names)) and not _is_address(name):
            return f"Host {host[:80]!r} is not a name of this server: start it with --allow-host NAME."
    if origin is not None and origin.partition("://")[2] != host:
        return f"Requests of pages of {origin[:80]!r} are not answered."
    return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
