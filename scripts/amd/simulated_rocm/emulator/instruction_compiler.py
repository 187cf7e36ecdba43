#!/usr/bin/env python3
"""Compile the instructions of kernels to host code, for the simulated HIP runtime.

The runtime (instruction_table.cc) starts this program with a checkout of tinygrad, an instruction set and a cache
folder, and writes one line per kernel: the file of its machine code. The answer is one line: empty, or an error. The
table of the kernel is then beside the machine code, with suffix .table:

    function LIBRARY SYMBOL FLAGS ARGUMENT,ARGUMENT,...     numbered from 0 in the order of these lines
    at OFFSET FUNCTION                                      of each instruction of the kernel
    gap OFFSET REASON                                       for an instruction that the emulator cannot translate

Instruction functions are compiled in batches, one shared library each, and listed in an index in the cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tinygrad_emulator import InstructionFunction, TinygradEmulator

_HERE = Path(__file__).resolve().parent
# Not -march=native: continuous integration restores the cache on other machines. v3 has FMA and half conversions.
_FLAGS = ("-O2", "-march=x86-64-v3", "-fPIC", "-shared", "-fno-math-errno", "-w", "-lm")
_INSTRUCTIONS_PER_LIBRARY = 24


class InstructionCompiler:
    """Cache of compiled instruction functions of one instruction set."""

    def __init__(self, emulator: TinygradEmulator, folder: Path, clang: str) -> None:
        self._emulator, self._folder, self._clang = emulator, folder, clang
        self._libraries: dict[str, str] = {}  # symbol to path
        for index in folder.glob("*.json"):
            self._libraries.update(dict.fromkeys(json.loads(index.read_text()), str(index.with_suffix(".so"))))
        self._extra = self._compile_extra()
        self._decoded: dict[bytes, InstructionFunction | str] = {}  # by the bytes of the instruction

    def write_table(self, code_file: Path) -> None:
        """Write the table of a kernel's machine code, and compile the functions that are missing."""
        code = code_file.read_bytes()
        places, gaps = self._decode(code)
        functions = list(dict.fromkeys(function for _, function in places))
        self._compile([function for function in functions if function.source])
        numbers = {function: number for number, function in enumerate(functions)}
        lines = [
            f"function {self._library(function)} {function.symbol} {function.flags} "
            + ",".join(map(str, function.arguments))
            for function in functions
        ]
        lines += [f"at {offset} {numbers[function]}" for offset, function in places]
        lines += [f"gap {offset} {reason}" for offset, reason in gaps]
        _write(code_file.with_suffix(".table"), "\n".join(lines) + "\n")

    def _decode(self, code: bytes) -> tuple[list[tuple[int, InstructionFunction]], list[tuple[int, str]]]:
        """(offset, function) of each instruction, and (offset, reason) of each that has none."""
        places, gaps, offset = [], [], 0
        while offset < len(code):
            size, function = self._function(code[offset : offset + 16].ljust(16, b"\0"))
            if isinstance(function, str):
                gaps.append((offset, function))
            else:
                places.append((offset, function))
            offset += size
        return places, gaps

    def _function(self, window: bytes) -> tuple[int, InstructionFunction | str]:
        """Size and function, or the reason why there is none, of the instruction at the start of `window`."""
        for size in (4, 8, 12):
            if function := self._decoded.get(window[:size]):
                return size, function
        size, result = self._decode_one(window)
        self._decoded[window[:size]] = result
        return size, result

    def _decode_one(self, window: bytes) -> tuple[int, InstructionFunction | str]:
        try:
            instruction, size = self._emulator.decode(window)
        except (ValueError, KeyError, AssertionError) as error:
            return 4, f"{type(error).__name__}: {error}".replace("\n", " ")
        try:
            return size, self._emulator.function(instruction, window)
        except Exception as error:  # the emulator has no error of its own
            return size, f"{instruction}: {type(error).__name__}: {error}".replace("\n", " ")

    def _library(self, function: InstructionFunction) -> str:
        return self._libraries[function.symbol] if function.source else self._extra

    def _compile(self, functions: list[InstructionFunction]) -> None:
        missing = [function for function in functions if function.symbol not in self._libraries]
        batches = [
            missing[i : i + _INSTRUCTIONS_PER_LIBRARY] for i in range(0, len(missing), _INSTRUCTIONS_PER_LIBRARY)
        ]
        with ThreadPoolExecutor(2) as pool:
            for batch, path in zip(batches, pool.map(self._compile_batch, batches), strict=True):
                self._libraries.update(dict.fromkeys((function.symbol for function in batch), path))

    def _compile_batch(self, functions: list[InstructionFunction]) -> str:
        source = "\n".join(function.source for function in functions)
        path = self._folder / (hashlib.sha256(source.encode()).hexdigest()[:16] + ".so")
        self._run_clang(path, "-", source)
        _write(path.with_suffix(".json"), json.dumps([function.symbol for function in functions]))
        return str(path)

    def _compile_extra(self) -> str:
        source = _HERE / "extra_instructions.c"
        options = (f"-DWAVE={self._emulator.wave_size}", f"-DEXEC={self._emulator.exec_register}")
        digest = hashlib.sha256(source.read_bytes() + repr(options).encode()).hexdigest()[:16]
        path = self._folder / f"extra-{digest}.so"
        if not path.is_file():
            self._run_clang(path, str(source), None, *options)
        return str(path)

    def _run_clang(self, path: Path, source: str, text: str | None, *options: str) -> None:
        """Compile to a temporary file and rename it: other processes use the same folder."""
        with tempfile.TemporaryDirectory(dir=self._folder) as work:
            command = [self._clang, "-x", "c", *_FLAGS, *options, source, "-o", f"{work}/library.so"]
            result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise RuntimeError(f"clang failed: {result.stderr.strip().splitlines()[0]}")
            Path(work, "library.so").rename(path)


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tinygrad", type=Path, required=True, help="a checkout of github.com/tinygrad/tinygrad")
    parser.add_argument("--isa", required=True, choices=("rdna3", "rdna4", "cdna", "cdna4"))
    parser.add_argument("--folder", type=Path, required=True, help="cache folder")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # standard output has answers only
    clang = next(filter(None, map(shutil.which, ("clang", "clang-19", "clang-22"))))  # simulate has looked
    compiler = InstructionCompiler(TinygradEmulator(options.tinygrad, options.isa), options.folder, clang)
    for line in sys.stdin:
        try:
            compiler.write_table(Path(line.rstrip("\n")))
            print("", file=answers)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), file=answers)


if __name__ == "__main__":
    main()
