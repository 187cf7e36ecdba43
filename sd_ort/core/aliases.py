"""Deprecated names of arguments, accepted as aliases of the new names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def accept_old_names(**new_names: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that passes keyword arguments of old names on under their new names.

    `new_names`: old name -> new name. The decorated function raises TypeError if a call has both names.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            for old, new in new_names.items():
                if old in keywords:
                    if new in keywords:
                        raise TypeError(f"{function.__name__}() got both {new} and its old name {old}: pass {new}.")
                    keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return call

    return decorate
