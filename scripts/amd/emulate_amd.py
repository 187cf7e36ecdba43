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
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from emulator import CodeObject, Emulator, Kernel, isa_of

from custom_ops import GPU_OPERATORS
from custom_ops.check.memory import Guarded, HostMemory
from custom_ops.op import DTYPES, Array, Operator, draw, load, nmse, nmse_limit
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx1100", "gfx1200", "gfx1201")
RESULTS = ROOT / "results/ops_amd_emulated.md"


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
            digest.update(
                isa_of(self.arch).encode() + kernel.descriptor + ctypes.string_at(kernel.address, kernel.size)
            )
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


def table(listing: dict, outcomes: list[Outcome], emulator: str, operators: Collection[str]) -> str:
    """results/ops_amd_emulated.md, of these operators."""
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
    missing = [entry for entry in missing if not entry["operators"] or {*operators} & {*entry["operators"]}]
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
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the table")
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
    wanted = options.op or list(operators)
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
    outcomes = [one for one in outcomes if one.operator in wanted]
    options.out.write_text(table(listing, outcomes, emulator.version, wanted))
    faults = sum(bool(one.fault) for one in outcomes)
    print(f"{options.out}: {len(outcomes)} calls, {faults} faults or gaps")


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
