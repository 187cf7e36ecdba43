"""Replicas as Ray's actors: Ray starts their processes, carries what they are asked, and tells when one is gone."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.core.interrupts import STOPPABLE
from sd_ort.serving.pictures import Model, Picture, ReplicaDied
from sd_ort.serving.replica import Actor, Failed, Opening

INSTALL = "replicas need Ray and a web server: pip install 'sd-ort[ray]'."
STORE_BYTES = 128 << 20  # of shared memory: what pictures pass through
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}


def require(*modules: str) -> Any:
    """Import modules of the extra `ray`; the last. Raises InputError, with what to install, where one is missing."""
    try:
        return [importlib.import_module(name) for name in modules][-1]
    except ImportError as error:
        raise InputError(f"{INSTALL} ({first_line(error)})") from error


class RayReplica:
    """A replica in an actor of Ray's: see `dispatch.Replica`."""

    def __init__(self, ray: Any, opening: Opening, name: str) -> None:
        self.ray, self.opening, self.name = ray, opening, name
        self.actor: Any = None
        self.pid: int | None = None

    async def start(self) -> Model:
        """Begin the process and load the model. Raises SdOrtError for a model that cannot be used, ReplicaDied."""
        # Ray itself starts nothing again: what was loaded, and on which GPU, is ours to say.
        self.actor = self.ray.remote(Actor).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote()
        model: Model = await self._call("load", self.opening)
        self.pid = model.pid
        return model

    async def draw(self, pictures: Sequence[Picture]) -> list[bytes]:
        """PNG files of pictures with equal settings. Raises SdOrtError for what cannot be drawn, ReplicaDied."""
        files: list[bytes] = await self._call("draw", list(pictures))
        return files

    def stop(self) -> None:
        """End the process at once, in the middle of a call into a library too."""
        if self.actor is not None:
            with contextlib.suppress(Exception):  # Ray raises its own when it is being shut down
                self.ray.kill(self.actor)
        self.actor = self.pid = None

    def alive(self) -> bool:
        """Whether the process is still there; asked of one that has started."""
        return self.pid is not None and psutil.pid_exists(self.pid)

    async def _call(self, method: str, argument: Any) -> Any:
        if self.actor is None:
            raise ReplicaDied("it is not running")
        try:
            result = await getattr(self.actor, method).remote(argument)
        except self.ray.exceptions.RayTaskError as error:  # what `Actor` does not catch: a bug
            raise SdOrtError(first_line(error.cause or error)) from None
        except self.ray.exceptions.RayError as error:
            raise ReplicaDied(first_line(error)) from None
        if isinstance(result, Failed):
            raise result.error()
        return result


class Cluster:
    """Ray on this machine alone, for as long as the block runs: its own processes, files and secret.

    Raises InputError when Ray is not installed, SdOrtError when it does not start.
    """

    def __init__(self, openings: Sequence[Opening]) -> None:
        os.environ.update(_ENVIRONMENT)
        self.ray = require("ray")
        names = [next(iter(opening.devices.values()), str(place)) for place, opening in enumerate(openings)]
        self.replicas = [RayReplica(self.ray, opening, name) for opening, name in zip(openings, names, strict=True)]

    def __enter__(self) -> Self:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # without it nobody else on the machine may talk to Ray
        logging.getLogger("ray").setLevel(logging.ERROR)
        self.folder = tempfile.mkdtemp(prefix="sd-ort-ray-", dir="/tmp")  # a socket's path may have 107 characters
        self.over, started = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(started,), name=f"{STOPPABLE}-ray", daemon=True)
        self.thread.start()
        try:
            started.wait()
            signal.signal(
                signal.SIGTERM, signal.getsignal(signal.SIGTERM)
            )  # in the place of Ray's, which prints stacks
            if self.failure is not None:
                raise SdOrtError(f"Ray does not start: {first_line(self.failure)}") from self.failure
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for replica in self.replicas:
            replica.stop()
        with contextlib.suppress(Exception):  # it may find some of its processes gone
            self.ray.shutdown()
        self.over.set()
        self.thread.join()
        self._end()

    def _run(self, started: threading.Event) -> None:
        """Start Ray, and stay: Linux ends its processes with the thread that started them.

        A thread of its own, since starting takes seconds in which the main one shall hear of signals.
        """
        try:
            self.ray.init(
                address="local",
                num_cpus=max(1, len(self.replicas)),
                num_gpus=0,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                log_to_driver=bool(os.environ.get("SD_ORT_TRACEBACK")),
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=self.folder,
            )
        except BaseException as error:
            self.failure = error
        started.set()
        self.over.wait()

    def _end(self) -> None:
        """End those of Ray's processes that are left, and remove its files."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.name().startswith("ray::") or any(self.folder in word for word in process.cmdline()):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
