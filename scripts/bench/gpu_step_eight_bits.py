#!/usr/bin/env python3
"""A U-Net or VAE decoder on a GPU in float16 beside float8: our provider, ONNX Runtime's CUDA provider, torch, torchao.

    python scripts/bench/gpu_step_eight_bits.py --preset sdxl --batch 2 --size 128
    python scripts/bench/gpu_step_eight_bits.py --preset sd15 --batch 2 --size 64 --profile 25
    python scripts/bench/gpu_step_eight_bits.py --peers compile torchao       # ratios are to torch.compile then
    python scripts/bench/gpu_step_eight_bits.py --formats float8 float8-convolutions    # convolutions too
    python scripts/bench/gpu_step_eight_bits.py --component vae_decoder --formats float16 float8-convolutions --batch 1
    python scripts/bench/gpu_step_eight_bits.py --peers torchao torchao-autotuned    # the least time beside torchao
    python scripts/bench/gpu_step_eight_bits.py --formats float16 int8-weights int4-weights   # stored weights
    python scripts/bench/gpu_step_eight_bits.py --folders /dev/shm/folders    # then sd-ort benchmark on these

writes <out>/<preset>[_vae_decoder]_b<batch>_<size>.json, again after each engine that is open: a run that ends early
keeps the rows of the engines before. Weights are random. The float8
graph is calibrated on one small random input on the CPU, so that its error says nothing about a trained model; times do
not depend on the values. All engines are hoisted, tuned, captured and timed in turn in one process (see
bench_gpu_step.py); ratios are to the first row's engine.
torchao quantizes the blocks' linears to float8, row-wise and dynamic. Its transformer and ResNet blocks are compiled,
with torchao's settings for the former, and the whole call is captured; the row's name has the mode of torch.compile.
`device_MB` is what an engine of ours adds to the memory of the process on the device: weights, activations and graph.
--folders only writes OUT/float16 and OUT/float8, whole pipelines for `sd-ort benchmark --provider sdcuda`;
float8-convolutions has the VAE decoder in float8 too.
Build first: sd-ort build-ops --cuda sm_90.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bench.bench_gpu_step import (
    TORCHAO_MODES,
    ComparedEngine,
    profile,
    session_engine,
    synchronize,
    time_rounds,
    torch_engines,
)
from scripts.bench.default_pipeline import save_checkpoint
from scripts.bench.gpu_models import (
    calibration_run,
    export_raw,
    fill,
    limits,
    provider_library,
    random_inputs,
    random_module,
)
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.core.files import write_json
from sd_ort.core.metrics import relative_l2_error
from sd_ort.graphs import hoist
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.runtime import machine
from sd_ort.runtime.device_meters import Nvml
from sd_ort.runtime.library import CUDA_LIBRARY, library_path
from sd_ort.stages import optimize

CONVOLUTIONS = "float8-convolutions"
FORMATS = ("float16", "float8", CONVOLUTIONS, "int8-weights", "int4-weights", "float8-weights")


def layers_and_storage(format_: str) -> tuple[str | None, bool, WeightStorage | None]:
    """Return the format of layers in 8 bits, whether convolutions are too, and the storage of one of FORMATS."""
    dtype, _, stored = format_.partition("-")
    if stored == "weights":
        return None, False, WeightStorage(dtype)
    return dtype if dtype == "float8" else None, format_ == CONVOLUTIONS, None


def write_folders(preset: str, out: Path, formats: Sequence[str]) -> None:
    """Write pipeline folders of random weights, the same in later calls, and print the benchmark of them."""
    if not (out / "runs.npz").is_file():
        with torch.no_grad():
            save_checkpoint(preset, out / "checkpoint", "sdcuda")
            calibration_run(preset, out / "runs.npz")
    for each in formats:
        eight_bits, convolutions, storage = layers_and_storage(each)
        inputs = out / "runs.npz" if eight_bits else None
        optimize(
            out / "checkpoint", out / each, target="gpu", dtype="float16", calibrate=False, eight_bits=eight_bits,
            inputs=inputs, weights=storage, convolutions=convolutions, vae_decoder=convolutions,
        )  # fmt: skip
    settings = "--provider sdcuda --tuning --sequential --torch none --steps 20 --guidance 8 --batch 2"
    print("sd-ort benchmark", *(out / each for each in formats), settings)


def engine(
    label: str, provider: str, target: str, format_: str, raw: Path, runs: Path, inputs: Any, shape: Any
) -> ComparedEngine:
    """Return a captured session on the component, a hoisted one of the U-Net."""
    path = raw.parents[2] / f"{target}-{format_}" / raw.parent.name / pipeline_folder.MODEL
    eight_bits, convolutions, storage = layers_and_storage(format_)
    hoisted = path.parent.name == hoist.PARTS["step"]
    report = optimize_component(
        raw, path, TARGETS[target], "float16", calibrate=False, hoisted=hoisted, inputs=runs if eight_bits else None,
        eight_bits_format=eight_bits, weights=storage, convolutions=convolutions,
    )  # fmt: skip
    if storage is not None:  # sessions look here for it
        options = {"weights": storage.entry()}
        write_json(path.parents[1] / pipeline_folder.MANIFEST, {"format": pipeline_folder.FORMAT, "options": options})
    print(f"  {label}: {report['op_counts']} {report.get('eight_bits', {}).get('layers', '')}", flush=True)
    settings = {"tuning": True} if provider.startswith("plugin:") else {}
    return session_engine(label, provider, path, hoisted, inputs, shape, time.perf_counter(), **settings)


def peer(net: torch.nn.Module, inputs: Any, name: str) -> list[ComparedEngine]:
    """Return the engine of torch, or none if it fails, which is printed."""
    try:
        return torch_engines(net, inputs, [name])
    except Exception as error:  # of another project, on another version of torch
        print(f"  {name} failed: {first_line(error)}", flush=True)
        return []


def measure(
    engines: list[ComparedEngine], calls: int, memory: dict[str, int | None], reference: Any
) -> list[dict[str, Any]]:
    """Time the engines in turn and return a row for each; ratios are to the first."""
    times = time_rounds(engines, calls)
    base = times[engines[0].name]
    rows = []
    for each in engines:
        each.run()
        synchronize()
        row: dict[str, Any] = {"engine": each.name, "ready_s": round(each.ready_s, 1)}
        if each.name in memory:
            row["device_MB"] = memory[each.name]
        for kind, values in times[each.name].items():
            row[f"{kind}_ms"] = statistics.median(values)
            row[f"{kind}_ratio"] = statistics.median(a / b for a, b in zip(values, base[kind], strict=True))
        row["error"] = relative_l2_error(*(t.double().cpu().numpy() for t in (each.output(), reference)))
        rows.append(row)
        print("ROW " + json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="sdxl", choices=sorted(PRESETS))
    parser.add_argument("--component", default="unet", choices=("unet", "vae_decoder"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="edge of the latent")
    parser.add_argument("--graph", type=Path, help="raw export without weights (export_without_weights.py)")
    parser.add_argument("--engines", nargs="*", choices=("provider", "cuda"), default=["provider"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS[:2], help="of our engines")
    parser.add_argument("--peers", nargs="*", choices=("compile", *TORCHAO_MODES), default=[], help="torch in this run")
    parser.add_argument("--calls", type=int, default=20, help="calls a round")
    parser.add_argument("--work", type=Path, default=Path("/tmp/sd_ort_step"))
    parser.add_argument("--out", type=Path, default=Path("results/gpu_step_eight_bits"))
    parser.add_argument("--folders", type=Path, metavar="OUT", help="only write pipeline folders of --formats")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile, and print the N longest kernels")
    options = parser.parse_args()
    if options.folders:
        write_folders(options.preset, options.folders, options.formats)
        return
    providers = {"provider": (f"plugin:{provider_library()}", "gpu"), "cuda": ("cuda", "cuda")}
    if "cuda" in options.engines:
        operators = library_path()
        if operators is None or not (operators.parent / CUDA_LIBRARY).is_file():
            raise SdOrtError("build the op library first: sd-ort build-ops --cuda sm_90")
        ctypes.CDLL(str(operators.parent / CUDA_LIBRARY)).sd_ort_enable_tuning(1)
    with torch.inference_mode():
        module = random_module(options.preset, options.component)
        inputs = random_inputs(options.preset, options.component, options.batch, options.size)
        sdxl = "addition_embed_type" in PRESETS[options.preset].models["unet"]
        net = wrap(options.component, module, sdxl, False)
        reference = net(*inputs.values()).clone()
        raw = options.work / options.preset / "raw" / options.component / pipeline_folder.MODEL
        if not raw.is_file():
            if options.graph:
                fill(options.graph, module.state_dict(), raw.parent)
            else:
                export_raw(options.preset, options.component, net, raw)
        runs = calibration_run(options.preset, options.work / f"{options.preset}-runs.npz")
        meter = Nvml()
        memory: dict[str, int | None] = {}
        ours: list[ComparedEngine] = []
        theirs: list[ComparedEngine] = []
        stored = "_weights" * any("weights" in each for each in options.formats)
        result: dict[str, Any] = {
            "preset": options.preset, "component": options.component, "batch": options.batch, "size": options.size,
            "commit": machine.commit(),
            "machine": machine.machine(), "versions": machine.versions(), "limits": limits(), "rows": [],
        }  # fmt: skip

        part = "" if options.component == "unet" else f"_{options.component}"
        file = options.out / f"{options.preset}{part}_b{options.batch}_{options.size}{stored}.json"

        def write_rows() -> None:
            result["rows"] = measure([*theirs, *ours], options.calls, memory, reference)
            write_json(file, result)

        for name in options.engines:
            for each in options.formats:
                before, label = meter.used_MB(os.getpid()), f"{name} {each}"
                ours.append(engine(label, *providers[name], each, raw, runs, inputs, reference.shape))
                ours[-1].run()
                synchronize()
                after = meter.used_MB(os.getpid())
                memory[label] = None if before is None or after is None else round(after - before)
                write_rows()
        for name in options.peers:
            if opened := peer(net, inputs, name):
                theirs += opened
                write_rows()
        if options.profile:
            for row, each in zip(result["rows"], [*theirs, *ours], strict=True):
                row["profile"] = profile(each, show=options.profile)
            write_json(file, result)


if __name__ == "__main__":
    main()
