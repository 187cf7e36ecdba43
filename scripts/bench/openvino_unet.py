"""One U-Net in OpenVINO, for scripts/bench/cpu_int8.py: runs in a Python of its own, which has openvino and nncf.

    PYTHON scripts/bench/openvino_unet.py model.onnx runs.npz out.npy PRECISION --threads 2 --calls 5

PRECISION is float32, bfloat16, int8, or 'int8, bfloat16': the rest in bfloat16. int8 is NNCF's post-training
quantization of weights and activations (model type transformer), calibrated on the runs; it is written to --quantized
and read from there again. Prints one line of JSON, and writes the first run's output.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

import numpy as np

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32", "int8, bfloat16": "bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("precision", choices=HINTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--quantized", type=Path, help="the .xml of the model in int8")
    options = parser.parse_args()
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    arrays = np.load(options.runs)
    runs: dict[str, dict[str, np.ndarray]] = {}
    for name in arrays.files:
        _, value, number = name.split("/")
        runs.setdefault(number, {})[value] = arrays[name]
    path = options.model
    if options.precision.startswith("int8"):
        path = options.quantized
        if not path.is_file():
            nncf = importlib.import_module("nncf")
            quantized = nncf.quantize(
                core.read_model(options.model.resolve()), nncf.Dataset(list(runs.values())),
                model_type=nncf.ModelType.TRANSFORMER, subset_size=len(runs),
            )  # fmt: skip
            openvino.save_model(quantized, path, compress_to_fp16=False)
            del quantized
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": HINTS[options.precision],
        "INFERENCE_NUM_THREADS": str(options.threads),
    }
    compiled = core.compile_model(core.read_model(path.resolve()), "CPU", settings)
    feed = runs[min(runs)]
    output = compiled(feed)[0]
    np.save(options.out, output)
    wall, processor = [], []
    for _ in range(options.calls):
        start = time.perf_counter(), time.process_time()
        compiled(feed)
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    print(json.dumps({"wall": wall, "processor": processor}))


if __name__ == "__main__":
    main()
