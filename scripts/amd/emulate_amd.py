#!/usr/bin/env python3
"""Runs the AMD code objects instruction by instruction on the host, against NumPy; writes results/ops_amd_emulated.md.

    git clone https://github.com/tinygrad/tinygrad /tmp/tinygrad
    python scripts/amd/emulate_amd.py --tinygrad /tmp/tinygrad [--arch gfx1100 ...] [--op BiasAdd ...] [--dtype ...]

tinygrad's emulator (test/mockgpu/amd/emu.py) executes RDNA3, RDNA4 and CDNA machine code from AMD's own pseudocode of
each instruction. Everything a launch needs comes from kernels.json (custom_ops/README.md describes it), as for anyone
who runs the objects alone; only the numbers to run on and to compare with come from custom_ops/<op>/{cases,reference}.

Emulation is slow: of all calls in kernels.json, the cheapest one of every kernel is run, if it is not dearer than
--largest, and all that are not dearer than --small. A cost is waves times bytes of machine code. Outcomes are kept in
~/.cache/sd-ort/emulated.jsonl, and the same code is not run again on the same call and emulator (--again does).

Needs clang (the emulator compiles each instruction with it), LLVM's tools and a HIP compiler, as sd-ort build-ops.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from custom_ops import GPU_OPERATORS
from custom_ops.gpu import Guarded, HostMemory
from custom_ops.op import DTYPES, Array, Operator, draw, load, nmse, nmse_limit
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")
RESULTS = ROOT / "results/ops_amd_emulated.md"
# The emulator's names of the instruction sets.
_ISAS = {"gfx9": "cdna", "gfx11": "rdna3", "gfx12": "rdna4"}
_POISON = 0xA5A5A5A5  # in registers and padding that nothing may read
_LDS_GRANULE = 512  # bytes, of the field in COMPUTE_PGM_RSRC2


# ---- the emulator


class Emulator:
    """run_asm of a tinygrad checkout. Raises SystemExit when there is none."""

    def __init__(self, checkout: Path) -> None:
        if not (checkout / "test/mockgpu/amd/emu.py").is_file():
            raise SystemExit(
                f"{checkout} is no tinygrad checkout with test/mockgpu/amd/emu.py (the PyPI package lacks it): "
                "git clone https://github.com/tinygrad/tinygrad, and give that folder as --tinygrad"
            )
        clang = next((path for path in map(shutil.which, ("clang", "clang-19")) if path), None)
        if clang is None:
            raise SystemExit(
                "the emulator compiles each instruction with clang, which is not on PATH: install clang-19"
            )
        os.environ.setdefault("CC", clang)
        os.environ["DEV"] = "CPU"
        sys.path.insert(0, str(checkout))
        from test.mockgpu.amd import emu  # of the checkout, not of the standard library

        # The kernels keep subnormal numbers (their descriptors' float mode says so); the emulator would drop them.
        emu._get_ftz_lib = lambda: (None, 0)
        emu.decode_inst = _cdna_decoder(emu.decode_inst)
        _mend_lds(emu)
        _mend_dual(emu)
        _mend_wmma(emu)
        self._run: Callable[..., int] = emu.run_asm
        commit = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        )
        self.version = commit.stdout.strip() or "unknown"

    def run(self, kernel: Kernel, grid: list[int], lds_bytes: int, arguments: bytes) -> None:
        """Runs all blocks, one after the other. Raises RuntimeError on an instruction that it does not know."""
        kernarg = ctypes.create_string_buffer(arguments, len(arguments))
        address = ctypes.addressof(kernarg)
        first = int(re.match(r"s\[(\d+):", kernel.entry["registers_at_start"]["kernarg_address"])[1])  # type: ignore[index]
        user = [_POISON] * 16
        user[first : first + 2] = [address & 0xFFFFFFFF, address >> 32]
        granules = -(-lds_bytes // _LDS_GRANULE)
        rsrc2 = kernel.rsrc2 & ~(0x1FF << 15) | granules << 15
        self._run(
            kernel.address,
            kernel.size,
            *grid,
            *kernel.entry["block"],
            address,
            rsrc2,
            kernel.entry["scratch_bytes"],
            _isa(kernel.entry["arch"]),
            user[: kernel.rsrc2 >> 1 & 31],
        )


def _isa(arch: str) -> str:
    return next(isa for prefix, isa in _ISAS.items() if arch.startswith(prefix))


def _cdna_decoder(decode: Callable) -> Callable:
    """The emulator's decoder with two mistakes on CDNA mended.

    gfx90a's v_mfma_f32_16x16x16_bf16_1k is VOP3P opcode 0x67; the emulator's tables are those of gfx942 and newer,
    where the same instruction is 0x61 and 0x67 is none. And 16-bit operands of VOP1, VOP2 and VOPC in registers from
    v128 on are taken for the high halves of v0 and on, as on RDNA; taken for 32 bits wide, they are read and written
    rightly (but for constants such as 1.0, which do not occur).
    """

    def decode_inst(data: bytes, isa: str) -> object:
        if isa == "cdna" and data[2:4] == b"\xe7\xd3":
            data = data[:2] + b"\xe1" + data[3:]
        instruction = decode(data, isa)
        if isa == "cdna" and type(instruction).__name__ in ("VOP1", "VOP2", "VOPC"):
            bits = instruction.canonical_op_bits
            vars(instruction)["canonical_op_bits"] = {name: max(width, 32) for name, width in bits.items()}
        return instruction

    return decode_inst


def _mend_lds(emu: ModuleType) -> None:
    """Lanes that are off have no LDS address: the emulator reads there, too, and such an address may lie anywhere."""

    class Gated(emu._Ctx):  # type: ignore[name-defined]
        __slots__ = ()

        def rvgpr_dyn(self, reg: object, lane: object, valid: object = None) -> object:
            value = super().rvgpr_dyn(reg, lane, valid)
            return emu._lane_active(self.rexec(), lane).where(value, emu._c(0))

    def compile_ds(instruction: object, context: object) -> object:
        context.__class__ = Gated
        return emu._compile_mem_op(instruction, context)

    for instructions in (emu.ir3, emu.ir4, emu.irc):
        emu._INST_HANDLERS[instructions.DS] = compile_ds


def _mend_dual(emu: ModuleType) -> None:
    """VOPD: both halves read before either writes. The emulator lets X's write come before the read of Y's src0."""

    def compile_vopd(instruction: object, context: object) -> object:
        sources: list = []

        class Ordered(emu._Ctx):  # type: ignore[name-defined]
            __slots__ = ()

            def rsrc_dyn(self, *arguments: object, **options: object) -> object:
                sources.append(super().rsrc_dyn(*arguments, **options))
                return sources[-1]

            def wvgpr_dyn(self: Any, *arguments: object, **options: object) -> object:
                registers, self.vgpr = self.vgpr, self.vgpr.after(*sources)
                try:
                    return super().wvgpr_dyn(*arguments, **options)
                finally:
                    self.vgpr = registers

        context.__class__ = Ordered
        return emu._compile_vopd(instruction, context)

    for instructions in (emu.ir3, emu.ir4):
        emu._INST_HANDLERS[instructions.VOPD] = compile_vopd


def _mend_wmma(emu: ModuleType) -> None:
    """WMMA with the constant 0 as C: the emulator takes its number, 128, for that of a register."""

    def compile_vop3p(instruction: object, context: object) -> object:
        if "WMMA" in instruction.op.name:  # type: ignore[attr-defined]
            source = context.inst_field(type(instruction).src2)  # type: ignore[attr-defined]
            reads = iter(range(1 << 16))

            class WithConstant(emu._Ctx):  # type: ignore[name-defined]
                __slots__ = ()

                def rvgpr_dyn(self, *arguments: object) -> object:
                    value = super().rvgpr_dyn(*arguments)
                    is_c = next(reads) >= 512  # after 256 elements of A and of B
                    return (source >= emu._c(256)).where(value, emu._c(0)) if is_c else value

            context.__class__ = WithConstant
        return emu._compile_vop3p(instruction, context)

    for instructions in (emu.ir3, emu.ir4):
        emu._INST_HANDLERS[instructions.VOP3P] = compile_vop3p


class CodeObject:
    """An ELF's segments in memory, as a loader lays them out."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        (program_headers,) = struct.unpack_from("<Q", data, 0x20)
        size, count = struct.unpack_from("<HH", data, 0x36)
        # type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment
        headers = [struct.unpack_from("<IIQQQQQQ", data, program_headers + i * size) for i in range(count)]
        segments = [header for header in headers if header[0] == 1]  # PT_LOAD
        self._memory = mmap.mmap(-1, max(header[3] + header[6] for header in segments) + mmap.PAGESIZE)
        for _, _, offset, address, _, file_bytes, _, _ in segments:
            self._memory[address : address + file_bytes] = data[offset : offset + file_bytes]
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._symbols = dict(_symbols(data))

    def find(self, symbol: str) -> tuple[int, int]:
        """Address and size of a symbol. Raises KeyError."""
        address, size = self._symbols[symbol]
        return self._base + address, size


