"""Shared checks of diffusion transformers: export, fusion, quantization, LoRA and caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from image_metrics import psnr as image_psnr
from test_export import check_against_torch

from scripts.bench import fusion_transformers
from scripts.fixtures.parity_models import preset
from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.random_weights import fill_random
from sd_ort.checkpoints.synthetic_inputs import SIZES, random_inputs
from sd_ort.core.metrics import array_errors, psnr, relative_l2_error
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import verify
from sd_ort.runtime.session import load as open_component
from sd_ort.stages import optimize

TOO_NARROW = "it has fewer than 32 input or output channels"
TAKEN_APART = ("ScaledDotProductAttention", "Softmax", "ReduceMean", "Neg")


def built(family: str, name: str) -> Any:
    """Return a model of a family's parity preset with random weights, the same at each call."""
    config = preset(family).models[name]
    model = build_model(class_name(config), config)
    fill_random(model, 1)
    return model.eval()


def nmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(array_errors(actual.detach().numpy(), expected.detach().numpy())["nmse"])


def check_fusions(
    folder: Path, family: str, sizes: Sequence[dict[str, int]], out: Path, expected: Mapping[str, int]
) -> ir.Graph:
    """Return the transformer of an export, fused for `portable`.

    Asserts that the export equals torch at all `sizes`, the operators `expected` and none of TAKEN_APART after fusion,
    and equal outputs.
    """
    assert check_against_torch(folder, "transformer", f"parity-{family}", *sizes) <= 1e-10
    optimize(folder, out, target="portable", components=["transformer"])
    graph = load(out / "transformer" / "model.onnx").graph
    counts = Counter(node.op_type for node in graph)
    counts_by_op = dict.fromkeys(TAKEN_APART, 0) | dict(expected)
    assert {op: counts[op] for op in counts_by_op} == counts_by_op
    result = verify(folder, out, components=["transformer"])
    assert result["passed"], result["rows"]
    return graph


def check_targets(folder: Path, out: Path, optimized: Mapping[str, Path] | None = None) -> None:
    """Assert that a transformer has as many fused nodes on each target as in `portable`, and none of TAKEN_APART.

    `optimized`: folders of some targets, which are not optimized again. Counted are attentions, rotary embeddings and
    norms. A modulation of an RMS norm is the scale of an RMSNormalization or of an AdaptiveNorm, as the target's
    kernels have it.
    """
    counts = {}
    for target in ("portable", "cpu", "cuda", "gpu", "hip"):
        if (fused := (optimized or {}).get(target)) is None:
            fused = out / target
            optimize(folder, fused, target=target, components=["transformer"], hoist=False)
        graph = load(fused / "transformer" / "model.onnx").graph
        attention, rotary, rms, adaptive, *_ = fusion_transformers.measure(graph)
        counts[target] = attention, rotary, rms + adaptive
        taken_apart = {node.op_type for node in graph} & {*TAKEN_APART}
        assert not taken_apart, (target, taken_apart)
    assert counts == dict.fromkeys(counts, counts["portable"])


def check_eight_bits(folder: Path, out: Path) -> None:
    """Assert that the linears of a transformer's steps run in 8 bits, and on the CPU with the error of rounding.

    That of weights and activations, whose ranges are those of other random inputs, is a few hundredths: int8 has 127
    steps for the largest element, float8 (e4m3) rounds by up to 1/16 of each. Our provider has as many in float8.
    """
    optimize(folder, out / "float32", target="cpu", components=["transformer"])
    inputs = list(load(out / "float32" / "transformer" / "model.onnx").graph.inputs)
    config = component_config(out / "float32", "transformer")
    feed, *feeds = (random_inputs("transformer", inputs, config, SIZES[0], seed) for seed in range(5))
    runs = {f"transformer/{name}/{i}": array for i, each in enumerate(feeds) for name, array in each.items()}
    np.savez(out / "runs.npz", **runs)  # type: ignore[arg-type]
    expected = open_component(out / "float32", "transformer")(**feed)["out_hidden_states"]
    for eight_bits, lowest, highest in (("int8", 0.005, 0.05), ("float8", 0.02, 0.1)):
        options: dict[str, Any] = {"target": "cpu", "eight_bits": eight_bits, "inputs": out / "runs.npz"}
        optimize(folder, out / eight_bits, components=["transformer"], **options)
        entry = read_manifest(out / eight_bits)["components"]["transformer"]["eight_bits"]
        others = {reason.partition(":")[0] for reason in entry["not_quantized"]}
        assert (entry["format"], entry["layers"].keys()) == (eight_bits, {"LinearAdd"}), entry
        assert others <= {"its input does not depend on the latents", TOO_NARROW}, others
        actual = open_component(out / eight_bits, "transformer")(**feed)["out_hidden_states"]
        assert lowest < relative_l2_error(actual, expected) < highest, eight_bits
    options = {"target": "gpu", "dtype": "float16", "eight_bits": "float8", "inputs": out / "runs.npz"}
    optimize(folder, out / "gpu", components=["transformer"], hoist=False, **options)
    linears = read_manifest(out / "gpu")["components"]["transformer"]["eight_bits"]["layers"]
    assert sum(linears.values()) > 0, linears


