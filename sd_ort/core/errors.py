"""Errors a user can mend: the CLI prints their message on one line and exits with their code. Others are bugs."""


class SdOrtError(Exception):
    """Base of all errors whose message tells the user what to do."""

    exit_code = 1


class InputError(SdOrtError):
    """A path, option or file given by the user cannot be used."""

    exit_code = 2


class ProviderError(SdOrtError):
    """The execution provider asked for is not installed or not really used."""

    exit_code = 3


class VerificationError(SdOrtError):
    """A model's numbers differ from its source by more than the tolerance."""

    exit_code = 4


class OutputError(SdOrtError):
    """The output cannot be written: the disk is full or the folder belongs to something else."""

    exit_code = 5


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, cut to 300 characters, or its type when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
