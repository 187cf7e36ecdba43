"""Schemas of untrusted JSON values, as types that msgspec checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec


def record_type(name: str, fields: Mapping[str, Any], required: Mapping[str, Any] | None = None) -> Any:
    """Return the type of a JSON object: `fields` may be absent or null, and fields without a type are anything."""
    present = [(field, kind) for field, kind in (required or {}).items()]
    optional = [(field, kind | None, None) for field, kind in fields.items()]
    return msgspec.defstruct(name, [*present, *optional], kw_only=True)


def bounded(kind: Any, low: float, high: float) -> Any:
    """Return the type of numbers, neither NaN nor infinite, from `low` to `high`; `kind` is int or float."""
    return Annotated[kind, msgspec.Meta(ge=low, le=high)]


def list_of(kind: Any, shortest: int = 0, longest: int | None = None) -> Any:
    """Return the type of lists of `kind` with a length from `shortest` to `longest`."""
    return Annotated[list[kind], msgspec.Meta(min_length=shortest, max_length=longest)]


def dict_of(kind: Any) -> Any:
    """Return the type of JSON objects with any keys and values of `kind`, or null."""
    return dict[str, kind | None]


def schema_mismatch(value: Any, schema: Any) -> str | None:
    """Return the first place where a JSON value does not fit a schema, such as `options.opset`; None if it fits."""
    try:
        msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        location = re.search(r" - at `(?:key in )?\$\.?(.+)`$", str(error))
        return location[1] if location else "the whole"
    return None
