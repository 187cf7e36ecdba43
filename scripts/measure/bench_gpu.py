#!/usr/bin/env python3
"""SD 1.5, SD 2.1 and SDXL, full size and with random weights, on one GPU: every engine, and the ablation.

    python scripts/measure/bench_gpu.py sd15 sd21 sdxl --provider cuda --out results

For each model, stage by stage:

    export   UNet and VAE decoder, in --work
    make     the folders of all engines and of the ablation's rows, --jobs at a time
    run      sd-ort benchmark: <out>/gpu_<model>/unet (engines and ablation) and <out>/gpu_<model>/vae
    clean    what lies in --work

The stage `warm`, off by default, compiles torch.compile's engine into inductor's cache beside `export` and `make`: its
first run is then no cold one, and the report says so. --graphs DIR takes raw exports without weights
(<model>.<component>.onnx.xz, and <model>-ts17... for ONNX Runtime's optimizer) instead of exporting, and fills them
with the weights an export would have.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpu_models import fill  # noqa: E402

from sd_ort.benchmark import contenders, recipes, runner  # noqa: E402
from sd_ort.benchmark.engines import contract  # noqa: E402
from sd_ort.benchmark.engines.contract import Engine, Settings  # noqa: E402
from sd_ort.core import folder  # noqa: E402
from sd_ort.export.exporter import export, save_config  # noqa: E402
from sd_ort.export.tracing import DEFAULT_OPSET  # noqa: E402
from sd_ort.family.checkpoints import open_source  # noqa: E402
from sd_ort.family.signatures import MODEL_OF  # noqa: E402

COMPONENTS = {"unet": "unet", "vae": "vae_decoder"}
ENGINES = (
    "raw,raw-fp16,ours,ours-graph,ours-hoist-graph,ort,ort-graph,onnxscript,"
    "torch,torch-channels-last,torch-graph,torch-compile"
)
WARM = "torch.compile's code was in inductor's cache: its first run is no cold one."
STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="presets: sd15, sd21, sdxl, or their -tiny versions")
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--parts", default="unet,ablation,vae", help="what to make and run")
    parser.add_argument("--unet-batch", default="1,8")
    parser.add_argument("--vae-batch", default="1,4")
    parser.add_argument("--runs", default="5")
    parser.add_argument("--steps", default="4", help="calls a run")
    parser.add_argument("--jobs", default="8", help="folders made and engines loaded at once")
    parser.add_argument("--stages", default="export,make,run,clean")
    parser.add_argument("--warmed", action="store_true", help="an earlier command ran the stage warm")
    parser.add_argument("--graphs", type=Path, help="folder of raw exports without weights")
    parser.add_argument("--work", type=Path, default=Path("out/bench_gpu"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--compile-once", nargs=2, metavar=("PART", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    for model in options.models:
        if options.compile_once:
            part, batch = options.compile_once
            compile_once(model, part, batch, options.provider)
        else:
            one(model, options)


def one(model: str, options: argparse.Namespace) -> None:
    """The stages of one model."""
    stages, work = options.stages.split(","), options.work / model
    warmers = warm(model, options) if "warm" in stages else []
    if "export" in stages:
        raw_export(model, work, options.graphs)
        say(f"{model}: exported")
    if "make" in stages:
        make(work, options)
        say(f"{model}: folders made")
    for warmer in warmers:
        warmer.wait()
    if "run" in stages:
        run(model, work, options)
    if "clean" in stages:
        shutil.rmtree(work)


def say(line: str) -> None:
    print(f"{time.perf_counter() - STARTED:5.0f} s  {line}", flush=True)


# --- export ---------------------------------------------------------------------------------------------------------


def raw_export(model: str, work: Path, graphs: Path | None) -> None:
    """`work`/raw, from `graphs` where it has them, else by exporting."""
    raw, names = work / "raw", tuple(COMPONENTS.values())
    if graphs is None or not all((graphs / f"{model}.{name}.onnx.xz").is_file() for name in names):
        export(None, raw, preset=model, random_weights=True, components=names, on_progress=say)
        return
    source = open_source(None, model, True, 0)
    scratch = work / "torchscript"
    with folder.staged(raw) as made:
        source.write_configs(made)
        for name in names:
            module = source.load(MODEL_OF.get(name, name))
            (made / name).mkdir()
            save_config(module, made / name)
            fill(graphs / f"{model}.{name}.onnx.xz", module.state_dict(), made / name)
            if (other := graphs / f"{model}-ts17.{name}.onnx.xz").is_file():
                fill(other, module.state_dict(), scratch / name)
        manifest = {"stage": "export", "source": {"model": model, "hash": source.hash, "random_weights": True}}
        folder.write_manifest(made, {**manifest, "options": {"exporter": "dynamo", "opset": DEFAULT_OPSET, "seed": 0}})
    if scratch.is_dir():
        home = work / "made" / recipes.source_hash(raw)
        home.mkdir(parents=True, exist_ok=True)
        scratch.rename(home / recipes.TORCHSCRIPT)


# --- make, run ------------------------------------------------------------------------------------------------------


def make(work: Path, options: argparse.Namespace) -> None:
    """Make every folder that `run` needs; it finds them there."""
    raw = work / "raw"
    for part in options.parts.split(","):
        settings = Settings(provider=options.provider, component=COMPONENTS.get(part, "unet"))
        if part == "ablation":
            wanted, _ = contenders.ablation(raw, options.provider)
        else:
            wanted, _ = contenders.find_engines([raw], "none", names(part, options), options.provider)
        for item in runner.prepare(wanted, settings, work / "made", int(options.jobs), say):
            if item.failure:
                say(f"{item.engine.label} cannot be made: {item.failure}")


def names(part: str, options: argparse.Namespace) -> list[str]:
    """The engines of a part: only a UNet can be hoisted."""
    return [name for name in options.engines.split(",") if part == "unet" or "hoist" not in name]


def run(model: str, work: Path, options: argparse.Namespace) -> None:
    """The benchmarks, each a command of its own; one that fails does not stop the rest."""
    out = options.out / f"gpu_{model}"
    common = ["--provider", options.provider, "--runs", options.runs, "--steps", options.steps]
    common += ["--jobs", options.jobs, "--work", str(work / "made")]
    common += ["--note", WARM] if options.warmed or "warm" in options.stages.split(",") else []
    unet = ["--component", "unet", "--batch", options.unet_batch, "--out", str(out / "unet")]
    vae = ["--component", "vae_decoder", "--batch", options.vae_batch, "--out", str(out / "vae")]
    parts = {
        "unet": [*unet, "--engines", ",".join(names("unet", options))],
        "ablation": [*unet, "--ablation"],
        "vae": [*vae, "--engines", ",".join(names("vae", options))],
    }
    for part in options.parts.split(","):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sd_ort.cli import main; main()"
        command = [sys.executable, "-c", code, "benchmark", str(work / "raw"), *common, *parts[part]]
        say(f"{model} {part}: exit {subprocess.run(command, check=False).returncode}")


# --- warm -----------------------------------------------------------------------------------------------------------


def warm(model: str, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """torch.compile's engine once at every batch size, each in a process beside."""
    batches = {"unet": options.unet_batch, "vae": options.vae_batch}
    command = [sys.executable, __file__, model, "--provider", options.provider, "--compile-once"]
    parts = [part for part in batches if part in options.parts.split(",")]
    return [subprocess.Popen([*command, part, batch]) for part in parts for batch in batches[part].split(",")]


def compile_once(model: str, part: str, batch: str, provider: str) -> None:
    """In a process of its own: compile and run a component at one batch size. Its configs are written to scratch."""
    source = open_source(None, model, True, 0)
    settings = Settings(provider=provider, component=COMPONENTS[part], steps=1)
    with tempfile.TemporaryDirectory() as scratch:
        for name in COMPONENTS.values():
            (Path(scratch) / name).mkdir()
            save_config(without_weights(source.configs[MODEL_OF.get(name, name)]), Path(scratch) / name)
        engine = Engine("", "torch", model, model, random_weights=True, weights_seed=0, raw=scratch, variant="compile")
        contract.load(engine, settings)
        contract.draw_batch(int(batch))
    say(f"{model} {part}: compiled for batch {batch}")


def without_weights(config: dict[str, Any]) -> Any:
    """A model that knows its config with the defaults filled in."""
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config)


if __name__ == "__main__":
    main()
