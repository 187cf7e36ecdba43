"""TaylorSeer cache of diffusers: steps that extrapolate attention outputs of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_integer
from sd_ort.pipelines.cached_transformer import COMPONENT, OUTPUT, check_steps, open_cut
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel

DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)
}  # fmt: skip


@dataclass(frozen=True)
class TaylorSeerCacheConfig:
    """Settings of TaylorSeer, with diffusers' names and defaults.

    Steps 0 to `disable_cache_before_step` - 1, one step in `cache_interval` behind them and those from
    `disable_cache_after_step` on compute everything. In the others each attention's value is a Taylor polynomial of
    `max_order` over earlier steps. It is taken before the attention's last linear layer, which is computed in every
    step: as the polynomial is linear, the result is that of diffusers up to rounding.

    Attributes:
        taylor_factors_dtype: Stores the factors in this type, by torch's name or as a torch.dtype.
        use_lite_mode: Extrapolate the transformer's output instead, so that other steps compute nothing.
        skip_predict_identifiers, cache_identifiers: Names of torch modules in diffusers; none here.

    Raises InputError for settings that cannot be used.
    """

    cache_interval: int = 5
    disable_cache_before_step: int = 3
    disable_cache_after_step: int | None = None
    max_order: int = 1
    taylor_factors_dtype: Any = "bfloat16"
    skip_predict_identifiers: list[str] | None = None
    cache_identifiers: list[str] | None = None
    use_lite_mode: bool = False

    def __post_init__(self) -> None:
        lowest = {"cache_interval": 1, "disable_cache_before_step": 1, "disable_cache_after_step": 0, "max_order": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if name == "disable_cache_after_step" and value is None:
                continue
            if not is_integer(value) or value < least:
                raise InputError(f"{name} must be an integer from {least} on, got {str(value)[:80]}.")
        if self.dtype_name not in DTYPES:
            raise InputError(f"taylor_factors_dtype must be one of {', '.join(DTYPES)}, got {self.dtype_name[:80]}.")
        if self.skip_predict_identifiers or self.cache_identifiers:
            raise InputError(
                "skip_predict_identifiers and cache_identifiers are names of torch modules, which a graph has not: "
                "leave them out, or give use_lite_mode=True."
            )

    @property
    def dtype_name(self) -> str:
        """Name of the factors' type."""
        return str(self.taylor_factors_dtype).removeprefix("torch.")

    def check(self, steps: int) -> None:
        """Raise InputError for calls whose steps differ too much for the cache."""
        check_steps(steps)

    def is_full(self, step: int) -> bool:
        """Return whether a step computes everything."""
        after = self.disable_cache_after_step
        if step < self.disable_cache_before_step or (after is not None and step >= after):
            return True
        return (step - self.disable_cache_before_step - 1) % self.cache_interval == 0

    def open(self, models: Components) -> TaylorSeerTransformer:
        """Return the transformer for the steps of one call.

        Raises InputError if its graph cannot be cut, and for attentions on a GPU, which would be copied to the host.
        """
        if self.use_lite_mode:
            return TaylorSeerTransformer(models[COMPONENT], None, self)
        full = open_cut(models, "TaylorSeer's attentions", "return_attentions")
        if isinstance(full, GpuGraphModel) or full.device != "cpu":
            raise InputError("TaylorSeer keeps attentions on the CPU alone: give use_lite_mode=True on a GPU.")
        light = open_cut(models, "TaylorSeer's rest", "leave_attentions_out")
        models.opened.pop(COMPONENT, None)
        return TaylorSeerTransformer(full, light, self)


@dataclass
class _Series:
    """Taylor series of one prompt: the factors of each tensor by order, the current step and the last full one."""

    prompt_inputs: Mapping[str, np.ndarray]  # inputs of the prompt, alive as long as this
    shared: dict[str, np.ndarray]  # those of the light graph
    factors: dict[str, list[np.ndarray]] = field(default_factory=dict)
    dtypes: dict[str, np.dtype] = field(default_factory=dict)  # of the values
    step: int = -1
    updated: int = -1

    def update(self, tensors: Mapping[str, np.ndarray], order: int, dtype: np.dtype) -> None:
        """Take the values of a full step: divided differences up to `order`."""
        for name, value in tensors.items():
            new = [value]
            for previous in self.factors.get(name, ())[:order]:
                new.append((new[-1] - previous.astype(value.dtype)) / np.asarray(self.step - self.updated, value.dtype))
            self.factors[name], self.dtypes[name] = [factor.astype(dtype) for factor in new], value.dtype
        self.updated = self.step

    def predict(self) -> dict[str, np.ndarray]:
        """Return the values of the current step."""
        offset, values = self.step - self.updated, {}
        for name, factors in self.factors.items():
            dtype = self.dtypes[name]
            terms = [f.astype(dtype) * dtype.type(offset**k / math.factorial(k)) for k, f in enumerate(factors)]
            values[name] = sum(terms[1:], terms[0])
        return values


class TaylorSeerTransformer:
    """Runs a transformer in full steps, and in others a graph that reads extrapolated values; without one, no graph.

    For the steps of one call. full_steps: number of full runs.
    """

    def __init__(self, full: OrtModel, light: OrtModel | None, config: TaylorSeerCacheConfig) -> None:
        self.full, self.light, self.config = full, light, config
        self.inputs = full.inputs
        self.cached_names = [name for name in full.outputs if (light is None) == (name == OUTPUT)]
        self.full_steps = 0
        self._series: dict[int, _Series] = {}  # by the identity of the inputs that the steps of a prompt share

    def run_with_shared(self, shared: Mapping[str, np.ndarray], **arrays: Any) -> dict[str, np.ndarray]:
        """Run a step as `Model.run_with_shared` does."""
        light, config = self.light, self.config
        series = self._series.get(id(shared))
        if series is None:
            own = {} if light is None else {name: a for name, a in shared.items() if name in light.inputs}
            series = self._series[id(shared)] = _Series(shared, own)
        series.step += 1
        if config.is_full(series.step):
            self.full_steps += 1
            outputs = self.full.run_with_shared(shared, **arrays)
            series.update({n: outputs[n] for n in self.cached_names}, config.max_order, DTYPES[config.dtype_name])
            return {OUTPUT: outputs[OUTPUT]}
        values = series.predict()
        if light is None:
            return values
        own = {name: array for name, array in arrays.items() if name in light.inputs}
        return light.run_with_shared(series.shared, **own, **values)
