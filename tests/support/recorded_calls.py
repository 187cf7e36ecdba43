"""Record the C signatures that Python code assumes in its calls through ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

SCALARS = {
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "const char*",
    ctypes.c_char: "char",
    ctypes.c_bool: "bool",
    ctypes.c_int: "int",
    ctypes.c_uint: "unsigned",
    ctypes.c_long: "long",
    ctypes.c_ulong: "unsigned long",
    ctypes.c_longlong: "long long",
    ctypes.c_ulonglong: "unsigned long long",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    None: "void",
}


@dataclass
class Calls:
    """Replacement of ctypes.CDLL. Each function of its libraries records its argument types and returns 0.

    Numbers that are passed by address are set to 1: one device, which can reach others, and one node of a graph.
    """

    prefix: str = ""  # libraries without it in their name do not load
    declarations: dict[str, str] = field(default_factory=dict)  # function -> its type in C
    values: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)  # function -> arguments of each call
    structures: dict[str, type[ctypes.Structure]] = field(default_factory=dict)

    def __call__(self, name: str | None, **_: object) -> Library:
        if self.prefix not in (name or ""):
            raise OSError(f"{name} is not loaded")
        return Library(self)

    def add(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        """Record one call. Asserts that all calls of a function have the same argument types."""
        declaration = f"{self.c_type(result)} ({', '.join(self.c_type_of(value) for value in arguments)})"
        assert self.declarations.setdefault(name, declaration) == declaration
        self.values.setdefault(name, []).append(tuple(getattr(value, "value", value) for value in arguments))

    def c_type(self, declared: Any) -> str:
        """Return the C type of a ctypes class."""
        if declared is not None and issubclass(declared, ctypes.Structure):
            self.structures[declared.__name__] = declared
            return declared.__name__
        if declared is not None and issubclass(declared, ctypes.Array | ctypes._Pointer):
            return f"{self.c_type(declared._type_)}*"
        if hasattr(declared, "_restype_"):  # a type of functions
            return f"{self.c_type(declared._restype_)} (*)({', '.join(map(self.c_type, declared._argtypes_))})"
        return SCALARS[declared]

    def c_type_of(self, argument: Any) -> str:
        """Return the type in C that ctypes passes for an argument."""
        if isinstance(argument, int):
            return "int"
        if isinstance(argument, bytes):
            return "const char*"
        if hasattr(argument, "_obj"):  # ctypes.byref
            return f"{self.c_type(type(argument._obj))}*"
        return self.c_type(type(argument))

    def structure_definitions(self) -> str:
        """Return the ctypes structures that were passed, in C++."""
        text = ""
        for name, structure in self.structures.items():
            members = " ".join(self._member(*member) for member in structure._fields_)
            text += f"struct {name} {{ {members} }};\n"
        return text

    def _member(self, name: str, declared: Any) -> str:
        if issubclass(declared, ctypes.Array):
            return f"{self.c_type(declared._type_)} {name}[{declared._length_}];"
        return f"std::common_type_t<{self.c_type(declared)}> {name};"


class Library:
    """Library that has a function of any name."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Function:
        function = Function(self._calls, name)
        setattr(self, name, function)
        return function


@dataclass
class Function:
    """Function of a Library, with the attributes of ctypes functions."""

    calls: Calls
    name: str
    restype: Any = ctypes.c_int
    argtypes: Any = None

    def __call__(self, *arguments: Any) -> int:
        self.calls.add(self.name, self.restype, arguments)
        for argument in arguments:
            variable = getattr(argument, "_obj", None)
            if isinstance(variable, ctypes.c_int | ctypes.c_uint | ctypes.c_size_t):
                variable.value = 1
        return 0
