"""DeepCache: UNet steps that reuse deep features of an earlier step. Methods and checks of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_integer
from sd_ort.pipelines.partial_steps import ShallowSteps
from sd_ort.pipelines.state import PipelineState

if TYPE_CHECKING:
    import onnx_ir as ir

    from sd_ort.pipelines.request import Request
    from sd_ort.runtime.session import OrtModel

Edit: TypeAlias = "Callable[[ir.Model, int], bool]"  # of a graph and `size_multiple`; returns whether the graph changed

FEWEST_STEPS = 10  # below, every step changes much: LCM and Turbo models take 1 to 8
FEW_STEP_SCHEDULERS = ("LCMScheduler", "TCDScheduler")
ADVICE = "disable_cache() or leave out --cache"


def takes_few_steps(request: Request, scheduler: str) -> bool:
    """Return whether a call is of an LCM model, which has few steps that differ much."""
    return scheduler in FEW_STEP_SCHEDULERS or request.embedded_guidance is not None


@dataclass(frozen=True)
class StepCache:
    """Settings of DeepCache, under the names of its authors' package.

    cache_interval: every so many steps, one computes all of the UNet. cache_branch_id: where the UNet is cut, 0 at its
    last skip connection; higher ones keep less.
    """

    cache_interval: int
    cache_branch_id: int = 0

    @property
    def label(self) -> str:
        """Return what tells the edited graphs of one branch from others."""
        return f"step cache {self.cache_branch_id}"

    def check(self, request: Request, scheduler: str) -> None:
        """Raise InputError for calls whose steps differ too much from each other."""
        if takes_few_steps(request, scheduler):
            raise InputError(f"LCM models take few steps, of which none can be shallow: {ADVICE}.")
        if request.num_inference_steps < FEWEST_STEPS:
            raise InputError(
                f"{request.num_inference_steps} steps are too few to keep features between them, as LCM and Turbo "
                f"models take: give {FEWEST_STEPS} or more, or {ADVICE}."
            )

    def return_features(self, model: ir.Model, _: int) -> bool:
        """Edit the graph of full steps."""
        from sd_ort.graphs.step_cache import return_deep_features

        return_deep_features(model, self.cache_branch_id)
        return True

    def keep_shallow_part(self, model: ir.Model, _: int) -> bool:
        """Edit the graph of shallow steps."""
        from sd_ort.graphs.step_cache import keep_shallow_part

        keep_shallow_part(model, self.cache_branch_id)
        return True


class StepCacheMixin(PipelineState):
    """Methods of a pipeline that keep deep features between steps."""

    step_cache: StepCache | None = None

    @property
    def is_cache_enabled(self) -> bool:
        return self.step_cache is not None

    def enable_cache(self, cache_interval: int = 3, cache_branch_id: int = 0) -> None:
        """Keep the UNet's deep features for `cache_interval` steps (DeepCache), until `disable_cache`.

        One step in `cache_interval` computes the whole UNet. The others compute the layers outside the skip connection
        `cache_branch_id`, counted from the last one. Images differ; `results/step_cache.md` has quality and time.
        Raises InputError for other numbers, for LCM models, and for folders and placements without a UNet to cut.
        """
        if not is_integer(cache_interval) or cache_interval < 2:
            raise InputError(f"cache_interval {cache_interval} keeps nothing: give an integer from 2 on.")
        if not is_integer(cache_branch_id) or cache_branch_id < 0:
            raise InputError(f"cache_branch_id {cache_branch_id} is none: give an integer from 0 on.")
        if not self.HAS_SEPARATE_COMPONENTS:
            raise InputError(f"{self.folder} is merged: its steps are one graph. Use the folder it was made from.")
        if self.unet_config.get("time_cond_proj_dim"):
            raise InputError(f"{self.folder} is an LCM model of few steps, of which none can be shallow.")
        self.disable_cache()
        cache = StepCache(int(cache_interval), int(cache_branch_id))
        self._edit_unet([(cache.label, cache.return_features)], captured=True)  # raises for a branch that is not there
        self.step_cache = cache

    def disable_cache(self) -> None:
        """Compute the full UNet in every step again."""
        self.step_cache = None
        vars(self).pop("loop", None)  # which holds the sessions
        self.models.drop_variants("unet")

    def _edit_unet(self, edits: list[tuple[str, Edit]], *, captured: bool = False) -> str:
        """Return the key of the UNet with edits of its graph. Raises InputError if the graph cannot be edited."""
        label = " and ".join(label for label, _ in edits)
        return self.models.edit("unet", label, partial(apply_edits, edits, self.size_multiple), captured=captured)

    def _shallow_steps(self, edits: list[tuple[str, Edit]]) -> ShallowSteps | None:
        """Return the shallow steps over a UNet with further `edits` of its graph; None without a cache."""
        cache = self.step_cache
        if cache is None:
            return None
        both = [*edits, (f"shallow {cache.label}", cache.keep_shallow_part)]
        label = " and ".join(label for label, _ in both)

        def make(path: Path) -> bytes:
            graph = apply_edits(both, self.size_multiple, path)
            assert graph is not None
            return graph

        def open_model() -> OrtModel:
            return self.models.variant("unet", label, make, captured=not edits)

        return ShallowSteps(cache.cache_interval, open_model)


def apply_edits(edits: list[tuple[str, Edit]], size_multiple: int, path: Path) -> bytes | None:
    """Return the UNet at `path` with edits of its graph, serialized over its data; None if they change nothing."""
    from sd_ort.graphs.load import load, serialize_over_data

    model = load(path)
    changed = [edit(model, size_multiple) for _, edit in edits]
    return serialize_over_data(model, path.parent) if any(changed) else None
