"""Context managers that hide warnings, log lines and progress bars of libraries."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Hide all warnings, and log lines below ERROR of these loggers and their children."""
    existing = [log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)]
    loggers = {logging.getLogger(name) for name in names} | {log for log in existing if log.name.startswith(names)}
    levels = {log: log.level for log in loggers}
    try:
        for log in loggers:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Context manager that hides the progress bar of transformers for every model that it loads from disk."""
    from transformers.utils import logging as library

    enabled = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            library.enable_progress_bar()
