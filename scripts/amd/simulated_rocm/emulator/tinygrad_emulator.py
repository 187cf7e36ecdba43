"""Instruction functions of AMD GPUs as C source, from the emulator of a tinygrad checkout.

The emulator (test/mockgpu/amd/emu.py) translates AMD's pseudocode of each instruction. This module corrects its
errors and returns the generated C instead of running it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Flags of an instruction function; instruction_table.cc reads them.
BARRIER = 1  # the wave waits for the others of its block
LOCKED = 2  # no other host thread may run such an instruction at the same time
_CACHE_CONTROL = {
    *("BUFFER_GL0_INV", "BUFFER_GL1_INV", "BUFFER_WBL2", "BUFFER_INV"),
    *("GLOBAL_INV", "GLOBAL_WB", "GLOBAL_WBINV"),
}
_PERMUTATIONS = {"DS_PERMUTE_B32", "DS_BPERMUTE_B32", "DS_BPERMUTE_FI_B32"}
_HALF_LOAD = re.compile(r"DS_(?:LOAD|READ)_((?:U8|I8|U16)_D16(?:_HI)?)")
# (encoding, opcode) of buffer_gl0_inv and buffer_gl1_inv, which the emulator does not decode
_RDNA3_CACHE_CONTROL = {(0x38, 43), (0x38, 44)}


@dataclass(frozen=True)
class InstructionFunction:
    """C function of one instruction encoding. Fields outside `mask`, such as register numbers, are read at run time.

    `arguments` are indices into the state of a wave: scalar registers, vector registers, memory (null), LDS, scratch
    memory, accumulation registers. `source` is empty for the functions of extra_instructions.c.
    """

    symbol: str
    arguments: tuple[int, ...]
    flags: int
    source: str = ""


class TinygradEmulator:
    """Translator from machine code to C, by the emulator of a tinygrad checkout."""

    def __init__(self, checkout: Path, isa: str) -> None:
        """`isa` is the emulator's name of an instruction set, rdna3, rdna4 or cdna, or cdna4 for that of gfx950."""
        os.environ["DEV"] = "CPU"
        os.environ["CACHELEVEL"] = "0"
        sys.path.insert(0, str(checkout))
        from tinygrad.helpers import Target
        from tinygrad.renderer.cstyle import ClangRenderer

        emu: Any = _import_emulator()
        emu.decode_inst = _decode_cdna_correctly(emu.decode_inst)
        _mask_lds_addresses(emu)
        _order_dual_issue(emu)
        _allow_constant_wmma_source(emu)
        _allow_half_division(emu)
        _share_rows(emu)
        _load_halves_from_odd_addresses()
        if isa == "cdna":
            _read_fnuz(emu)
        if isa.startswith("cdna"):
            isa = "cdna"
            _ignore_scalar_address_of_flat(emu)
            _read_half_constants(emu)
            _broadcast_rows(emu)
        self._emu: Any = emu
        self._renderer: Any = ClangRenderer(Target("CPU", "CLANG", "x86_64,native"))
        self._renderer.compiler.compile_cached = lambda source: b""  # instruction_compiler.py compiles in batches
        self._isa = isa
        self._functions: list[tuple[type, int, int, int, InstructionFunction]] = []  # type, bits, mask, bytes

    @property
    def wave_size(self) -> int:
        return int(self._emu._wave_size(self._isa))

    @property
    def exec_register(self) -> int:
        return int(self._emu.EXEC_LO.offset)

    def decode(self, code: bytes) -> tuple[Any, int]:
        """Return the instruction at the start of `code` and its size in bytes. Raises ValueError if there is none."""
        word = int.from_bytes(code[:4], "little")
        if self._isa == "rdna3" and (word >> 26, word >> 18 & 0xFF) in _RDNA3_CACHE_CONTROL:
            return SimpleNamespace(op=SimpleNamespace(name="BUFFER_GL0_INV"), size=lambda: 8), 8
        instruction = self._emu.decode_inst(code, self._isa)
        return instruction, instruction.size()

    def function(self, instruction: Any, code: bytes) -> InstructionFunction:
        """Return the function of an instruction: a new one, or one for other operands. Raises an exception if the
        emulator cannot translate it."""
        name = getattr(getattr(instruction, "op", None), "name", "")
        if name in _CACHE_CONTROL:
            return InstructionFunction(f"cache_control_{instruction.size()}", (0,), 0)
        if name == "DS_SWIZZLE_B32":
            return InstructionFunction("ds_swizzle_b32", (0, 1), 0)
        data = 5 if getattr(instruction, "acc", 0) else 1
        if name in _PERMUTATIONS:
            return InstructionFunction(name.lower(), (0, 1, data), 0)
        if load := _HALF_LOAD.fullmatch(name):
            return InstructionFunction(f"ds_load_{load[1].lower()}", (0, 1, data, 3), 0)
        size = instruction.size()
        bits = int.from_bytes(code[:size], "little")
        for kind, base, mask, length, function in self._functions:
            if kind is type(instruction) and length == size and bits & mask == base:
                return function
        base, mask, function = self._translate(instruction, code, name)
        self._functions.append((type(instruction), base, mask, size, function))
        return function

    def _translate(self, instruction: Any, code: bytes, name: str) -> tuple[int, int, InstructionFunction]:
        from tinygrad.helpers import Context
        from tinygrad.uop.ops import Ops

        emu = self._emu
        if name.startswith("BUFFER_") and "DWORD" not in name:
            raise ValueError("the emulator takes every buffer instruction for one of whole words")
        handler = next(emu._INST_HANDLERS[kind] for kind in type(instruction).__mro__ if kind in emu._INST_HANDLERS)
        context = emu._Ctx(instruction.size(), self.wave_size)
        sink = handler(instruction, context)
        base, mask, size = context.canonical_mask(code)
        # The type too: encodings with the same fixed bits, such as VOP3 and VOP3SD, are different functions.
        label = (
            f"{emu._op_name(instruction)}_{type(instruction).__name__}_{base.to_bytes(size, 'little').hex()}".lower()
        )
        sink = sink.replace(arg=emu.KernelInfo(name=label)).rtag(1)
        with Context(NOOPT=1, CHECK_OOB=0, TUPLE_ORDER=0, EMULATED_DTYPES="", CAPTURE_PROCESS_REPLAY=0, PROFILE=0):
            program = emu.to_program(sink, self._renderer)
        source = next(part.arg for part in program.src if part.op is Ops.SOURCE)
        is_barrier = getattr(instruction, "op", None) in emu._BARRIER_OPS | emu._BARRIER_SOP1_OPS
        flags = BARRIER * is_barrier | LOCKED * needs_lock(name)
        return base, mask, InstructionFunction(program.arg.function_name, tuple(program.arg.globals), flags, source)


