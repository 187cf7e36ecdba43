"""The entry of a kernel in kernels.json: what its code object says, and what its operator's LAUNCHES say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from custom_ops import GPU_OPERATORS
from custom_ops.amd_targets import simd
from custom_ops.code_objects.elf import demangled, descriptors_of, metadata_of, registers_at_start
from custom_ops.op import Argument, Launch, Struct, load

# C type of an argument -> bytes; pointers are 8.
_SIZES = {"int32": 4, "uint32": 4, "int64": 8, "float": 4}

# Element types as the demangler writes them.
_DTYPES = {"float": "float32", "_Float16": "float16", "bf16_t": "bfloat16"}


def describe(objects: list[Path]) -> list[dict]:
    """The entries of kernels.json.

    Raises FileNotFoundError without LLVM's tools, ValueError when an object and the operators' LAUNCHES disagree.
    """
    known = {name: launch for folder in GPU_OPERATORS for name, launch in load(folder).launches.items()}
    entries = []
    for path in objects:
        kernels = metadata_of(path)
        names = demangled([metadata["name"] for metadata in kernels]) if kernels else []
        descriptors = dict(descriptors_of(path.read_bytes()))
        for metadata, (name, arguments) in zip(kernels, names, strict=True):
            if name not in known:
                raise ValueError(f"{path}: kernel {name} is in no operator's LAUNCHES")
            descriptor = descriptors[metadata["name"]]
            entries.append(_entry(path, metadata, descriptor, name, arguments, known[name]))
    return entries


def _entry(
    path: Path, metadata: dict, descriptor: bytes, name: str, template: list[str], launch: Launch
) -> dict[str, object]:
    arch = path.name.split("_")[0]
    if len(metadata["args"]) != len(launch.arguments) or len(template) != len(launch.template):
        raise ValueError(
            f"{path}: {name} takes {len(metadata['args'])} arguments, its Launch names {len(launch.arguments)} "
            "(the compiler's own hidden ones count: a kernel that asks for the grid's size has such)"
        )
    values = dict(zip(launch.template, map(_template_value, template), strict=True))
    block = eval(launch.block, {}, values)
    if block != int(metadata["max_flat_workgroup_size"]):
        raise ValueError(f"{path}: {name} is compiled for {metadata['max_flat_workgroup_size']} threads, not {block}")
    dtype = _DTYPES[template[launch.template.index("T")]]
    return {
        "symbol": metadata["name"],
        "kernel": name,
        "arch": arch,
        "object": path.name,
        "dtype": dtype,
        "computes": launch.computes,
        "template": values,
        "arguments": [
            field
            for place, (compiled, argument) in enumerate(zip(metadata["args"], launch.arguments, strict=True))
            for field in _fields(f"{path}: {name}", place, compiled, argument)
        ],
        "kernarg_bytes": int(metadata["kernarg_segment_size"]),
        "sizes": dict(launch.sizes),
        "requires": list(launch.requires),
        "itemsize": 4 if dtype == "float32" else 2,
        "block": [block, 1, 1],
        "grid": list(launch.grid),
        "lds_bytes": {"static": int(metadata["group_segment_fixed_size"]), "dynamic": launch.lds_bytes},
        "registers_at_start": registers_at_start(arch, descriptor),
        "wave_size": int(metadata["wavefront_size"]),
        "vgprs": int(metadata["vgpr_count"]),
        "sgprs": int(metadata["sgpr_count"]),
        "vgpr_spills": int(metadata["vgpr_spill_count"]),
        "sgpr_spills": int(metadata["sgpr_spill_count"]),
        "scratch_bytes": int(metadata["private_segment_fixed_size"]),
        "occupancy": _occupancy(arch, int(metadata["vgpr_count"])),
    }


def _template_value(text: str) -> str | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


def _fields(where: str, place: int, compiled: dict, argument: Argument | Struct) -> Iterator[dict[str, object]]:
    """The entries of the kernel's argument number `place`: one, or a struct's fields.

    `compiled` is what the compiler knows of it. Raises ValueError when it and the Launch disagree.
    """
    offset, size = int(compiled["offset"]), int(compiled["size"])
    if isinstance(argument, Argument):
        pointer = argument.type.endswith("*")
        if size != _size(argument) or pointer != (compiled["value_kind"] == "global_buffer"):
            raise ValueError(f"{where}: argument {argument.name} is no {argument.type}")
        yield _entry_of(argument, place, offset)
        return
    end, largest = offset, 1
    for field in argument.fields:
        largest = max(largest, _size(field))
        end += -end % _size(field)
        yield _entry_of(field, place, end)
        end += _size(field)
    if size != end - offset + -end % largest:
        raise ValueError(f"{where}: {argument.name} has {size} bytes, its fields {end - offset}")


def _size(argument: Argument) -> int:
    return 8 if argument.type.endswith("*") else _SIZES[argument.type]


def _entry_of(argument: Argument, place: int, offset: int) -> dict[str, object]:
    entry = {
        "name": argument.name,
        "type": argument.type,
        "parameter": place,
        "offset": offset,
        "size": _size(argument),
        "meaning": argument.meaning,
    }
    if not argument.type.endswith("*"):
        return entry
    return entry | {
        "access": "read" if argument.type.startswith("const") else "write",
        "elements": argument.elements,
        "alignment": argument.alignment,
        "optional": argument.optional,
    }


def _occupancy(arch: str, vgprs: int) -> int:
    """Waves a SIMD as the vector registers allow; LDS and the block size may allow fewer."""
    device = simd(arch)
    used = max(-(-vgprs // device.granularity) * device.granularity, device.granularity)
    return min(device.waves, device.registers // used)
