#!/usr/bin/env python3
"""A component's raw export without its weights, for bench_gpu_step.py --graph: some 20 kB instead of gigabytes.

    sd-ort export --preset sd15 --random-weights --component unet EXPORT
    python scripts/measure/make_step_graph.py sd15 EXPORT unet sd15.unet.onnx.xz

Every initializer that holds a parameter is renamed to <parameter>, or <parameter>.T where the exporter transposed it,
and keeps its shape; other constants stay. Exporters fold weights under names of their own, so parameters are told by
their numbers: the preset's random weights, made again from the same seed.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sd_ort.core import folder
from sd_ort.family.checkpoints import open_source
from sd_ort.family.signatures import MODEL_OF

Key = tuple[float, ...]


def key(array: np.ndarray) -> Key:
    """Enough of an array's numbers to find it among random ones."""
    flat = array.ravel()
    return (array.size, *map(float, (flat[0], flat[array.size // 2], flat[-1])))


def names(parameters: Mapping[str, np.ndarray]) -> dict[Key, tuple[str, np.ndarray]]:
    """Name and numbers of each parameter, and of each matrix's transpose."""
    found = {}
    for name, array in parameters.items():
        if array.ndim == 2:
            found[key(array.T)] = (f"{name}.T", array.T)
        found[key(array)] = (name, array)
    return found


def strip(path: Path, parameters: Mapping[str, np.ndarray]) -> ir.Model:
    """The model without the numbers of `parameters`. Raises SystemExit when one of its weights is none of them."""
    model = ir.load(path)  # maps the weights
    known = names(parameters)
    for value in list(model.graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or not tensor.shape:
            continue
        array = tensor.numpy()
        name, numbers = known.get(key(array), ("", array))
        if name and np.array_equal(numbers.reshape(array.shape), array):
            value.name = name
            value.const_value = ir.ExternalTensor(
                "random", None, None, tensor.dtype, shape=ir.Shape(array.shape), name=name
            )
        elif array.size > 10_000:
            raise SystemExit(f"{tensor.name} {tensor.shape} of {path} is no parameter: exported from another seed?")
        else:
            value.const_value = ir.tensor(array.copy(), name=value.name)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("export", type=Path)
    parser.add_argument("component")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    module = open_source(None, options.preset, True, 0).load(MODEL_OF.get(options.component, options.component))
    parameters = {name: value.numpy() for name, value in module.state_dict().items()}
    model = strip(options.export / options.component / folder.MODEL, parameters)
    options.out.write_bytes(lzma.compress(ir.to_proto(model).SerializeToString(), preset=9))
    left = sum(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values())
    print(f"{options.out}: {options.out.stat().st_size / 1e3:.0f} kB, {left} weights of {len(parameters)} parameters")


if __name__ == "__main__":
    main()