def _symbols(data: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    (section_headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_headers + i * size) for i in range(count)]
    if any(section[1] in (4, 9) and section[5] for section in sections):  # SHT_RELA, SHT_REL
        raise SystemExit("a code object has relocations, which this loader does not do")
    table = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    names = sections[table[6]][4]
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, _, value, symbol_size = struct.unpack_from("<IBBHQQ", data, at)
        yield data[names + name : data.index(b"\0", names + name)].decode(), (value, symbol_size)


class Kernel:
    """An entry of kernels.json, loaded."""

    def __init__(self, entry: dict, code: CodeObject) -> None:
        self.entry, self._code = entry, code  # whose memory it lies in
        descriptor, _ = code.find(f"{entry['symbol']}.kd")
        self.address, self.size = code.find(entry["symbol"])
        self.descriptor = ctypes.string_at(descriptor, 64)
        (self.rsrc2,) = struct.unpack_from("<I", self.descriptor, 52)

    def pack(self, values: dict[str, object]) -> bytes:
        """The kernarg segment."""
        formats = {"int32": "<i", "uint32": "<I", "int64": "<q", "float": "<f"}
        segment = bytearray(struct.pack("<I", _POISON) * -(-self.entry["kernarg_bytes"] // 4))
        for argument in self.entry["arguments"]:
            format = "<Q" if argument["type"].endswith("*") else formats[argument["type"]]
            struct.pack_into(format, segment, argument["offset"], values[argument["name"]])
        return bytes(segment)


# ---- a call


@dataclass(frozen=True)
class Outcome:
    """One call on one architecture; `fault` is empty when it is right."""

    emulator: str
    arch: str
    operator: str
    case: str
    dtype: str
    candidates: list[str]
    symbols: list[str]
    code: str  # hash of the kernels' machine code
    error: float
    limit: float
    fault: str
    seconds: float


class Machine:
    """One architecture's kernels of a kernels.json, on the emulator."""

    def __init__(self, listing: dict, arch: str, emulator: Emulator) -> None:
        folder = Path(listing["folder"])
        entries = [entry for entry in listing["kernels"] if entry["arch"] == arch]
        codes = {name: CodeObject(folder / name) for name in {entry["object"] for entry in entries}}
        self.arch, self.emulator, self.listing = arch, emulator, listing
        self.kernels = {entry["symbol"]: Kernel(entry, codes[entry["object"]]) for entry in entries}

    def cost(self, call: dict) -> int:
        """Waves times bytes of code: what emulation takes, roughly."""
        total = 0
        for launch in call["launches"]:
            kernel = self.kernels[launch["symbol"]]
            waves = launch["block"][0] // kernel.entry["wave_size"]
            total += int(np.prod(launch["grid"])) * waves * kernel.size
        return total

    def code(self, call: dict) -> str:
        """Hash of the instruction set and of the machine code that a call runs: gfx1201's is often gfx1200's."""
        digest = hashlib.sha256()
        for kernel in (self.kernels[launch["symbol"]] for launch in call["launches"]):
            digest.update(_isa(self.arch).encode() + kernel.descriptor + ctypes.string_at(kernel.address, kernel.size))
        return digest.hexdigest()[:16]

    def run(self, call: dict, operator: Operator) -> Outcome:
        start = time.monotonic()
        symbols = [launch["symbol"] for launch in call["launches"]]
        case = next(case for case in operator.cases if case.name == call["case"])
        limit = nmse_limit(case, call["dtype"])
        try:
            error, fault = self._run(call, operator)
        except (RuntimeError, ValueError) as failure:  # an instruction that it does not know, or a word that is none
            error, fault = float("nan"), f"emulator: {failure}"
        if not fault and not error < limit:
            fault = f"NMSE {error:.2e}, allowed {limit:.2e}"
        return Outcome(
            self.emulator.version,
            self.arch,
            call["operator"],
            call["case"],
            call["dtype"],
            call["candidates"],
            symbols,
            self.code(call),
            error,
            limit,
            fault,
            round(time.monotonic() - start, 1),
        )

    def _run(self, call: dict, operator: Operator) -> tuple[float, str]:
        """The largest NMSE over the outputs, and what else is wrong."""
        case = next(case for case in operator.cases if case.name == call["case"])
        shapes = self.listing["cases"][call["operator"]][call["case"]]["outputs"]
        arrays = draw(operator, case, call["dtype"])
        memory = HostMemory()
        inputs = {name: Guarded(memory, array) for name, array in arrays.items()}
        outputs = {
            name: Guarded(memory, np.full(shape, np.nan, DTYPES[call["dtype"]][1])) for name, shape in shapes.items()
        }
        workspace = Guarded(memory, np.full(call["workspace_bytes"], 0xFF, np.uint8))
        buffers = inputs | outputs | {"workspace": workspace}
        for launch in call["launches"]:
            kernel = self.kernels[launch["symbol"]]
            values = {name: _value(value, buffers) for name, value in launch["arguments"].items()}
            lds = kernel.entry["lds_bytes"]["static"] + launch["dynamic_lds_bytes"]
            self.emulator.run(kernel, launch["grid"], lds, kernel.pack(values))
        wanted = operator.reference(arrays, case.attributes)
        fault = next((f"{name}: overwritten" for name, one in inputs.items() if not _is_kept(one, arrays[name])), "")
        errors = []
        for name, buffer in outputs.items():
            got, whole = buffer.read()
            errors.append(nmse(got, wanted[name]))
            fault = fault if whole else f"{name}: wrote out of bounds"
        return max(errors), fault if workspace.read()[1] else "workspace: wrote out of bounds"


def _value(value: object, buffers: dict[str, Guarded]) -> object:
    """An argument as the kernel takes it: an address for a pointer [tensor, offset], 0 for null."""
    if isinstance(value, list):
        return buffers[value[0]].address + value[1]
    return 0 if value is None else value


def _is_kept(buffer: Guarded, array: Array) -> bool:
    got, whole = buffer.read()
    return whole and got.tobytes() == array.tobytes()


# ---- which calls


def choose(machine: Machine, calls: list[dict], small: int, largest: int) -> list[dict]:
    """Every call of a cost up to `small`, and the cheapest one of each kernel if it costs no more than `largest`."""
    ranked = sorted(calls, key=machine.cost)
    chosen = [call for call in ranked if machine.cost(call) <= small]
    seen = {symbol for call in chosen for symbol in _symbols_of(call)}
    for call in ranked[len(chosen) :]:
        if machine.cost(call) <= largest and not seen.issuperset(_symbols_of(call)):
            chosen.append(call)
            seen.update(_symbols_of(call))
    return chosen


def _symbols_of(call: dict) -> set[str]:
    return {launch["symbol"] for launch in call["launches"]}


# ---- the table


def table(listing: dict, outcomes: list[Outcome], emulator: str) -> str:
    """results/ops_amd_emulated.md."""
    counted: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        counted.setdefault((one.operator, one.dtype, one.arch), []).append(one)
    archs = sorted({one.arch for one in outcomes}, key=ARCHS.index)
    exist: dict[tuple[str, str, str], set[str]] = {}
    for entry in listing["kernels"]:
        for operator in entry["operators"]:
            exist.setdefault((operator, entry["dtype"], entry["arch"]), set()).add(entry["symbol"])
    lines = [
        "# The AMD code objects, emulated",
        "",
        "Written by `scripts/amd/emulate_amd.py`: machine code of each architecture, executed instruction by "
        "instruction",
        "on the host, launched from kernels.json, compared with NumPy in float64. Every tensor and the workspace lie",
        "between guard bytes; outputs hold NaN, the workspace 0xff and unused registers a pattern before a launch.",
        "",
        f"Library {listing['library']}, built by {_compiler(listing)}; tinygrad {emulator}, with five mistakes",
        "mended by the script (CDNA: gfx90a's bf16 MFMA, 16-bit operands from v128 on; RDNA: the order of VOPD's",
        "halves, WMMA on the constant 0; all: LDS reads of lanes that are off). Its MFMA drops subnormal float16",
        "numbers. Waves run in turn from barrier to barrier, so a race between waves can pass.",
        "",
        "A cell: kernels run of those that the operator has / calls / largest NMSE as a part of what is allowed.",
        "`FAULT` where one was wrong, `gap` where the emulator lacks an instruction; both are listed below.",
        "",
        f"| operator | type | {' | '.join(archs)} |",
        "|---|---|" + "---|" * len(archs),
    ]
    operators = [load(folder).name for folder in GPU_OPERATORS]
    for operator in operators:
        for dtype in DTYPES:
            cells = [_cell(counted.get((operator, dtype, arch), []), exist[operator, dtype, arch]) for arch in archs]
            lines.append(f"| {operator} | {dtype} | {' | '.join(cells)} |")
    faults = [one for one in outcomes if one.fault]
    lines += ["", "## Faults and gaps", ""]
    lines += sorted({_fault_line(one) for one in faults}) or ["None."]
    lines += ["", "## Kernels that were not run", ""]
    run = {(one.arch, symbol) for one in outcomes for symbol in one.symbols}
    missing = [entry for entry in listing["kernels"] if entry["arch"] in archs]
    missing = [entry for entry in missing if (entry["arch"], entry["symbol"]) not in run]
    lines += sorted(_missing_lines(missing)) or ["None."]
    return "\n".join(lines) + "\n"


def _cell(outcomes: list[Outcome], exist: set[str]) -> str:
    if not outcomes:
        return "-"
    run = {symbol for one in outcomes for symbol in one.symbols}
    worst = max((one.error / one.limit for one in outcomes if not one.fault), default=0.0)
    text = f"{len(run)} of {len(exist)} / {len(outcomes)} / {worst:.2f}"
    gaps = sum(one.fault.startswith("emulator:") for one in outcomes)
    faults = sum(bool(one.fault) for one in outcomes) - gaps
    return text + (f" / **{faults} FAULT**" if faults else "") + (f" / {gaps} gap" if gaps else "")


def _fault_line(one: Outcome) -> str:
    return f"- {one.arch} {one.operator} {one.dtype} {one.case} ({', '.join(one.candidates)}): {one.fault}"


def _missing_lines(missing: list[dict]) -> Iterator[str]:
    """A line for the kernels of one name and architecture."""
    by_name: dict[tuple[str, str, str], list[str]] = {}
    for entry in missing:
        template = ", ".join(str(value) for value in entry["template"].values())
        reason = "dearer than --largest, or not run yet" if entry["operators"] else "no case launches it"
        by_name.setdefault((entry["kernel"], reason, template), []).append(entry["arch"])
    for (name, reason, template), archs in by_name.items():
        yield f"- {name}<{template}> ({', '.join(sorted(archs))}): {reason}"


def _compiler(listing: dict) -> str:
    record = json.loads((Path(listing["folder"]).parent / "build.json").read_text())
    return str(record["compilers"][-1].split(": ", 1)[1].splitlines()[0])


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tinygrad", type=Path, required=True, help="a checkout of github.com/tinygrad/tinygrad")
    parser.add_argument("--kernels", type=Path, help="a kernels.json; by default the sources' own, built if need be")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--op", nargs="+", help="operators, as BiasAdd; all by default")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--small", type=int, default=20_000, help="run all calls up to this cost")
    parser.add_argument("--largest", type=int, default=2_000_000, help="no call of a higher cost")
    parser.add_argument("--again", action="store_true", help="run what was run before, too")
    options = parser.parse_args()

    emulator = Emulator(options.tinygrad)
    kernels = options.kernels or build.build(cpu=False, hip=ARCHS, say=print).parent / "kernels.json"
    listing = json.loads(kernels.read_text())
    log = cache_folder() / "emulated.jsonl"
    done = {} if options.again else _read(log, emulator)
    operators = {operator.name: operator for operator in map(load, GPU_OPERATORS)}
    for name in options.op or operators:
        if name not in operators:
            raise SystemExit(f"no operator {name}: there are {', '.join(operators)}")
    wanted = set(options.op or operators)
    calls = [call for call in listing["calls"] if call["operator"] in wanted and call["dtype"] in options.dtype]
    for arch in options.arch:
        machine = Machine(listing, arch, emulator)
        for call in choose(machine, calls, options.small, options.largest):
            key = (call["operator"], call["case"], call["dtype"], machine.code(call))
            if key in done:
                continue
            done[key] = outcome = machine.run(call, operators[call["operator"]])
            say = (arch, outcome.operator, outcome.dtype, outcome.case, outcome.candidates)
            print(*say, outcome.fault or f"{outcome.error:.1e}", f"{outcome.seconds} s", flush=True)
            with log.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    outcomes = _outcomes(listing, emulator, _read(log, emulator))
    RESULTS.write_text(table(listing, outcomes, emulator.version))
    faults = sum(bool(one.fault) for one in outcomes)
    print(f"{RESULTS}: {len(outcomes)} calls, {faults} faults or gaps")


def _read(log: Path, emulator: Emulator) -> dict[tuple[str, ...], Outcome]:
    """Earlier outcomes on this emulator by operator, case, type and code, the latest of each."""
    lines = log.read_text().splitlines() if log.is_file() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return {(one.operator, one.case, one.dtype, one.code): one for one in outcomes if one.emulator == emulator.version}


def _outcomes(listing: dict, emulator: Emulator, done: dict[tuple[str, ...], Outcome]) -> list[Outcome]:
    """What was run of this library's code, on each architecture that has it."""
    found = []
    for arch in ARCHS:
        machine = Machine(listing, arch, emulator)
        for call in listing["calls"]:
            one = done.get((call["operator"], call["case"], call["dtype"], machine.code(call)))
            if one is not None:
                found.append(replace(one, arch=arch, candidates=call["candidates"]))
    return found


if __name__ == "__main__":
    main()