_HALF_TO_FLOAT = "return exp.eq(_c(0)).where(_c(0), f32_bits)"
_HALF_TO_FLOAT_WITH_SUBNORMALS = """return exp.eq(_c(0)).where(
      (sign << _c(31)) | (mant.cast(dtypes.float32) * UOp.const(2.0**-24, dtypes.float32)).bitcast(dtypes.uint32),
      exp.eq(_c(31)).where((sign << _c(31)) | _c(0x7F800000) | (mant << _c(13)), f32_bits))"""


_WMMA_CONVERSION = "cvt = _FUNCS['bf16_to_f32' if is_bf16 else 'f16_to_f32']"
_WMMA_CONVERSION_OF_FLOAT8 = (
    "cvt = _FUNCS['bf16_to_f32' if is_bf16 else 'fp8_to_f32' if 'FP8_FP8' in op_name else 'f16_to_f32']"
)


def _read_fnuz(emu: Any) -> None:
    """Make float8 numbers (e4m3) FNUZ, as gfx942 has them: bias 8, no -0 and no infinities, and NaN is 0x80 alone.

    The emulator's are OCP's, as on gfx950.
    """
    dtypes = emu.dtypes

    def to_float(value: Any) -> Any:
        byte = value.cast(dtypes.uint32) & emu._c(0xFF)
        sign, exponent, mantissa = (byte >> emu._c(7)) << emu._c(31), (byte >> emu._c(3)) & emu._c(15), byte & emu._c(7)
        scale = emu.UOp.const(2.0**-10, dtypes.float32)
        subnormal = sign | (mantissa.cast(dtypes.float32) * scale).bitcast(dtypes.uint32)
        normal = sign | ((exponent + emu._c(119)) << emu._c(23)) | (mantissa << emu._c(20))
        bits = exponent.eq(emu._c(0)).where(subnormal, normal)
        return byte.eq(emu._c(0x80)).where(emu._c(0x7FC00000), bits).bitcast(dtypes.float32)

    emu._FUNCS["fp8_to_f32"] = to_float


