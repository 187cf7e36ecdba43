"""Replicas as Ray actors: Ray starts their processes, transfers calls, and reports when a process ended."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.core.interrupts import STOPPABLE
from sd_ort.serving import ray_watchdog
from sd_ort.serving.image_jobs import ImageJob, ModelInfo, ReplicaDied
from sd_ort.serving.replica import Actor, RemoteError, ReplicaConfig

INSTALL = "Replicas need Ray and a web server: pip install 'sd-ort[ray]'."
STORE_BYTES = 128 << 20  # shared memory that transfers images
# Without "clusters" Ray addresses this machine as 127.0.0.1, else it replaces that by the machine's public address.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
}  # fmt: skip


def require(*modules: str) -> Any:
    """Import modules of the extra `ray`; return the last. Raises InputError with the pip command if one is missing."""
    try:
        return [importlib.import_module(name) for name in modules][-1]
    except ImportError as error:
        raise InputError(f"{INSTALL} ({first_line(error)})") from error


class RayReplica:
    """A replica in a Ray actor; implements `dispatch.ReplicaProcess`."""

    def __init__(self, ray: Any, config: ReplicaConfig, name: str) -> None:
        self.ray, self.config, self.name = ray, config, name
        self.actor: Any = None
        self.pid: int | None = None

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises SdOrtError if the model cannot be used, or ReplicaDied."""
        # No restarts by Ray: the dispatcher restarts replicas and loads the model on the right GPU.
        self.actor = self.ray.remote(Actor).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote()
        model: ModelInfo = await self._call("load", self.config)
        self.pid = model.pid
        return model

    async def generate(self, jobs: Sequence[ImageJob]) -> list[bytes]:
        """Return the PNG files of jobs with equal settings. Raises SdOrtError or ReplicaDied."""
        files: list[bytes] = await self._call("generate", list(jobs))
        return files

    def stop(self) -> None:
        """Kill the process, even during a call into a library."""
        if self.actor is not None:
            with contextlib.suppress(Exception):  # Ray raises errors of its own during its shutdown
                self.ray.kill(self.actor)
        self.actor = self.pid = None

    def is_alive(self) -> bool:
        """Return whether the process of a started replica exists."""
        return self.pid is not None and psutil.pid_exists(self.pid)

    async def _call(self, method: str, argument: Any) -> Any:
        if self.actor is None:
            raise ReplicaDied("it is not running")
        try:
            result = await getattr(self.actor, method).remote(argument)
        except self.ray.exceptions.RayTaskError as error:  # not caught by `Actor`: a bug
            raise SdOrtError(first_line(error.cause or error)) from None
        except self.ray.exceptions.RayError as error:
            raise ReplicaDied(first_line(error)) from None
        if isinstance(result, RemoteError):
            raise result.error()
        return result


class RayCluster:
    """Context manager: Ray on this machine alone, with its own processes, files and authentication token.

    Raises InputError if Ray is not installed, SdOrtError if it does not start.
    """

    def __init__(self, configs: Sequence[ReplicaConfig]) -> None:
        os.environ.update(_ENVIRONMENT)
        self.ray = require("ray")
        names = [next(iter(config.environment.values()), str(index)) for index, config in enumerate(configs)]
        self.replicas = [RayReplica(self.ray, config, name) for config, name in zip(configs, names, strict=True)]

    def __enter__(self) -> Self:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # keeps other users from connecting to Ray
        logging.getLogger("ray").setLevel(logging.ERROR)
        self.folder = tempfile.mkdtemp(
            prefix="sd-ort-ray-", dir="/tmp"
        )  # the path of a socket has at most 107 characters
        self.watchdog = subprocess.Popen(
            [sys.executable, "-I", ray_watchdog.__file__, self.folder], stdin=subprocess.PIPE, start_new_session=True
        )
        self.stopping, started = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(started,), name=f"{STOPPABLE}-ray", daemon=True)
        self.thread.start()
        try:
            started.wait()
            # Restores Python's handler: Ray's prints stacks.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            if self.failure is not None:
                reason = first_line(self.failure).rstrip(".")
                raise SdOrtError(
                    f"Ray does not start: {reason}. Run it again, on a less busy machine."
                ) from self.failure
        except BaseException:
            if started.is_set():  # else the thread still starts processes: the watchdog ends them after this process
                self._clean_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for replica in self.replicas:
            replica.stop()
        with contextlib.suppress(Exception):  # some of its processes may have ended
            self.ray.shutdown()
        self.stopping.set()
        self.thread.join()
        self._clean_up()

    def _run(self, started: threading.Event) -> None:
        """Start Ray and wait until it stops: Linux ends its processes with the thread that started them.

        This is a thread of its own, since the start takes seconds in which the main thread must react to signals.
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
                _system_config={"worker_niceness": 0},  # Ray's 15 stops replicas while anything else is busy
            )
        except BaseException as error:
            self.failure = error
        started.set()
        self.stopping.wait()

    def _clean_up(self) -> None:
        """Have the watchdog kill the remaining processes of Ray and remove its files."""
        self.watchdog.communicate()
