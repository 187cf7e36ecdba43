"""Weights of a transformer that are streamed from pinned host memory, on the provider's host build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd_ort import FluxPipeline
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.graphs.partition import partition_graph
from sd_ort.runtime.streamed import RESIDENT_SHARE, PartitionWeights, StreamedModel, StreamPlan
from sd_ort.stages import optimize

CALL: dict[str, Any] = {
    "prompt": "a red circle on the left", "num_inference_steps": 2, "height": 64, "width": 64, "max_sequence_length": 8,
    "output_type": "latent", "generator": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("streamed") / "out"
    optimize("demo-dit", out, target="gpu", dtype="float32", calibrate=False)
    return out


def load(folder: Path, provider: str, limit: int | None = None, **options: Any) -> Any:
    settings = {} if limit is None else {"memory_limit": str(limit)}
    return FluxPipeline.from_pretrained(folder, provider, provider_options=settings, **options)


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**CALL, **arguments}).images)


def weights_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "transformer").iterdir())


def test_draws_where_the_weights_do_not_fit(folder: Path, provider: str, capsys: Any) -> None:
    """The same bytes as resident; LoRA's weights too; one line says that it streams; the buffers are what was said."""
    limit = int(0.9 * weights_of(folder))
    resident = load(folder, provider, low_memory=True)
    expected = draw(resident)
    assert "streamed" not in capsys.readouterr().err
    with pytest.raises((SdOrtError, MemoryError)):
        draw(load(folder, provider, limit))
    capsys.readouterr()
    streamed = load(folder, provider, limit, low_memory=True)
    assert "of weights are streamed from host memory in each step, in 6 parts: at least" in capsys.readouterr().err
    np.testing.assert_array_equal(draw(streamed), expected)
    model = streamed.models["transformer"]
    assert isinstance(model, StreamedModel)
    assert len(model.partitions) == 10
    assert 0.5 * weights_of(folder) < model.weights.device_bytes < RESIDENT_SHARE * limit
    pinned = model.weights.pinned
    assert 0.5 * weights_of(folder) < sum(memory.size for memory in pinned.memory.values()) < 0.7 * weights_of(folder)
    draw(streamed)  # the text encoders closed it
    assert streamed.models["transformer"] is not model
    assert streamed.models["transformer"].weights.pinned is pinned  # not read again

    random, lora = torch.Generator().manual_seed(0), {}
    for block in (0, 2):
        name = f"transformer.transformer_blocks.{block}.attn.to_q"
        lora[f"{name}.lora_A.weight"] = torch.randn(2, 192, generator=random) * 0.2
        lora[f"{name}.lora_B.weight"] = torch.randn(192, 2, generator=random) * 0.2
    for pipeline in (resident, streamed):
        pipeline.load_lora_weights(lora, "a")
    changed = draw(streamed)
    np.testing.assert_array_equal(changed, draw(resident))
    assert np.abs(changed - expected).max() > 1e-3
    with pytest.raises(InputError, match="transformer is streamed from host memory, which first block cannot"):
        streamed.enable_cache(0.1)
    with pytest.raises(InputError, match="no runs are captured: leave graph out"):
        load(folder, provider, limit, low_memory=True, graph=True)


@pytest.mark.parametrize(("weights", "budget"), [(24e9, 12e9), (17e9, 12e9), (17e9, 20e9), (24e9, 8e9), (41e9, 16e9)])
def test_plan(weights: float, budget: float) -> None:
    """Resident partitions and both buffers fit in their share; the streamed ones are even in number and far apart."""
    plan = StreamPlan.of(int(weights), budget)
    assert plan is not None
    size, streamed = weights / plan.count, plan.streamed
    assert len(streamed) % 2 == 0
    assert len(set(streamed)) == plan.count - plan.resident
    assert (plan.resident + 2) * size <= RESIDENT_SHARE * budget < (plan.resident + 4) * size
    gaps = [b - a for a, b in zip(streamed, [*streamed[1:], plan.count], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_plan_of_little_memory() -> None:
    assert StreamPlan.of(int(9e9), 12e9) is None
    assert StreamPlan.of(int(24e9), 1e9) == StreamPlan(192, 4)


def test_every_weight_is_in_a_partition(folder: Path) -> None:
    parts = partition_graph(folder / "transformer" / "model.onnx", 6)
    sizes = [PartitionWeights.of(part.graph).size for part in parts]
    assert max(sizes) < 1.5 * sum(sizes) / 6  # each cut is at most a quarter of a part away from the balanced one