def _ignore_scalar_address_of_flat(emu: Any) -> None:
    """Make FLAT instructions of gfx9 read their 64-bit address: their field of a scalar address is 0, not s0."""
    optional_field = emu._Ctx.optional_field

    def field(context: Any, instruction: Any, name: str) -> Any:
        if name == "saddr" and emu._op_name(instruction).startswith("FLAT_"):
            return None
        return optional_field(context, instruction, name)

    emu._Ctx.optional_field = field


def _read_half_constants(emu: Any) -> None:
    """Read constants such as 1.0 as halves where gfx9's VOP1, VOP2 and VOPC have a source of 16 bits."""

    class HalfConstants(emu._Ctx):
        __slots__ = ()

        def rsrc_dyn(self, off: object, lane: object, bits: int = 32, *rest: object, **options: object) -> object:
            return super().rsrc_dyn(off, lane, 16 if bits == 32 else bits, *rest, **options)

    def wrap(compile_instruction: Callable) -> Callable:
        def compile_with_constants(instruction: Any, context: Any) -> object:
            if instruction.has_half_source:
                context.__class__ = HalfConstants
            return compile_instruction(instruction, context)

        return compile_with_constants

    for kind in (emu.irc.VOP1, emu.irc.VOP2, emu.irc.VOPC):
        emu._INST_HANDLERS[kind] = wrap(emu._INST_HANDLERS[kind])


def _broadcast_rows(emu: Any) -> None:
    """Make DPP's row_bcast:15 and row_bcast:31 of gfx9 read lane 15 of the row before, and lane 31 in rows 2 and 3.

    The emulator reads the first lane of a row itself.
    """
    dpp16_control = emu._dpp16_ctrl

    def control(lane: Any, dpp: int, *rest: Any) -> tuple[Any, Any, Any]:
        source, enabled, valid = dpp16_control(lane, dpp, *rest)
        if dpp in (0x142, 0x143):
            rows = 16 if dpp == 0x142 else 32
            first = lane & emu._c(63 & -rows)
            source, valid = first.cast(emu.dtypes.int) - emu._c(1, emu.dtypes.int), first.ne(emu._c(0))
        return source, enabled, valid

    emu._dpp16_ctrl = control


def _load_halves_from_odd_addresses() -> None:
    """Let 16-bit loads read odd addresses, as the hardware does. The emulator rounds them down."""
    from test.mockgpu.amd.pcode import Parser
    from tinygrad.dtype import dtypes

    load = Parser._handle_mem_load

    def load_at(parser: Any, address: Any, dtype: Any) -> Any:
        if dtype not in (dtypes.uint16, dtypes.int16):
            return load(parser, address, dtype)
        low, high = (
            load(parser, address + address.const_like(byte), dtypes.uint8).cast(dtypes.uint32) for byte in range(2)
        )
        return (low | high * low.const_like(256)).cast(dtypes.uint16).bitcast(dtype)

    Parser._handle_mem_load = load_at


def _share_rows(emu: Any) -> None:
    """Make DPP's row_share:n read lane n of the lane's own 16. The emulator does not have it."""
    dpp16_control = emu._dpp16_ctrl

    def control(lane: Any, dpp: int, *rest: Any) -> tuple[Any, Any, Any]:
        if dpp & ~15 != 0x150:
            return dpp16_control(lane, dpp, *rest)
        source, enabled, valid = dpp16_control(lane, 0xE4, *rest)  # the lane itself
        row = source & emu._c(~15, emu.dtypes.int)
        return row + emu._c(dpp & 15, emu.dtypes.int), enabled, valid

    emu._dpp16_ctrl = control


def _import_emulator() -> ModuleType:
    """Import test.mockgpu.amd.emu of the checkout, with a line of two nested functions replaced.

    Its MFMA takes subnormal halves for 0 and infinity for 65536. gfx942 and newer do neither; gfx90a does flush
    subnormals, which is not simulated. Its WMMA takes float8 for halves.
    """
    spec = importlib.util.find_spec("test.mockgpu.amd.emu")
    assert spec is not None
    path = Path(str(spec.origin))
    source = path.read_text()
    for line in (_HALF_TO_FLOAT, _WMMA_CONVERSION):
        if line not in source:
            raise RuntimeError(f"{path} converts operands in an unknown way: correct MFMA and WMMA anew")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    source = source.replace(_HALF_TO_FLOAT, _HALF_TO_FLOAT_WITH_SUBNORMALS)
    source = source.replace(_WMMA_CONVERSION, _WMMA_CONVERSION_OF_FLOAT8)
    exec(compile(source, path, "exec"), vars(module))
    return module


