"""The `onnx` package's own test cases, optimized and compared with ONNX Runtime on their sources.

    python scripts/checks/onnx_backend.py [--quarter N] [--target portable cpu cuda] [--out results/onnx_backend.md]

Cases of the kinds node, simple, pytorch-converted and pytorch-operator go through `optimize` for each target in this
process; the CPU runs the results, with the function bodies of operators that it lacks. A case that ONNX Runtime refuses
or that draws random numbers has nothing to be compared with. The exit code is 1 if an output differs or sd-ort
crashes. `--quarter` (0 to 3) runs every fourth case.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.backend.test.loader import load_model_tests

from scripts.report import table
from sd_ort.core.errors import SdOrtError
from sd_ort.graphs.cpu_emulation import cpu_equivalent
from sd_ort.inspect.verify import RANDOM_OPS
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.stages import optimize

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
TARGETS = ("portable", "cpu", "cuda")
RANDOM = frozenset(RANDOM_OPS) | {"Dropout"}
UNRELEASED = {"ALLOW_RELEASED_ONNX_OPSET_ONLY": "0"}  # environment in which ONNX Runtime opens onnx's newest opset
# Not valid before either: Range reads vectors of one element, which ONNX Runtime does not see behind an If.
INVALID = ("test_affine_grid_2d_align_corners_expanded", "test_affine_grid_2d_expanded")
RTOL, ATOL = 1e-4, 1e-5  # of float32; a fused graph adds in another order
IR_VERSION = 11  # newest that ONNX Runtime reads
EQUAL, WRONG, CRASH, REFUSED, NOTHING = "equal", "wrong", "crash", "refused", "not comparable"


def cases(kind: str) -> list[Any]:
    """Return the test cases of a kind, sorted by name."""
    return sorted(load_model_tests(kind=kind), key=lambda case: str(case.name))


def inputs(case: Any, model: onnx.ModelProto) -> list[dict[str, Any]]:
    """Return the inputs of each data set by name; absent optional inputs are left out."""
    weights = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in weights]
    if case.data_sets is not None:
        sets: list[list[Any]] = [list(arrays) for arrays, _ in case.data_sets]
    else:
        folders = sorted(Path(case.model_dir).glob("test_data_set_*"))
        sets = [[read_value(f / f"input_{i}.pb", value.type) for i, value in enumerate(values)] for f in folders]
    return [
        {value.name: array for value, array in zip(values, arrays, strict=False) if array is not None}
        for arrays in sets
    ]


def read_value(path: Path, kind: onnx.TypeProto) -> Any:
    """Return the tensor or sequence in a file of a data set."""
    if kind.HasField("sequence_type"):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def session(path: Path) -> ort.InferenceSession:
    """Open a model on one thread without ONNX Runtime's own optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(opened: ort.InferenceSession, feeds: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Return the outputs of each data set. A CPU-equivalent model takes float32 for float16."""
    wide = {value.name for value in opened.get_inputs() if value.type == "tensor(float)"}
    return [opened.run(None, {n: feed_value(a, n in wide) for n, a in feed.items()}) for feed in feeds]


def feed_value(value: Any, as_float32: bool) -> Any:
    """Return an input of a test case as ONNX Runtime's Python API takes it: NumPy's scalars are arrays there."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value.astype(np.float32) if as_float32 else value


def are_equal(actual: Any, expected: Any) -> bool:
    """Return whether two outputs of ONNX Runtime, nested ones too, are of the same kind and as good as equal."""
    if isinstance(expected, list):
        same = isinstance(actual, list) and len(actual) == len(expected)
        return same and all(map(are_equal, actual, expected))
    if not isinstance(expected, np.ndarray):
        return bool(actual == expected)
    if expected.dtype == np.float16 and actual.dtype == np.float32:
        actual = actual.astype(np.float16)  # of a CPU-equivalent model
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    if not np.issubdtype(expected.dtype, np.number):
        return bool((actual == expected).all())
    if expected.dtype == np.float16:
        return bool(np.allclose(actual, expected, rtol=2e-3, atol=1e-3, equal_nan=True))
    return bool(np.allclose(actual, expected, rtol=RTOL, atol=ATOL, equal_nan=True))


def results(case: Any, targets: Iterable[str], work: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (target, verdict, reason) of a case."""
    model = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
    source = work / "in.onnx"
    model.ir_version = min(model.ir_version, IR_VERSION)
    onnx.save(model, source)
    try:
        if any(node.op_type in RANDOM for node in model.graph.node):
            raise ValueError("draws random numbers")
        feeds = inputs(case, model)
        reference = session(source)
        expected = run_session(reference, feeds)
    except Exception as error:  # ONNX Runtime's have no common base class
        yield from ((target, NOTHING, summary(error)) for target in targets)
        return
    for target in targets:
        out = work / f"{target}.onnx"
        try:
            optimize(source, out, target=target)
            with cpu_equivalent(out) as (path, _):
                actual = run_session(session(path), feeds)
        except SdOrtError as error:
            invalid = "ONNX Runtime rejects" in str(error) and case.name not in INVALID
            yield target, WRONG if invalid else REFUSED, summary(error).replace(f"{target} is", "the result is")
        except Exception as error:
            yield target, CRASH, summary(error)
        else:
            yield target, EQUAL if are_equal(actual, expected) else WRONG, ""
        finally:
            for path in work.glob(f"{target}.onnx*"):
                path.unlink()


