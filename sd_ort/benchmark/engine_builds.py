"""Builds of the pipeline folders that engines need, from a raw export, in one process per component.

Folders are cached in a work folder, by a hash of the raw export and of the code. A process per component isolates its
memory, and the changes that other optimizers make to Python's path. A build spec is a tuple that also names the folder:

    ("ours", target, dtype)             sd-ort optimize
    ("ours", target, dtype, stage)      the same, up to a stage of `ablation_steps`
    ("ours", target, dtype, "hoist")    the same with --hoist
    ("raw", dtype)                      the raw graph in `dtype`, nothing fused
    ("ort", provider, dtype)            ONNX Runtime's optimizer on a TorchScript export
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
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_passes.lower.inline_fused_ops import inline_fused_ops
from sd_ort.benchmark.other_optimizers import optimize_by_onnxruntime, optimize_by_onnxscript
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.core.files import code_hash

if TYPE_CHECKING:
    from sd_ort.optimize.targets import Target

BuildSpec = tuple[str, ...]
TORCHSCRIPT = "torchscript"  # folder of the exports for ONNX Runtime's optimizer
HOIST = "hoist"
SECONDS = "seconds"  # file in a built component: its build time


def build_folder(spec: BuildSpec, raw_export: Path, work: Path, components: Sequence[str]) -> tuple[Path, float]:
    """Return the folder of a build spec below `work`, and the build time of its components in seconds.

    Components that exist are not built again. Raises SdOrtError with the reason if one cannot be built.
    """
    out = work / source_hash(raw_export) / "-".join(spec)
    if not (out / "model_index.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        pipeline_folder.copy_configs(raw_export, out)
    for name in components:
        if not (out / name / pipeline_folder.MODEL).is_file():
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    pool.submit(build_component, spec, raw_export, out, name).result()
                except BrokenProcessPool:
                    raise SdOrtError(f"{name}: making it was ended by the system: most likely out of memory.") from None
    return out, sum(float((out / name / SECONDS).read_text()) for name in components)


@cache
def source_hash(raw_export: Path) -> str:
    """Return the hash of the files and code that a built folder depends on."""
    files = pipeline_folder.read_manifest(raw_export).get("files") or pipeline_folder.tree_hash(raw_export)
    root = Path(__file__).resolve().parents[2]
    packages = "sd_ort/benchmark sd_ort/optimize sd_ort/graphs sd_ort/weights sd_ort/checkpoints fusion_passes".split()
    code = code_hash(*(root / package for package in packages))
    return hashlib.sha256(f"{files}{code}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class BuildTask:
    """One component to build of `raw_export` into the file `out`; `home`: the folder of all builds of the export."""

    raw_export: Path
    component: str
    out: Path
    home: Path

    @property
    def source(self) -> Path:
        """The raw model."""
        return self.raw_export / self.component / pipeline_folder.MODEL


def build_component(spec: BuildSpec, raw_export: Path, out: Path, component: str) -> None:
    """Build one component in a scratch folder and move it into place; runs in its own process."""
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{component}.", dir=out) as scratch:
            target = Path(scratch, component, pipeline_folder.MODEL)
            target.parent.mkdir()
            BUILDERS[spec[0]](BuildTask(raw_export, component, target, out.parent), *spec[1:])
            shutil.copy2(raw_export / component / "config.json", target.parent)
            (target.parent / SECONDS).write_text(f"{time.perf_counter() - start:.2f}\n")
            folders = [path.parent for path in Path(scratch).glob(f"*/{pipeline_folder.MODEL}") if path != target]
            for folder in (*folders, target.parent):  # a hoisted UNet is three components; its own folder comes last
                if not (out / folder.name / pipeline_folder.MODEL).is_file():
                    folder.rename(out / folder.name)
    except Exception as error:  # of any optimizer; its type may not survive pickling
        kind = "" if isinstance(error, SdOrtError) else f"{type(error).__name__}: "
        raise SdOrtError(f"{component}: {kind}{first_line(error)}") from None


def _build_optimized(task: BuildTask, target: str, dtype: str, stage: str = "") -> None:
    from sd_ort.optimize.optimizer import optimize_component
    from sd_ort.optimize.targets import TARGETS

    chosen = TARGETS[target] if stage in ("", HOIST) else ablation_steps(TARGETS[target])[stage]
    optimize_component(task.source, task.out, chosen, dtype, hoisted=stage == HOIST and task.component == "unet")


def _build_raw(task: BuildTask, dtype: str) -> None:
    from sd_ort.graphs.save import save
    from sd_ort.optimize import calibration, precision, unoptimized

    source = unoptimized.file_component(task.source)
    model = source.model()
    float32_nodes = calibration.calibrate(model, source, task.out.parent).nodes if dtype == "float16" else set()
    precision.convert(model, dtype, float32_nodes=float32_nodes)
    save(model, task.out)


def _build_by_onnxruntime(task: BuildTask, provider: str, dtype: str) -> None:
    optimize_by_onnxruntime(_torchscript_export(task), task.out, task.component, provider, dtype)


def _torchscript_export(task: BuildTask) -> Path:
    """Return the component's TorchScript export of opset 17, for which ONNX Runtime's fusions were written.

    It is the raw model or a cached export. Raises SdOrtError if the source of the raw export is unknown.
    """
    manifest = pipeline_folder.read_manifest(task.raw_export)
    source, options = manifest.get("source", {}), manifest.get("options", {})
    if options.get("exporter") == "torchscript":
        return task.source
    if not source:
        raise SdOrtError("its optimizer needs a TorchScript export, and what this export was made from is not known.")
    cached = task.home / TORCHSCRIPT / task.component
    if not (cached / pipeline_folder.MODEL).is_file():
        from sd_ort.export.exporter import export

        random_weights = bool(source.get("random_weights"))
        scratch = task.out.parent.parent / TORCHSCRIPT
        export(
            None if random_weights else source["model"],
            scratch,
            preset=source["model"] if random_weights else None,
            random_weights=random_weights,
            seed=options.get("seed", 0),
            opset=17,
            exporter="torchscript",
            components=[task.component],
        )
        cached.parent.mkdir(exist_ok=True)
        (scratch / task.component).rename(cached)
    return cached / pipeline_folder.MODEL


BUILDERS: dict[str, Callable[..., None]] = {
    "ours": _build_optimized,
    "raw": _build_raw,
    "ort": _build_by_onnxruntime,
    "onnxscript": lambda task, dtype: optimize_by_onnxscript(task.source, task.out, dtype),
}

# --- Ablation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One row of the ablation: its label, and the names of the target's passes that it adds.

    `rest`: adds every other fusion of the target.
    """

    label: str
    passes: tuple[str, ...] = ()
    rest: bool = False


