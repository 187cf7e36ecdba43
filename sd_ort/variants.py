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

import fcntl
import hashlib
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort import folder
from sd_ort.errors import SdOrtError

if TYPE_CHECKING:
    from sd_ort.targets import Target

Recipe = tuple[str, ...]
TORCHSCRIPT = "torchscript"  # folder of the exports that ONNX Runtime's optimizer is given
HOIST = "hoist"
SECONDS = "seconds"  # beside a made component: how long it took

# --- Making and keeping ---------------------------------------------------------------------------------------------


def make(recipe: Recipe, raw: Path, work: Path, components: Sequence[str]) -> tuple[Path, float]:
    """The folder a recipe makes of the export `raw`, below `work`, and the seconds that making its components took.

    Components that are there are not made again. Raises SdOrtError with the reason when one cannot be made.
    """
    out = work / source_hash(raw) / "-".join(recipe)
    if not (out / "model_index.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        folder.copy_configs(raw, out)
    for name in components:
        if not (out / name / folder.MODEL).is_file():
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    pool.submit(_make_component, recipe, raw, out, name).result()
                except BrokenProcessPool:
                    raise SdOrtError(f"{name}: making it was ended by the system: most likely out of memory.") from None
    return out, sum(float((out / name / SECONDS).read_text()) for name in components)


@cache
def source_hash(raw: Path) -> str:
    """What a made folder depends on: the export's files, and the code of this package and of its fusions."""
    digest = hashlib.sha256(str(folder.read_manifest(raw).get("files") or folder.tree_hash(raw)).encode())
    root = Path(__file__).resolve().parent.parent
    for path in sorted([*(root / "sd_ort").glob("*.py"), *(root / "fusion_passes").rglob("*.py")]):
        if path.name in _SOURCES or "fusion_passes" in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_SOURCES = ("variants.py", "optimize.py", "targets.py", "precision.py", "calibration.py")


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
        return self.raw / self.component / folder.MODEL


def _make_component(recipe: Recipe, raw: Path, out: Path, component: str) -> None:
    """In a process of its own: make one component in a scratch folder and move it into place."""
    start = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix=f".{component}.", dir=out))
    try:
        target = scratch / component / folder.MODEL
        target.parent.mkdir()
        with _turn(raw / component, out.parent / f".{component}.lock"):
            RECIPES[recipe[0]](Task(raw, component, target, out.parent), *recipe[1:])
        shutil.copy2(raw / component / "config.json", target.parent)
        (target.parent / SECONDS).write_text(f"{time.perf_counter() - start:.2f}\n")
        others = [path for path in scratch.iterdir() if (path / folder.MODEL).is_file() and path != target.parent]
        for made in (*others, target.parent):  # a hoisted UNet is three components, itself the last
            if not (out / made.name / folder.MODEL).is_file():
                made.rename(out / made.name)
    except Exception as error:  # whatever a peer raises is its result; its own type may not survive the way back
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        name = "" if isinstance(error, SdOrtError) else f"{type(error).__name__}: "
        raise SdOrtError(f"{component}: {name}{lines[0][:300] if lines else 'failed'}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _turn(component: Path, lock: Path) -> Iterator[None]:
    """Wait for the others that make something of the same component, if it is small enough to be calibrated.

    Calibration links to the raw weights, and onnx refuses a file with several links for as long as it lasts.
    """
    from sd_ort.calibration import SIZE_LIMIT

    data = component / folder.DATA
    if not data.is_file() or data.stat().st_size > SIZE_LIMIT:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Ours -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One row of the ablation: its label, and what is switched on from here on.

    `fusions`: modules of fusion_passes. `layout`, `pack`, `norm`: NHWC, packed projections, GroupNorm as one node.
    """

    label: str
    fusions: tuple[str, ...] = ()
    layout: bool = False
    pack: bool = False
    norm: bool = False
    rest: bool = False


# The order of ONNX Runtime's report on Stable Diffusion.
ABLATION = {
    "none": Step("nothing fused"),
    "mha": Step("+ MultiHeadAttention", ("multi_head_attention",)),
    "nhwc": Step("+ NHWC convolution", layout=True),
    "norm": Step("+ GroupNorm", norm=True),
    "gelu": Step("+ BiasSplitGelu", ("bias_split_gelu",)),
    "qkv": Step("+ packed QKV", pack=True),
    "skip": Step("+ BiasAdd, SkipLayerNorm", ("bias_add", "skip_layer_normalization")),
    "all": Step("+ SkipGroupNorm, QuickGelu", ("skip_group_norm", "quick_gelu"), rest=True),
}


def ablation_steps(target: Target) -> dict[str, Target]:
    """Step -> the target as far as that step: what comes later is left out. Steps that change nothing are absent.

    All steps use the provider's own kernels: what the op library brings is left out, and the whole target has it.
    Before the step "norm" a GroupNorm node is made and taken apart again, since a lone GroupNormalization has no
    kernel on most providers, while its parts have.
    """
    from sd_ort.targets import CUDA_CONTRIB

    bare = replace(
        target,
        contrib=CUDA_CONTRIB if target.name == "cuda" else target.contrib,
        fold_bias=False,
        linear_add=False,
        layer_norm=False,
        upsample=False,
        winograd=False,
    )
    steps: dict[str, Target] = {}
    off = {fusion for step in ABLATION.values() for fusion in step.fusions}
    layout, pack, norm = "NCHW", False, False
    for name, step in ABLATION.items():
        off -= set(step.fusions)
        layout = target.layout if step.layout else layout
        pack, norm = pack or step.pack, norm or step.norm
        expand = target.expand | {"ScaledDotProductAttention"} | (frozenset() if norm else {"GroupNorm"})
        made = replace(
            bare,
            layout=layout,
            pack=pack and target.pack,
            expand=target.expand if step.rest else frozenset(expand),
            leave=target.leave | off,
        )
        if made not in steps.values():
            steps[name] = made
    return steps


def _ours(task: Task, target: str, dtype: str, step: str = "") -> None:
    from sd_ort.optimize import optimize_component
    from sd_ort.targets import TARGETS

    hoisted = step == HOIST and task.component == "unet"
    chosen = TARGETS[target] if step in ("", HOIST) else ablation_steps(TARGETS[target])[step]
    optimize_component(task.source, task.out, chosen, dtype, hoisted=hoisted)


def _raw(task: Task, dtype: str) -> None:
    """The export as it is, its weights and tensors in `dtype`."""
    import onnx_ir as ir

    from sd_ort import calibration, precision
    from sd_ort.optimize import save

    model = ir.load(task.source)
    keep = calibration.calibrate(model, task.source, task.out.parent).nodes if dtype == "float16" else set()
    precision.convert(model, dtype, keep=keep)
    save(model, task.out)


# --- The peers (scripts/compare_fusion.py and compare_cpu.py measure them too) --------------------------------------


class _AnyInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(int, metaclass=_AnyInt):
    """int(), for arrays of one element too."""

    def __new__(cls, number: Any) -> int:  # type: ignore[misc]
        return int(number.item() if hasattr(number, "item") else number)


# What ONNX Runtime's optimizer makes that its CPU provider has no kernel for.
_NO_CPU_KERNEL = ("group_norm", "skip_group_norm", "nhwc_conv", "bias_splitgelu", "bias_add", "packed_qkv", "packed_kv")
# Options that are no fusions for Stable Diffusion, or that change its numbers.
_NOT_FUSIONS = ("enable_shape_inference", "enable_gemm_fast_gelu", "enable_gelu_approximation")


def _ort(task: Task, provider: str, dtype: str) -> None:
    """ONNX Runtime's optimizer on the TorchScript graph: its fusions were written for those."""
    optimize_by_onnxruntime(_torchscript(task), task.out, task.component, provider, dtype)


def onnxruntime_type(component: str) -> str:
    """What onnxruntime.transformers calls the kind of model that a component is."""
    return "unet" if component in ("unet", "controlnet") else "vae" if component.startswith("vae") else "clip"


def optimize_by_onnxruntime(source: Path, out: Path, component: str, provider: str, dtype: str = "float32") -> None:
    """onnxruntime.transformers with every fusion for Stable Diffusion that the provider has kernels for.

    Its attention fusion calls int() on an array of one element, which NumPy 2.4 refuses; that is mended in this
    process.
    """
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    kind = onnxruntime_type(component)
    vars(sys.modules["fusion_attention_unet"])["int"] = _Int  # ORT puts its own folder on the path
    options = FusionOptions(kind)
    on_cpu = provider == "cpu"
    for name in [name for name in vars(options) if name.startswith("enable_") and name not in _NOT_FUSIONS]:
        setattr(options, name, not (on_cpu and name.removeprefix("enable_") in _NO_CPU_KERNEL))
    made = optimize_model(
        str(source), kind, opt_level=0, optimization_options=options, use_gpu=not on_cpu, only_onnxruntime=False
    )
    if dtype == "float16":
        made.convert_float_to_float16(keep_io_types=False, op_block_list=["RandomNormalLike"])
    made.save_model_to_file(str(out), True)


def _torchscript(task: Task) -> Path:
    """The component's TorchScript export, opset 17, made once and kept; the raw model itself when it is one.

    Raises SdOrtError when the source of the export is not known.
    """
    manifest = folder.read_manifest(task.raw)
    source, options = manifest.get("source", {}), manifest.get("options", {})
    if options.get("exporter") == "torchscript":
        return task.source
    if not source:
        raise SdOrtError("its optimizer needs a TorchScript export, and what this export was made from is not known.")
    kept = task.home / TORCHSCRIPT / task.component
    if not (kept / folder.MODEL).is_file():
        from sd_ort.export import export

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
    return kept / folder.MODEL


def _onnxscript(task: Task, dtype: str) -> None:
    optimize_by_onnxscript(task.source, task.out, dtype)


def optimize_by_onnxscript(source: Path, out: Path, dtype: str = "float32") -> None:
    """onnxscript's optimizer and `optimize_for_ort`; it has no converter to float16, so ONNX Runtime's follows."""
    import onnx
    import onnx_ir as ir
    import onnxscript.optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.load(source)
    onnxscript.optimizer.optimize(model)
    made, _ = optimize_for_ort(model)
    if dtype != "float16":
        ir.save(made, out, external_data=folder.DATA)
        return
    OnnxModel = importlib.import_module("onnxruntime.transformers.onnx_model").OnnxModel
    full = out.with_name("float32.onnx")
    ir.save(made, full, external_data="float32.data")
    half = OnnxModel(onnx.load(full))
    half.convert_float_to_float16(keep_io_types=False)
    # The converter writes the cast of a value that two nodes read in float32 twice, under one name: once is enough.
    casts = {tuple(node.output): node for node in half.model.graph.node}
    del half.model.graph.node[:]
    half.model.graph.node.extend(casts.values())
    half.topological_sort()
    half.save_model_to_file(str(out), True)
    for path in (full, out.with_name("float32.data")):
        path.unlink()


RECIPES: dict[str, Callable[..., None]] = {"ours": _ours, "raw": _raw, "ort": _ort, "onnxscript": _onnxscript}
