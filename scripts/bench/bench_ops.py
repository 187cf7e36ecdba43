#!/usr/bin/env python3
"""The custom operators at Stable Diffusion's shapes, float16: GB/s or TFLOP/s beside ONNX Runtime, torch and the limit.

    python scripts/bench/bench_ops.py --arch sm_90 --out results/ops_sm_90.md
    python scripts/bench/bench_ops.py --arch sm_90 --operators quantized_nhwc_conv quantized_linear --every --out ...

Columns, microseconds a call: "tuned" is the candidate that the library's tuner chose and "default" the one without
tuning; "ORT" is ONNX Runtime's own CUDA kernel of the com.microsoft operator, if there is one (for attention with its
unfused path, and with the path it takes by itself); "eager" and "compiled" are torch; "cuDNN" and "flash" torch's
attention by these.
"copy" moves the same number of bytes, read and written, and is the limit of the bandwidth-bound operators. Products
have elements of float8; torch's columns are the same product in float16, without a gate and an output in float8.

Everything runs in CUDA graphs over as many sets of buffers as exceed the cache, so launch costs and cache hits are the
same for all. Bytes are those an operator must move: each input and output once. Needs torch and, for ONNX Runtime's
column, onnxruntime-gpu and onnx.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import QUANTIZED, CustomOperator, OperatorCase, load
from scripts.bench.torch_ops import ATTENTION, TORCH, Tensors
from sd_ort.runtime import build

NOT_IN_CONTRIB = ("upsample_nearest", "subpixel_shuffle")
BANDWIDTH = ("group_norm", "skip_group_norm", "bias_split_gelu", "bias_add", "skip_layer_norm", *NOT_IN_CONTRIB)
PRODUCTS = ("quantized_nhwc_conv", "quantized_linear")
ROTATED_BYTES = 400e6  # several times the largest cache
MOST_SETS = 100
FLOAT8 = torch.float8_e4m3fn
UNFUSED = 16  # provider option sdpa_kernel: AttentionBackend::MATH of ONNX Runtime


# ---- timing


def microseconds(launch: Callable[[int, int], None], sets: int) -> float:
    """Median time of one launch(set, stream), out of a graph that goes twice through the sets."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(min(sets, 3)):
            launch(index, stream.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = max(2 * sets, 20)
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            launch(index % sets, stream.cuda_stream)
    return median(graph.replay) / count


def median(run: Callable[[], object]) -> float:
    """Median microseconds of a run on the current stream, after two that warm up."""
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times[2:])[len(times[2:]) // 2]


def copy_time(moved: int, sets: int) -> float:
    """Microseconds of a copy that reads and writes `moved` bytes together: by the runtime or a kernel, the faster."""
    pairs = [[torch.zeros(moved // 4, device="cuda", dtype=torch.float16) for _ in range(2)] for _ in range(sets)]
    by_runtime = microseconds(lambda index, stream: void(pairs[index][1].copy_(pairs[index][0])), sets)
    by_kernel = microseconds(lambda index, stream: void(torch.neg(pairs[index][0], out=pairs[index][1])), sets)
    return min(by_runtime, by_kernel)


def void(value: object) -> None:
    """Drops what torch returns: the graph's memory pool takes it again."""


@dataclass
class Call:
    """Sets of buffers of one case."""

    operator: CustomOperator
    case: OperatorCase
    inputs: list[Tensors]
    outputs: list[Tensors]
    bytes: int

    @classmethod
    def allocate(cls, operator: CustomOperator, case: OperatorCase) -> Call:
        shapes = operator.output_shapes(case)
        dtypes = dict.fromkeys((*case.inputs, *shapes), torch.float16)
        dtypes |= dict.fromkeys(operator.float32_inputs, torch.float32)
        dtypes |= dict.fromkeys((*(n for n, kind in operator.integers.items() if kind == "8 bits"), QUANTIZED), FLOAT8)
        moved = sum(dtypes[name].itemsize * prod(shape) for name, shape in (case.inputs | shapes).items())
        sets = min(MOST_SETS, max(2, int(ROTATED_BYTES / moved)))
        inputs = [
            {name: torch.randn(shape, device="cuda").to(dtypes[name]) for name, shape in case.inputs.items()}
            for _ in range(sets)
        ]
        outputs = [
            {name: torch.empty(shape, device="cuda", dtype=dtypes[name]) for name, shape in shapes.items()}
            for _ in range(sets)
        ]
        return cls(operator, case, inputs, outputs, moved)

    @property
    def sets(self) -> int:
        return len(self.inputs)


def ours(library: GpuLibrary, call: Call, every: bool) -> dict[str, float | str]:
    """Microseconds of the default, the tuned and, if asked for, every candidate; the tuned one's name."""
    operator, case = call.operator, call.case
    params = [
        operator.params(case, "float16", {name: t.data_ptr() for name, t in (ins | outs).items()})
        for ins, outs in zip(call.inputs, call.outputs, strict=True)
    ]
    number = library.operator(operator.name, params[0])
    library.tune(number, params[0], torch.cuda.current_stream().cuda_stream)
    key = library.c.sd_ort_signature(number, ctypes.addressof(params[0])).decode()
    tuned = next(row[2] for row in library.tuning_results() if row[:2] == [operator.name, key])
    times: dict[str, float | str] = {"candidate": tuned}
    names = library.candidates(number)
    default = names[library.default_candidate(number, params[0])]
    for candidate, name in enumerate(names):
        is_selected = every or name in (tuned, default)
        slow = name == "generic" and name not in (tuned, default)
        if not is_selected or slow or not library.is_supported(number, candidate, params[0]):
            continue
        size = library.workspace_bytes(number, candidate, params[0])
        workspace = torch.empty(max(size, 1), device="cuda", dtype=torch.uint8)

        def run(index: int, stream: int, candidate: int = candidate, workspace: torch.Tensor = workspace) -> None:
            library.run(number, candidate, params[index], workspace.data_ptr(), stream)

        times[name] = microseconds(run, call.sets)
    times["tuned"], times["default"] = times[tuned], times[default]
    return times


def by_torch(call: Call, compiled: bool) -> dict[str, float]:
    function, case = TORCH[call.operator.folder], call.case
    same_type = [{name: t.half() for name, t in each.items()} for each in call.inputs]
    times = {"eager": microseconds(lambda index, stream: void(function(same_type[index], case)), call.sets)}
    if compiled:
        torch._dynamo.reset()
        fast = torch.compile(lambda tensors: function(tensors, case), dynamic=False)
        fast(same_type[0])
        times["compiled"] = microseconds(lambda index, stream: void(fast(same_type[index])), call.sets)
    if call.operator.folder == ATTENTION:
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    function(same_type[0], case)
                    times[name] = microseconds(lambda index, stream: void(function(same_type[index], case)), call.sets)
            except RuntimeError:  # heads of 512
                continue
    return times


# ---- ONNX Runtime


def by_onnxruntime(call: Call, **provider_options: Any) -> float:
    """Microseconds of ONNX Runtime's CUDA kernel: a model with a node a set, replayed as a CUDA graph."""
    import onnxruntime as ort

    ort.preload_dlls()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    stream = torch.cuda.Stream()
    cuda = {
        "enable_cuda_graph": "1",
        "user_compute_stream": str(stream.cuda_stream),
        **{name: str(value) for name, value in provider_options.items()},
    }
    model = contrib_model(call)
    session = ort.InferenceSession(model, options, providers=[("CUDAExecutionProvider", cuda)])
    binding = session.io_binding()
    for index, (inputs, outputs) in enumerate(zip(call.inputs, call.outputs, strict=True)):
        for kind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, t in tensors.items():
                if name in call.operator.float32_inputs and index > 0:
                    continue
                dtype = np.float32 if t.dtype == torch.float32 else np.float16
                kind(f"{name}_{index}", "cuda", 0, dtype, tuple(t.shape), t.data_ptr())
    with torch.cuda.stream(stream):
        for _ in range(3):  # the second run is captured
            session.run_with_iobinding(binding)
        return median(lambda: session.run_with_iobinding(binding)) / call.sets


def contrib_model(call: Call) -> bytes:
    """A com.microsoft node for each set of buffers; gamma and beta are shared."""
    import onnx
    from onnx import TensorProto, helper

    operator, case = call.operator, call.case
    shared = operator.float32_inputs
    attributes: dict[str, Any] = dict(case.attributes)
    if operator.folder in ("group_norm", "skip_group_norm"):
        attributes.setdefault("channels_last", 1)
    nodes, inputs, outputs = [], [], []
    for index in range(call.sets):
        names = [f"{n}_{0 if n in shared else index}" if n in case.inputs else "" for n in operator.inputs]
        while names and not names[-1]:
            names.pop()
        output_names = [f"{n}_{index}" if n in call.outputs[0] else "" for n in operator.outputs]
        nodes.append(helper.make_node(operator.name, names, output_names, domain="com.microsoft", **attributes))
        for name, shape in case.inputs.items():
            if name not in shared or index == 0:
                kind = TensorProto.FLOAT if name in shared else TensorProto.FLOAT16
                inputs.append(helper.make_tensor_value_info(f"{name}_{index}", kind, shape))
        for name, shape in operator.output_shapes(case).items():
            outputs.append(helper.make_tensor_value_info(f"{name}_{index}", TensorProto.FLOAT16, shape))
    graph = helper.make_graph(nodes, "bench", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def onnxruntime_times(call: Call) -> dict[str, float | str]:
    """ "ORT" where it has the operator and, for attention, "ORT unfused"; an error tells why a kernel did not run."""
    variants: dict[str, dict[str, int]] = (
        {} if call.operator.folder in (*NOT_IN_CONTRIB, *PRODUCTS) or QUANTIZED in call.outputs[0] else {"ORT": {}}
    )
    if call.operator.folder == ATTENTION:
        variants["ORT unfused"] = {"sdpa_kernel": UNFUSED}
    times: dict[str, float | str] = {}
    for name, options in variants.items():
        try:
            times[name] = by_onnxruntime(call, **options)
        except Exception as error:  # its exceptions share no base class
            print(f"  {name}: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)
    return times


# ---- tables

COLUMNS = ("tuned", "default", "ORT", "compiled", "eager")
PEERS_OF_PRODUCTS = ("compiled", "eager")


def bandwidth_row(call: Call, times: dict[str, float | str], peak: float) -> list[str]:
    tuned = float(times["tuned"])
    rate = call.bytes / tuned / 1e3
    cells = [call.operator.name, call.case.name, f"{call.bytes / 1e6:.1f}"]
    cells += [f"{float(times[c]):.1f}" if c in times else "-" for c in ("copy", *COLUMNS)]
    return [*cells, f"{rate:.0f}", f"{float(times['copy']) / tuned:.0%}", f"{rate / peak:.0%}", str(times["candidate"])]


def attention_row(call: Call, times: dict[str, float | str]) -> list[str]:
    sizes = [int(n) for n in call.case.name.split("-")[0].split("x")]
    flops = 4 * prod(sizes)  # batch, heads, sequence, keys, head size
    tuned = float(times["tuned"])

    def rate(engine: str) -> str:
        return f"{flops / float(times[engine]) / 1e6:.0f}" if engine in times else "-"

    def ratio(engine: str) -> str:
        return f"{float(times[engine]) / tuned:.2f}" if engine in times else "-"

    columns = ("tuned", "default", "cuDNN", "flash", "ORT", "ORT unfused", "compiled")
    cells = [call.case.name, f"{flops / 1e9:.1f}"]
    cells += [f"{float(times[c]):.1f}" if c in times else "-" for c in columns]
    return [*cells, rate("tuned"), rate("cuDNN"), ratio("cuDNN"), ratio("ORT unfused"), str(times["candidate"])]


def product_row(call: Call, times: dict[str, float | str]) -> list[str]:
    outputs = next(iter(call.outputs[0].values())).shape
    flops = 2 * prod(outputs[:-1]) * prod(call.case.inputs["W"])
    tuned = float(times["tuned"])
    cells = [call.operator.name, call.case.name, f"{flops / 1e9:.1f}"]
    cells += [f"{float(times[c]):.1f}" if c in times else "-" for c in ("tuned", "default", *PEERS_OF_PRODUCTS)]
    best = min((float(times[name]) for name in PEERS_OF_PRODUCTS if name in times), default=None)
    ratio = "-" if best is None else f"{tuned / best:.2f}"
    return [*cells, f"{flops / tuned / 1e6:.0f}", ratio, str(times["candidate"])]


def header(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * 2 + "---:|" * (len(columns) - 3) + "---|"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, help="sm_90, gfx942, ...: what to build for")
    parser.add_argument("--library", type=Path, help="a library built before")
    parser.add_argument("--out", type=Path, required=True, help="Markdown table")
    parser.add_argument("--operators", nargs="*", default=(*BANDWIDTH, ATTENTION))
    parser.add_argument("--compiled", type=int, default=100, help="cases an operator that torch.compile runs too")
    parser.add_argument("--no-peers", action="store_true", help="no ONNX Runtime and no torch")
    parser.add_argument("--every", action="store_true", help="print the time of every candidate")
    parser.add_argument("--save-tuning", type=Path, help="folder for what the tuner found, as sd-ort tune keeps it")
    options = parser.parse_args()
    library = GpuLibrary(options.library or build.build_gpu(options.arch))
    peak = 2**32 / copy_time(2**32, 1) / 1e3
    lines = [
        f"# Operators on {torch.cuda.get_device_name()} ({options.arch}), float16",
        "",
        f"Library {library.c.sd_ort_build_hash().decode()}; torch {torch.__version__}{onnxruntime_version()}. "
        f"Copy of 2 GiB: {peak:.0f} GB/s, read and written. Microseconds a call, by scripts/bench/bench_ops.py.",
        "",
    ]
    tables = {
        "bandwidth": header("operator", "case", "MB", "copy", *COLUMNS, "GB/s", "of copy", "of peak", "candidate"),
        "attention": header(
            *("attention", "GFLOP", "tuned", "default", "cuDNN", "flash", "ORT", "ORT unfused", "compiled"),
            *("TFLOP/s", "cuDNN's", "cuDNN / ours", "unfused / ours", "candidate"),
        ),
        "product": header(
            *("product in float8", "case", "GFLOP", "tuned", "default", "compiled, float16", "eager, float16"),
            *("TFLOP/s", "ours / float16", "candidate"),
        ),
    }
    rows = {"attention": attention_row, "product": product_row}
    for folder in options.operators:
        operator = load(folder)
        kind = "attention" if folder == ATTENTION else "product" if folder in PRODUCTS else "bandwidth"
        for index, case in enumerate(case for case in operator.cases if case.benchmark):
            call = Call.allocate(operator, case)
            times = ours(library, call, options.every)
            times["copy"] = copy_time(call.bytes, call.sets)
            if not options.no_peers:
                times |= by_torch(call, index < options.compiled) | onnxruntime_times(call)
            row = rows[kind](call, times) if kind in rows else bandwidth_row(call, times, peak)
            tables[kind].append(f"| {' | '.join(row)} |")
            print(tables[kind][-1], flush=True)
            if options.every:
                print("   ", {name: round(t, 1) for name, t in times.items() if isinstance(t, float)}, flush=True)
            if options.save_tuning:
                save_tuning(options.save_tuning, library)
            del call
            torch.cuda.empty_cache()
            options.out.parent.mkdir(exist_ok=True, parents=True)
            measured = ["\n".join(table) for table in tables.values() if len(table) > 2]
            options.out.write_text("\n".join(lines) + "\n" + "\n\n".join(measured) + "\n")


def save_tuning(folder: Path, library: GpuLibrary) -> None:
    from sd_ort.runtime import tuning

    os.environ["SD_ORT_TUNING"] = str(folder)
    tuning.save([], tuning.GpuOps(library.path), onnxruntime_version().rsplit(" ", 1)[-1])


def onnxruntime_version() -> str:
    try:
        import onnxruntime
    except ImportError:
        return ""
    return f", ONNX Runtime {onnxruntime.__version__}"


if __name__ == "__main__":
    main()
