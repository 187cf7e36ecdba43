"""Modules that a host imports and this machine lacks: of each, every name is a class that takes anything."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any


def _attribute(_: Any, name: str) -> Any:
    """Return a stub; names of Python's protocols are not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return stub(name)


class AnyName(type):
    """Of a class whose attributes are such classes too."""

    __getattr__ = _attribute


def stub(name: str) -> Any:
    """A class that takes any arguments; its objects have any attribute and are context managers."""
    body = {
        "__all__": (),
        "__init__": lambda self, *_, **__: None,
        "__getattr__": _attribute,
        "__call__": lambda self, *_, **__: self,
        "__enter__": lambda self: self,
        "__exit__": lambda self, *_: None,
        "__iter__": lambda self: iter(()),
    }
    return AnyName(name, (), body)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder of stub modules: `names` and their submodules."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        class Stub(types.ModuleType):
            __getattr__ = _attribute

        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(__version__="0", __all__=())


def stub_missing(names: Iterable[str]) -> list[str]:
    """Replace the modules of `names` that are not installed by stubs, and return their names."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, Stubs(missing))
    return missing
