"""The caches of diffusers between the steps of a transformer: `enable_cache` of its pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from sd_ort.core.errors import InputError
from sd_ort.pipelines.cached_transformer import COMPONENT
from sd_ort.pipelines.first_block_cache import FirstBlockCacheConfig
from sd_ort.pipelines.mag_cache import MagCacheConfig, MagCacheTransformer
from sd_ort.pipelines.taylor_seer_cache import TaylorSeerCacheConfig

CacheConfig: TypeAlias = "FirstBlockCacheConfig | MagCacheConfig | TaylorSeerCacheConfig"
CONFIGS: Mapping[str, type[CacheConfig]] = {
    each.__name__: each for each in (FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig)
}


def cache_config(config: Any) -> CacheConfig:
    """Return the settings of a cache, from a config of sd-ort or diffusers or the threshold of FirstBlockCache.

    Raises InputError for another config, and for settings that cannot be used.
    """
    if isinstance(config, tuple(CONFIGS.values())):
        return config
    settings_class = CONFIGS.get(type(config).__name__)
    if settings_class is not None:
        return settings_class(**{each.name: getattr(config, each.name) for each in fields(settings_class)})
    if type(config).__name__.endswith("Config"):
        raise InputError(f"{type(config).__name__} is not supported: use one of {', '.join(CONFIGS)}.")
    return FirstBlockCacheConfig(config)


class TransformerCacheMixin:
    """Methods of a transformer's pipeline that keep tensors between steps."""

    folder: Path
    models: Any
    block_cache: CacheConfig | None = None
    _cached: Any = None  # the transformer of the last call

    @property
    def is_cache_enabled(self) -> bool:
        return self.block_cache is not None

    @property
    def mag_ratios(self) -> list[float]:
        """Ratios that the last call with MagCacheConfig(calibrate=True) measured; [] without one."""
        return list(self._cached.ratios) if isinstance(self._cached, MagCacheTransformer) else []

    def enable_cache(self, config: Any = None, *, threshold: Any = None) -> None:
        """Compute less in some steps, until `disable_cache`. Images differ.

        Each prompt and negative prompt has a cache of its own. Calls of few steps are rejected.

        Args:
            config: `FirstBlockCacheConfig`, `MagCacheConfig` or `TaylorSeerCacheConfig`, ours or diffusers'; a number
                is the threshold of the first one. The default is FirstBlockCacheConfig(). All but TaylorSeer's lite
                mode are for FLUX.1 and Qwen-Image, for which diffusers offers caches that work.
            threshold: FirstBlockCacheConfig(threshold).

        Raises:
            InputError: Settings or a transformer that cannot be used.
        """
        if threshold is not None and config is not None:
            raise InputError("enable_cache takes a config or a threshold: leave one out.")
        if config is None:
            config = FirstBlockCacheConfig() if threshold is None else threshold
        cache = cache_config(config)
        self.disable_cache()
        try:
            cache.open(self.models)
        except BaseException:
            self.models.drop_variants(COMPONENT)
            raise
        self.block_cache = cache

    def disable_cache(self) -> None:
        """Compute everything in every step again."""
        self.block_cache = self._cached = None
        self.models.drop_variants(COMPONENT)
