"""tinygrad's emulator of AMD GPUs, its mistakes mended, and the code objects that it runs (see emulate_amd.py)."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# The emulator's names of the instruction sets.
_ISAS = {"gfx9": "cdna", "gfx11": "rdna3", "gfx12": "rdna4"}
_POISON = 0xA5A5A5A5  # in registers and padding that nothing may read
_LDS_GRANULE = 512  # bytes, of the field in COMPUTE_PGM_RSRC2


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
            isa_of(kernel.entry["arch"]),
            user[: kernel.rsrc2 >> 1 & 31],
        )


def isa_of(arch: str) -> str:
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
