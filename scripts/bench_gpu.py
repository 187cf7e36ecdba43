#!/usr/bin/env python3
"""SD 1.5, SD 2.1 and SDXL, full size and with random weights, on one GPU: every engine, and the ablation.

    python scripts/bench_gpu.py sd15 sd21 sdxl --provider cuda --out results

For each model it exports UNet and VAE decoder, then runs, below <out>/gpu_<model>/,

    unet/  sd-ort benchmark RAW --unet-only --engines raw,raw-fp16,ours,... --batch 1,8, and the same with --ablation
    vae/   sd-ort benchmark RAW --component vae_decoder --engines ... --batch 1,4

and deletes what it made in --work but for the results. --graphs DIR takes raw exports without weights
(<model>.<component>.onnx.xz, and <model>-ts17... for ONNX Runtime's optimizer), and fills them with the weights an
export would have, which saves most of the time. --warm compiles torch's engine into inductor's cache while folders are
made: its first run is then no cold one, and the report says so.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sd_ort import folder, variants  # noqa: E402
from sd_ort.export import DEFAULT_OPSET, export, save_config  # noqa: E402
from sd_ort.models import MODEL_OF  # noqa: E402
from sd_ort.sources import open_source  # noqa: E402

STARTED = time.perf_counter()
COMPONENTS = ("unet", "vae_decoder")
ENGINES = "raw,raw-fp16,ours,ours-graph,ort,ort-graph,onnxscript,torch,torch-channels-last,torch-graph,torch-compile"
WARM = "torch.compile's code was in inductor's cache: its first run is no cold one."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="presets: sd15, sd21, sdxl, or their -tiny versions")
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--vae-batch", default="1,4")
    parser.add_argument("--runs", default="5")
    parser.add_argument("--steps", default="4", help="calls a run")
    parser.add_argument("--jobs", default="8", help="folders made and engines loaded at once")
    parser.add_argument("--graphs", type=Path, help="folder of raw exports without weights")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep what was made in --work")
    parser.add_argument("--skip", default="", help="of unet, ablation, vae: what not to run")
    parser.add_argument("--work", type=Path, default=Path("out/bench_gpu"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    with ProcessPoolExecutor(len(options.models), get_context("spawn")) as pool:
        exports = [pool.submit(raw_export, model, options.work / model, options.graphs) for model in options.models]
        warmers = [warm(model, options) for model in options.models if options.warm]
        for warmer in warmers:
            warmer.wait()
        for model, exported in zip(options.models, exports, strict=True):
            one(model, exported.result(), options)


def one(model: str, raw: Path, options: argparse.Namespace) -> None:
    """Everything of one model; what fails is said and does not stop the rest."""
    work, out = options.work / model, options.out / f"gpu_{model}"
    unet = ["--component", "unet", "--batch", options.batch]
    vae = ["--component", "vae_decoder", "--batch", options.vae_batch]
    runs = {
        "unet": [*unet, "--engines", options.engines, "--out", str(out / "unet")],
        "ablation": [*unet, "--ablation", "--out", str(out / "unet")],
        "vae": [*vae, "--engines", options.engines, "--out", str(out / "vae")],
    }
    for name, run in runs.items():
        if name in options.skip.split(","):
            continue
        common = ["--provider", options.provider, "--runs", options.runs, "--steps", options.steps]
        common += ["--jobs", options.jobs, "--work", str(work / "made")] + (["--note", WARM] if options.warm else [])
        code = sd_ort("benchmark", str(raw), *common, *run).wait()
        print(f"{model} {name}: exit {code}, {time.perf_counter() - STARTED:.0f} s", flush=True)
    if not options.keep:
        shutil.rmtree(work)


def sd_ort(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """`sd-ort ARGUMENTS` from this tree, started."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sd_ort.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **more)


def raw_export(model: str, work: Path, graphs: Path | None) -> Path:
    """The raw export of UNet and VAE decoder, from `graphs` where it has them, else by exporting."""
    made = _raw_export(model, work, graphs)
    print(f"{model}: raw export after {time.perf_counter() - STARTED:.0f} s", flush=True)
    return made


def _raw_export(model: str, work: Path, graphs: Path | None) -> Path:
    raw = work / "raw"
    if graphs is None or not all((graphs / f"{model}.{name}.onnx.xz").is_file() for name in COMPONENTS):
        export(None, raw, preset=model, random_weights=True, components=COMPONENTS, progress=print)
        return raw
    source = open_source(None, model, True, 0)
    scratch = work / "torchscript"
    with folder.staged(raw) as made:
        source.write_configs(made)
        for name in COMPONENTS:
            module = source.load(MODEL_OF.get(name, name))
            (made / name).mkdir()
            save_config(module, made / name)
            fill(graphs / f"{model}.{name}.onnx.xz", module.state_dict(), made / name)
            if (other := graphs / f"{model}-ts17.{name}.onnx.xz").is_file():
                fill(other, module.state_dict(), scratch / name)
        manifest = {"stage": "export", "source": {"model": model, "hash": source.hash, "random_weights": True}}
        folder.write_manifest(made, {**manifest, "options": {"exporter": "dynamo", "opset": DEFAULT_OPSET, "seed": 0}})
    if scratch.is_dir():
        home = work / "made" / variants.source_hash(raw)
        home.mkdir(parents=True, exist_ok=True)
        scratch.rename(home / variants.TORCHSCRIPT)
    return raw


def fill(graph: Path, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write `out`/model.onnx: `graph`, whose external tensors are named after `weights` (".T": transposed), filled."""
    model = onnx.load_from_string(lzma.decompress(graph.read_bytes()))
    out.mkdir(parents=True, exist_ok=True)
    with (out / folder.DATA).open("wb") as data:
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            value = weights[tensor.name.removesuffix(".T")]
            value = (value.T if tensor.name.endswith(".T") else value).contiguous()
            data.seek(-data.tell() % 65536, 1)
            place = {"location": folder.DATA, "offset": data.tell(), "length": 4 * value.numel()}
            value.numpy().tofile(data)
            del tensor.external_data[:]
            for key, entry in place.items():
                tensor.external_data.add(key=key, value=str(entry))
    (out / folder.MODEL).write_bytes(model.SerializeToString())


def warm(model: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """torch.compile's engine once at every batch size, in a process beside."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(ROOT / 'scripts')!r})"
    code += "; import bench_gpu; bench_gpu.compile_once(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, model, options.batch, options.vae_batch, options.provider])


def compile_once(model: str, batches: str, vae_batches: str, provider: str) -> None:
    """In a process of its own: compile and run both components at each batch size. Configs are written to scratch."""
    import tempfile

    from sd_ort import engines
    from sd_ort.engines import Engine, Settings

    source = open_source(None, model, True, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for name in COMPONENTS:
            (Path(scratch) / name).mkdir()
            with torch.device("meta"):
                save_config(meta_model(source, MODEL_OF.get(name, name)), Path(scratch) / name)
        engine = Engine("", "torch", model, model, random_weights=True, weights_seed=0, raw=scratch, variant="compile")
        for component, sizes in zip(COMPONENTS, (batches, vae_batches), strict=True):
            engines.load(engine, Settings(provider=provider, component=component, steps=1))
            for batch in sizes.split(","):
                engines.draw_batch(int(batch))
                print(f"{model}: {component} compiled for batch {batch}", flush=True)


def meta_model(source: Any, name: str) -> Any:
    """A model without weights, for its config with the defaults filled in."""
    import diffusers

    config = source.configs[name]
    return getattr(diffusers, config["_class_name"]).from_config(config)


if __name__ == "__main__":
    main()
