"""The pipeline folders a benchmark makes itself from a raw export: ours by target, the peers', the ablation's.

The one module that calls other stages. Folders are kept below a work folder, by the hash of the raw export and of this
package's sources, and used again; each component is made in a process of its own, for its memory and for what a peer
does to Python's path. A recipe is a tuple of words that also names the folder:

    ("ours", target, dtype)             sd-ort optimize
    ("ours", target, dtype, step)       the same, stopped at a step of `ablation_steps`
    ("ours", target, dtype, "hoist")    the same with --hoist
    ("raw", dtype)                      the raw graph in half precision, nothing fused
    ("ort", provider, dtype)            ONNX Runtime's own optimizer on a TorchScript export
    ("onnxscript", dtype)               onnxscript's optimizer and its fusions for ONNX Runtime
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from sd_ort.benchmark.ablation import ablation_steps
from sd_ort.benchmark.other_optimizers import optimize_by_onnxruntime, optimize_by_onnxscript
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import SdOrtError
from sd_ort.core.files import code_hash

if TYPE_CHECKING:
    pass

Recipe = tuple[str, ...]
TORCHSCRIPT = "torchscript"  # folder of the exports that ONNX Runtime's optimizer is given
HOIST = "hoist"
SECONDS = "seconds"  # beside a made component: how long it took


def make(recipe: Recipe, raw: Path, work: Path, components: Sequence[str]) -> tuple[Path, float]:
    """The folder a recipe makes of the export `raw`, below `work`, and the seconds that making its components took.

    Components that are there are not made again. Raises SdOrtError with the reason when one cannot be made.
    """
    out = work / source_hash(raw) / "-".join(recipe)
    if not (out / "model_index.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        pipeline_folder.copy_configs(raw, out)
    for name in components:
        if not (out / name / pipeline_folder.MODEL).is_file():
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    pool.submit(make_component, recipe, raw, out, name).result()
                except BrokenProcessPool:
                    raise SdOrtError(f"{name}: making it was ended by the system: most likely out of memory.") from None
    return out, sum(float((out / name / SECONDS).read_text()) for name in components)


@cache
def source_hash(raw: Path) -> str:
    """What a made folder depends on: the export's files, and the code of this package and of its fusions."""
    digest = hashlib.sha256(
        str(pipeline_folder.read_manifest(raw).get("files") or pipeline_folder.tree_hash(raw)).encode()
    )
    root = Path(__file__).resolve().parents[2]
    made_by = (
        "sd_ort/benchmark",
        "sd_ort/optimize",
        "sd_ort/graphs",
        "sd_ort/weights",
        "sd_ort/checkpoints",
        "fusion_passes",
    )
    digest.update(code_hash(*(root / package for package in made_by)).encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Task:
    """One component to make of the export `raw`, into `out`, a model.onnx; `home`: the folder of all that is made."""

    raw: Path
    component: str
    out: Path
    home: Path

    @property
    def source(self) -> Path:
        """The raw model."""
        return self.raw / self.component / pipeline_folder.MODEL


def make_component(recipe: Recipe, raw: Path, out: Path, component: str) -> None:
    """In a process of its own: make one component in a scratch folder and move it into place."""
    start = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix=f".{component}.", dir=out))
    try:
        target = scratch / component / pipeline_folder.MODEL
        target.parent.mkdir()
        RECIPES[recipe[0]](Task(raw, component, target, out.parent), *recipe[1:])
        shutil.copy2(raw / component / "config.json", target.parent)
        (target.parent / SECONDS).write_text(f"{time.perf_counter() - start:.2f}\n")
        others = [
            path for path in scratch.iterdir() if (path / pipeline_folder.MODEL).is_file() and path != target.parent
        ]
        for made in (*others, target.parent):  # a hoisted UNet is three components, itself the last
            if not (out / made.name / pipeline_folder.MODEL).is_file():
                made.rename(out / made.name)
    except Exception as error:  # whatever a peer raises is its result; its own type may not survive the way back
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        name = "" if isinstance(error, SdOrtError) else f"{type(error).__name__}: "
        raise SdOrtError(f"{component}: {name}{lines[0][:300] if lines else 'failed'}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ours(task: Task, target: str, dtype: str, step: str = "") -> None:
    from sd_ort.optimize.optimizer import optimize_component
    from sd_ort.optimize.targets import TARGETS

    hoisted = step == HOIST and task.component == "unet"
    chosen = TARGETS[target] if step in ("", HOIST) else ablation_steps(TARGETS[target])[step]
    optimize_component(task.source, task.out, chosen, dtype, hoisted=hoisted)


def _raw(task: Task, dtype: str) -> None:
    """The export as it is, its weights and tensors in `dtype`."""
    from sd_ort.graphs.save import save
    from sd_ort.optimize import calibration, precision, unoptimized

    source = unoptimized.file_component(task.source)
    model = source.model()
    float32_nodes = calibration.calibrate(model, source, task.out.parent).nodes if dtype == "float16" else set()
    precision.convert(model, dtype, float32_nodes=float32_nodes)
    save(model, task.out)


def _ort(task: Task, provider: str, dtype: str) -> None:
    """ONNX Runtime's optimizer on the TorchScript graph: its fusions were written for those."""
    optimize_by_onnxruntime(_torchscript(task), task.out, task.component, provider, dtype)


def _torchscript(task: Task) -> Path:
    """The component's TorchScript export, opset 17, made once and kept; the raw model itself when it is one.

    Raises SdOrtError when the source of the export is not known.
    """
    manifest = pipeline_folder.read_manifest(task.raw)
    source, options = manifest.get("source", {}), manifest.get("options", {})
    if options.get("exporter") == "torchscript":
        return task.source
    if not source:
        raise SdOrtError("its optimizer needs a TorchScript export, and what this export was made from is not known.")
    kept = task.home / TORCHSCRIPT / task.component
    if not (kept / pipeline_folder.MODEL).is_file():
        from sd_ort.export.exporter import export

        made_up = bool(source.get("random_weights"))
        scratch = task.out.parent.parent / TORCHSCRIPT
        export(
            None if made_up else source["model"],
            scratch,
            preset=source["model"] if made_up else None,
            random_weights=made_up,
            seed=options.get("seed", 0),
            opset=17,
            exporter="torchscript",
            components=[task.component],
        )
        kept.parent.mkdir(exist_ok=True)
        (scratch / task.component).rename(kept)
    return kept / pipeline_folder.MODEL


def _onnxscript(task: Task, dtype: str) -> None:
    optimize_by_onnxscript(task.source, task.out, dtype)


RECIPES: dict[str, Callable[..., None]] = {"ours": _ours, "raw": _raw, "ort": _ort, "onnxscript": _onnxscript}