# In the order of ONNX Runtime's report on Stable Diffusion. The op library has no stage: only the complete target uses
# it.
ABLATION = {
    "none": Stage("nothing fused", ("inline_fused_ops", "standard_attention")),
    "mha": Stage("+ MultiHeadAttention", ("multi_head_attention",)),
    "nhwc": Stage("+ NHWC convolution", ("nhwc_layout",)),
    "norm": Stage("+ GroupNorm", ("group_norm",)),
    "gelu": Stage("+ BiasSplitGelu", ("bias_split_gelu",)),
    "qkv": Stage("+ packed QKV", ("pack_qkv",)),
    "skip": Stage("+ BiasAdd, SkipLayerNorm", ("bias_add", "skip_layer_normalization")),
    "all": Stage("+ SkipGroupNorm, QuickGelu", ("skip_group_norm", "quick_gelu"), rest=True),
}


def ablation_steps(target: Target) -> dict[str, Target]:
    """Return the target up to each stage: a slice of its passes. Stages that change nothing are absent.

    All stages use the provider's own kernels only. Until "norm", GroupNorm nodes are inlined again, because most
    providers have kernels for the parts but not for GroupNormalization; so is attention that no fusion took.
    """
    from sd_ort.optimize.targets import CUDA_CONTRIB

    constraints = CUDA_CONTRIB if target.name == "cuda" else target.contrib_constraints
    stages: dict[str, Target] = {}
    names: set[str] = set()
    for name, stage in ABLATION.items():
        names |= set(stage.passes)
        passes = tuple(lowering for lowering in target.lowering_passes if lowering.name in names)
        if not stage.rest:
            inlined = ("ScaledDotProductAttention", *(() if "group_norm" in names else ("GroupNorm",)))
            passes = (inline_fused_ops(*inlined), *passes)
        fusions = tuple(fusion for fusion in target.fusions if stage.rest or fusion.name in names)
        partial = replace(target, lowering_passes=passes, fusions=fusions, contrib_constraints=constraints)
        if partial not in stages.values():
            stages[name] = partial
    return stages