def check_text_encoder(folder: Path, layers: int) -> None:
    """Assert that each layer of a folder's language model is one attention and two rotary embeddings, no more."""
    counts = Counter(node.op_type for node in load(folder / "text_encoder" / "model.onnx").graph)
    assert counts["MultiHeadAttention"] + counts["Attention"] == layers
    assert counts["RotaryEmbedding"] == 2 * layers
    assert {op: counts[op] for op in ("Softmax", "Transpose", "Neg")} == {"Softmax": 0, "Transpose": 0, "Neg": 0}


def hoisted_counts(folder: Path, out: Path, dtype: str) -> dict[str, Counter[str]]:
    """Return the operators of each part of a transformer, optimized for `gpu` and hoisted, whose outputs are equal."""
    optimize(folder, out, target="gpu", dtype=dtype, components=["transformer"], hoist=True)
    nodes = read_manifest(out)["components"]["transformer"]["hoisted"]
    assert nodes.keys() == {"transformer_prompt", "transformer_time", "transformer"}
    result = verify(folder, out, components=["transformer"])
    assert result["passed"], result["rows"]
    return {name: Counter(node.op_type for node in load(out / name / "model.onnx").graph) for name in nodes}


def check_lora(
    theirs: Any, ours: Any, call: Mapping[str, Any], prompts: Sequence[str], their_lora: Path, our_lora: Path,
    guided: bool = True,
) -> None:  # fmt: skip
    """Assert that images without a LoRA, and with it, are those of diffusers, and that the LoRA and the prompts count.

    The files hold one LoRA, in names that each side reads. `call`: the arguments of both beside prompts and seed.
    guided: whether it has guidance, without which random weights hardly follow the prompts.
    """

    def expected() -> np.ndarray:
        with torch.no_grad():
            images: np.ndarray = theirs(**call, prompt=prompts, generator=torch.Generator().manual_seed(5)).images
        return images

    without = expected()
    theirs.load_lora_weights(str(their_lora))
    try:
        changed = expected()
    finally:
        theirs.unload_lora_weights()
    assert psnr(ours(**call, prompt=prompts, generator=5).images, without, 0.01, peak=1.0) >= 60
    ours.load_lora_weights(our_lora)
    assert psnr(ours(**call, prompt=prompts, generator=5).images, changed, 0.01, peak=1.0) >= 60
    ours.unload_lora_weights()
    assert psnr(without, changed, 0.01, peak=1.0) < 40, "the LoRA changes nothing"
    other = ours(**call, prompt=prompts[::-1], generator=5).images
    assert not guided or psnr(other, without, 0.01, peak=1.0) < 50, "the comparison does not see the prompt"


def check_cache(theirs: Any, ours: Any, config: Any, module: str, call: Mapping[str, Any], fewest: int = 3) -> None:
    """Assert that a cache has the full steps and the image of diffusers' hook, and changes the image.

    `module`: of diffusers' transformer, runs in full steps alone. `call`: of two prompts, without a generator.
    `fewest`: full steps that are expected at least; the first one of each prompt is full.
    """
    first = ours(**call, generator=1).images[0]
    ours.enable_cache(config)
    cached = ours(**call, generator=1).images[0]
    full_steps = ours._cached.full_steps
    ours.disable_cache()
    runs = list[int]()
    hook = theirs.transformer.get_submodule(module).register_forward_hook(lambda *_: runs.append(1))
    theirs.transformer.enable_cache(config)
    try:
        expected = theirs(**call, generator=torch.Generator().manual_seed(1)).images[0]
    finally:
        theirs.transformer.disable_cache()
        hook.remove()
    assert full_steps == len(runs)
    assert fewest <= len(runs) < 2 * call["num_inference_steps"]
    assert image_psnr(cached, expected) > 80
    assert image_psnr(cached, first) < 70
