"""Run the CPU operators under AddressSanitizer and UndefinedBehaviorSanitizer, on nodes that are right and hostile.

    python scripts/checks/sanitize_ops.py                                     # all operators; some minutes
    python scripts/checks/sanitize_ops.py --operators skip_layer_norm bias_add --nodes 30

Builds the library with the sanitizers (GCC or clang), in a temporary folder, and runs ONNX Runtime with it in a second
process: every small case of each operator, and `--nodes` damaged ones drawn from them: axes that are empty, one longer,
dropped or added, inputs left out, attributes of odd values, data with NaN and infinity. A node may be refused; what a
sanitizer finds ends the run with 1 and its report.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import helper

from custom_ops import CPU_OPERATORS
from custom_ops.operator_spec import CustomOperator, OperatorCase, generate_inputs, load, output_dtype
from scripts.checks import sanitizers
from sd_ort.runtime.machine import commit, machine, versions

SOURCES = Path(__file__).resolve().parents[2] / "custom_ops"
ODD = (0, -1, 1, 3, 1 << 31, (1 << 62) + 1, -(1 << 63))
ODD_REAL = (0.0, -1.0, float("nan"), float("inf"), 1e38)
SIZE_LIMIT = 1 << 22  # numbers of one input: larger ones say nothing more


def build(operators: Sequence[str], folder: Path) -> Path:
    """Compile the library with these operators, from links to the sources and an operators.txt of its own."""
    from sd_ort.runtime.headers import find_headers

    sources = folder / "sources"
    sources.mkdir()
    for path in SOURCES.iterdir():
        if path.name != "operators.txt":
            (sources / path.name).symlink_to(path)
    for name in ("registry.cc", "cpu_library.cc", "CMakeLists.txt"):  # they include what lies beside them
        (sources / name).unlink()
        shutil.copy(SOURCES / name, sources)
    lines = (SOURCES / "operators.txt").read_text().splitlines()
    selected = [
        line for line in lines if not line.startswith("SD_ORT_") or line.split("(")[1].split(",")[0] in operators
    ]
    (sources / "operators.txt").write_text("\n".join(selected) + "\n")
    headers = find_headers(None, lambda line: None)
    return sanitizers.build(sources, folder / "build", f"-DORT_INCLUDE_DIR={headers}") / "libsd_ort_ops.so"


def damaged(operator: CustomOperator, nodes: int) -> Iterator[OperatorCase]:
    """`nodes` cases with one or two things wrong; the same ones each time."""
    generator = random.Random(operator.name)
    cases = [case for case in operator.cases if not case.benchmark]
    for number in range(nodes):
        case = generator.choice(cases)
        for _ in range(generator.choice((1, 1, 2))):
            if case.attributes and generator.random() < 0.3:
                name = generator.choice(sorted(case.attributes))
                odd = ODD if isinstance(case.attributes[name], int) else ODD_REAL
                case = replace(case, attributes=case.attributes | {name: generator.choice(odd)})
                continue
            name = generator.choice(sorted(case.inputs))
            shape = list(case.inputs[name])
            axis = generator.randrange(len(shape)) if shape else 0
            what = generator.choice(("empty", "one", "longer", "drop", "add", "leave out"))
            if what == "leave out" and name != operator.inputs[0]:
                case = replace(case, inputs={key: size for key, size in case.inputs.items() if key != name})
                continue
            if shape and what in ("empty", "one", "longer"):
                shape[axis] = {"empty": 0, "one": 1, "longer": shape[axis] + 1}[what]
            elif shape and what == "drop":
                del shape[axis]
            else:
                shape.insert(axis, generator.choice((0, 1, 2)))
            case = replace(case, inputs=case.inputs | {name: tuple(shape)})
        yield replace(case, name=f"damaged {number}")


def run(operator: CustomOperator, case: OperatorCase, dtype: str, library: Path, spoil: bool) -> str:
    """ "ran", or the first line of why not."""
    import onnxruntime as ort

    if any(np.prod(shape, dtype=float) > SIZE_LIMIT for shape in case.inputs.values()):
        return "too large"
    inputs = generate_inputs(operator, replace(case, distribution="normal"), dtype)
    if spoil:
        for array in inputs.values():
            if array.size and array.dtype.kind == "f":
                array.flat[0], array.flat[-1] = np.nan, np.inf
    names = [name if name in inputs else "" for name in operator.inputs]
    outputs = [
        name if name in (case.outputs or operator.output_shapes(operator.cases[0])) else "" for name in operator.outputs
    ]
    node = helper.make_node(operator.name, _trimmed(names), _trimmed(outputs), domain="sd_ort")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in case.attributes.items())
    graph = helper.make_graph(
        [node], "one",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
         for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(output_dtype(name, dtype)), None)
         for name in filter(None, outputs)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("sd_ort", 1)]
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 2
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # each buffer from malloc, which is watched
    options.register_custom_ops_library(str(library))
    try:
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, inputs)
    except Exception as error:  # pybind's exceptions share no base class
        return str(error).splitlines()[0]
    return "ran"


def _trimmed(names: list[str]) -> list[str]:
    while names and not names[-1]:
        names.pop()
    return names


def run_all(library: Path, operators: Sequence[str], nodes: int) -> None:
    for folder in operators:
        operator = load(folder)
        outcomes = [
            run(operator, case, dtype, library, spoil=bool(index % 2))
            for index, case in enumerate([*(c for c in operator.cases if not c.benchmark), *damaged(operator, nodes)])
            for dtype in ("float32", "float16")
            if dtype in case.dtypes
        ]
        ran = outcomes.count("ran")
        if ran < len(operator.cases) / 2:
            sys.exit(f"{operator.name}: only {ran} nodes ran, so nothing was checked: {outcomes[0]}")
        print(f"{operator.name}: {ran} nodes ran, {len(outcomes) - ran} were refused, no fault", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=CPU_OPERATORS, default=CPU_OPERATORS)
    parser.add_argument("--nodes", type=int, default=200, help="Damaged nodes of each operator.")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)  # the second process: run it
    options = parser.parse_args()
    if options.library:
        run_all(options.library, options.operators, options.nodes)
        return
    print(f"{machine()}\n{versions()}, commit {commit()}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        library = build(options.operators, Path(work))
        again = [sys.executable, __file__, "--library", library, "--nodes", options.nodes]
        command = [*map(str, again), "--operators", *options.operators]
        done = subprocess.run(command, env=sanitizers.environment(), check=False)
    if done.returncode:
        sys.exit(f"stopped with {done.returncode}: see the report above")


if __name__ == "__main__":
    main()
