"""Errors that a user can correct: the CLI prints their message on one line and exits with their code."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

COLORS = re.compile(r"\x1b\[[0-9;]*m")
BUG = 70  # exit code of an unexpected exception (sysexits.h: EX_SOFTWARE)
EXPORT_PACKAGES = ("torch", "diffusers", "transformers", "accelerate")  # the extra `export`


class SdOrtError(Exception):
    """Base of all errors whose message says what to do."""

    exit_code = 1


class InputError(SdOrtError):
    """A path, option or file given by the user cannot be used."""

    exit_code = 2


class ProviderError(SdOrtError):
    """The requested execution provider is not installed, or ONNX Runtime does not use it."""

    exit_code = 3


class VerificationError(SdOrtError):
    """A model's outputs differ from those of its source by more than the tolerance."""

    exit_code = 4


class OutputError(SdOrtError):
    """The output cannot be written: the disk is full or the folder belongs to something else."""

    exit_code = 5


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message without colors, at most 300 characters, or its type."""
    lines = [line.strip() for line in COLORS.sub("", str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def report_missing_package() -> Iterator[None]:
    """Context manager that replaces the error of importing torch or diffusers where it is not installed.

    InputError has pip's command. The packages are those of the extra `export`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXPORT_PACKAGES:
            raise
        raise InputError(_describe_missing(error)) from error


def _describe_missing(error: ModuleNotFoundError) -> str:
    return f"this needs {error.name}, which is not installed: pip install 'sd-ort[export]'."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in a library that says so in the text of its error."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(sign in str(error) for sign in OUT_OF_MEMORY)


def describe_shortage(error: BaseException) -> str:
    """Return one line that says which memory is short, and what to do."""
    advice = "choose a smaller size or batch, --low-memory or --vae-tiling"
    if any(sign in str(error) for sign in DEVICE_MEMORY):
        return f"not enough GPU memory: {advice}, or store weights in 8 bits (`sd-ort optimize --weights int8`)."
    return f"not enough memory: {advice}, or raise `ulimit -v`."


def describe_error(error: Exception) -> tuple[str, int]:
    """Return one line that says what to do, and the exit code, for any exception."""
    text = first_line(error)
    if isinstance(error, SdOrtError):
        return " ".join(str(error).split()), error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in EXPORT_PACKAGES:
        return _describe_missing(error), InputError.exit_code
    if is_out_of_memory(error):
        return describe_shortage(error), SdOrtError.exit_code
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be read or written: {error.strerror}.", OutputError.exit_code
    return f"a bug in sd-ort, please report it: {type(error).__name__}: {text} (SD_ORT_TRACEBACK=1 shows where)", BUG


# What our execution provider, CUDA and HIP say when device memory is short.
DEVICE_MEMORY = ("out of device memory", "out of memory", "hipErrorOutOfMemory", "cudaErrorMemoryAllocation")
# What torch, NumPy, ONNX Runtime, the dynamic linker and Python say when an allocation fails.
OUT_OF_MEMORY = (
    "can't allocate memory", "Unable to allocate", "bad_alloc", "bad allocation", "Failed to allocate",
    "failed to map segment", "cannot allocate memory", "Cannot allocate memory", "can't start new thread",
    *DEVICE_MEMORY,
)  # fmt: skip