def needs_lock(name: str) -> bool:
    """Whether an instruction reads, changes and writes words of memory that other blocks use at the same time.

    The emulator stores bytes and halves as changes of the word around them: two blocks that store neighboring halves
    would otherwise lose one of them. LDS belongs to one block.
    """
    is_part_of_word = "STORE" in name and any(part in name for part in ("_B8", "_B16", "BYTE", "SHORT"))
    return not name.startswith("DS_") and ("ATOMIC" in name or is_part_of_word)


def _decode_cdna_correctly(decode: Callable) -> Callable:
    """Wrap the decoder with two corrections for CDNA.

    v_mfma_f32_16x16x16_bf16_1k of gfx90a is VOP3P opcode 0x67. The emulator's tables are of gfx942 and newer, where
    the same instruction is 0x61 and 0x67 is undefined. 16-bit operands of VOP1, VOP2 and VOPC in registers from v128
    on are taken for high halves of v0 and on, as on RDNA. Widened to 32 bits they are correct, except for constants
    such as 1.0: see _read_half_constants.
    """

    def decode_inst(data: bytes, isa: str) -> object:
        if isa == "cdna" and data[2:4] == b"\xe7\xd3":
            data = data[:2] + b"\xe1" + data[3:]
        instruction = decode(data, isa)
        if isa == "cdna" and type(instruction).__name__.removesuffix("_LIT") in ("VOP1", "VOP2", "VOPC"):
            bits = instruction.canonical_op_bits
            vars(instruction)["has_half_source"] = bits.get("s0") == 16
            vars(instruction)["canonical_op_bits"] = {name: max(width, 32) for name, width in bits.items()}
        return instruction

    return decode_inst


def _mask_lds_addresses(emu: ModuleType) -> None:
    """Use LDS address 0 in inactive lanes. The emulator also reads there, and such an address can be anything."""

    class MaskedContext(emu._Ctx):  # type: ignore[name-defined]
        __slots__ = ()

        def rvgpr_dyn(self, reg: object, lane: object, valid: object = None) -> object:
            value = super().rvgpr_dyn(reg, lane, valid)
            return emu._lane_active(self.rexec(), lane).where(value, emu._c(0))

    def compile_ds(instruction: object, context: object) -> object:
        context.__class__ = MaskedContext
        return emu._compile_mem_op(instruction, context)

    for instructions in (emu.ir3, emu.ir4, emu.irc):
        emu._INST_HANDLERS[instructions.DS] = compile_ds


def _order_dual_issue(emu: ModuleType) -> None:
    """Read the operands of both halves of a VOPD before either writes. The emulator writes X before it reads Y."""

    def compile_vopd(instruction: object, context: object) -> object:
        sources: list = []

        class OrderedContext(emu._Ctx):  # type: ignore[name-defined]
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

        context.__class__ = OrderedContext
        return emu._compile_vopd(instruction, context)

    for instructions in (emu.ir3, emu.ir4):
        emu._INST_HANDLERS[instructions.VOPD] = compile_vopd


def _allow_constant_wmma_source(emu: ModuleType) -> None:
    """Allow the constant 0 as C of a WMMA. The emulator takes its number, 128, for that of a register."""

    def compile_vop3p(instruction: object, context: object) -> object:
        if "WMMA" in instruction.op.name:  # type: ignore[attr-defined]
            source = context.inst_field(type(instruction).src2)  # type: ignore[attr-defined]
            reads = iter(range(1 << 16))

            class ContextWithConstant(emu._Ctx):  # type: ignore[name-defined]
                __slots__ = ()

                def rvgpr_dyn(self, *arguments: object) -> object:
                    value = super().rvgpr_dyn(*arguments)
                    is_c = next(reads) >= 512  # after 256 elements of A and of B
                    return (source >= emu._c(256)).where(value, emu._c(0)) if is_c else value

            context.__class__ = ContextWithConstant
        return emu._compile_vop3p(instruction, context)

    for instructions in (emu.ir3, emu.ir4):
        emu._INST_HANDLERS[instructions.VOP3P] = compile_vop3p


def _allow_half_division(emu: ModuleType) -> None:
    """Rewrite the signed zero in v_div_fixup_f16, a literal that the emulator's parser does not accept."""
    for table in (emu.PCODE_RDNA3, emu.PCODE_RDNA4, emu.PCODE_CDNA):
        for op in [op for op in table if op.name == "V_DIV_FIXUP_F16"]:
            table[op] = table[op].replace("-16'0.0 : 16'0.0", "16'F(-0.0F) : 16'F(0.0F)")