def summary(error: BaseException) -> str:
    """Return the first line of an exception without names of nodes and files, of ONNX Runtime's only the kind."""
    text = str(error).split("\n")[0] if str(error) else type(error).__name__
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : (\w+) : .*", r"ONNX Runtime: \1", text)
    return " ".join(re.sub(r"/\S+|'[^']*'|\([^)]*\)|\d+", "…", text).split())


def run(
    quarter: int | None, targets: Iterable[str], on_fault: Callable[[str], None], names: Container[str] | None = None
) -> Counter[tuple[str, str, str]]:
    """Return how many cases (those of `names` if given) have each (target, verdict, reason)."""
    counts: Counter[tuple[str, str, str]] = Counter()
    targets = tuple(targets)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            chosen = [case for case in cases(kind) if names is None or case.name in names]
            for case in chosen[slice(quarter, None, 4 if quarter is not None else 1)]:
                for target, verdict, reason in results(case, targets, Path(folder)):
                    counts[target, verdict, reason] += 1
                    if verdict in (WRONG, CRASH):
                        on_fault(f"{verdict}: {kind} {case.name} {target} {reason}")
    return counts


def faults(counts: Counter[tuple[str, str, str]]) -> int:
    """Return the number of wrong results and crashes."""
    return sum(count for (_, verdict, _), count in counts.items() if verdict in (WRONG, CRASH))


def report(counts: Counter[tuple[str, str, str]], seconds: float, messages: list[str]) -> str:
    """Return Markdown: verdicts by target, and reasons of refusals."""
    targets = list(dict.fromkeys(target for target, _, _ in counts))
    totals = Counter((target, verdict) for (target, verdict, _), count in counts.items() for _ in range(count))
    faults = sum(totals[each, verdict] for each in targets for verdict in (WRONG, CRASH))
    lines = [
        "# ONNX's own test cases",
        "",
        f"{faults} of {totals.total()} results are wrong or crash.",
        "",
        f"Written at commit {commit()} by `scripts/checks/onnx_backend.py` in {seconds:.0f} s of processor time: "
        f"onnx {onnx.__version__}'s test cases ({', '.join(KINDS)}), optimized and compared with ONNX Runtime "
        f"{ort.__version__} on the source.",
        "",
    ]
    verdicts = (EQUAL, WRONG, CRASH, REFUSED, NOTHING)
    lines += table(("target", *verdicts), ((each, *(totals[each, v] for v in verdicts)) for each in targets))
    for verdict in (REFUSED, NOTHING):
        reasons: Counter[str] = Counter()
        for (target, v, reason), count in counts.items():
            if v == verdict and (verdict == REFUSED or target == targets[0]):
                reasons[reason] += count
        lines += ["", f"{verdict}{' (all targets)' if verdict == REFUSED else ''}:", ""]
        lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join([*lines, *(["", "Faults:", "", *(f"- {line}" for line in messages)] if messages else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quarter", type=int, choices=range(4))
    parser.add_argument("--target", nargs="*", default=TARGETS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"{machine()}\n{versions()}, commit {commit()}")
    os.environ.update(UNRELEASED)
    messages: list[str] = []

    def log(line: str) -> None:
        messages.append(line)
        print(line, flush=True)

    started = time.process_time()
    counts = run(options.quarter, options.target, log)
    text = report(counts, time.process_time() - started, messages)
    print(text)
    if options.out:
        options.out.write_text(text)
    sys.exit(bool(faults(counts)))


if __name__ == "__main__":
    main()
