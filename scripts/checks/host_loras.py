"""Compare our deltas of LoRA, DoRA, LoHa, LoKr and full differences with those of ComfyUI, Forge and the WebUI.

    git clone https://github.com/comfyanonymous/ComfyUI
    git clone https://github.com/lllyasviel/stable-diffusion-webui-forge
    python scripts/checks/host_loras.py --comfyui ComfyUI --forge stable-diffusion-webui-forge [--out OUT.json]

Each host parses the file with its own loader and adds it to a linear layer and to a convolution of random weights.
Forge's checkout has the WebUI's network classes, too. What these modules import of their application, and do not need
here, is replaced by stubs. The command fails if a delta differs by more than MAX_ERROR, unless DEVIATIONS has the pair.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.report import save_findings
from sd_ort.core.errors import first_line
from sd_ort.core.metrics import relative_l2_error
from sd_ort.weights.lora_files import read_adapter

MAX_ERROR = 1e-5  # of the delta, relative
RANK = 4
STRENGTHS = (1.0, 0.6)
NAME = "lora_unet_down_blocks_0_resnets_0_conv1"
SHAPES = {"linear": (24, 16), "convolution": (24, 16, 3, 3)}
Tensors = dict[str, torch.Tensor]
HostDelta = Callable[[Tensors, torch.Tensor, float], torch.Tensor]
# Host and kind -> why the deltas differ.
DEVIATIONS = {
    (
        "ComfyUI",
        "DoRA of outputs",
    ): "it divides by the norms of the weight without the LoRA; the paper, PEFT and LyCORIS divide by those of the sum",
    ("Forge", "DoRA of outputs"): "as ComfyUI",
    ("WebUI", "DoRA of outputs"): "it multiplies by the magnitudes of outputs and divides by the norms of inputs",
}


def files(shape: tuple[int, ...]) -> dict[str, Tensors]:
    """Return the tensors of a file of each kind for a weight of `shape`, in Kohya's names."""
    random = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random) * 0.3

    out, inner, *kernel = shape
    ones = [1] * len(kernel)
    alpha = {"alpha": torch.tensor(3.0)}
    lora = {"lora_down.weight": normal(RANK, inner, *kernel), "lora_up.weight": normal(out, RANK, *ones)} | alpha
    columns = inner * int(np.prod(kernel, dtype=int))
    loha = {f"hada_w{i}_{side}": normal(*s) for i in (1, 2) for side, s in (("a", (out, RANK)), ("b", (RANK, columns)))}
    factored = {"lokr_w1": normal(4, 4), "lokr_w2_a": normal(6, RANK), "lokr_w2_b": normal(RANK, columns // 4)}
    inputs, outputs = 0.5 + normal(1, inner, *ones).abs(), 0.5 + normal(out, 1, *ones).abs()
    kinds = {
        "LoRA": lora,
        "DoRA of inputs": lora | {"dora_scale": inputs},
        "DoRA of outputs": lora | {"dora_scale": outputs},
        "LoHa": loha | alpha,
        "LoHa with DoRA of inputs": loha | alpha | {"dora_scale": inputs},
        "LoKr": {"lokr_w1": normal(4, 4), "lokr_w2": normal(6, inner // 4, *kernel)} | alpha,
        "LoKr, factored": factored | alpha,
        "LoKr, both factored": {"lokr_w1_a": normal(4, 2), "lokr_w1_b": normal(2, 4)} | factored | alpha,
        "difference": {"diff": normal(*shape)},
    }
    kinds["LoKr, both factored"].pop("lokr_w1")
    if kernel:
        core = normal(RANK, RANK, *kernel)
        kinds["LoCon with a core"] = {
            "lora_down.weight": normal(RANK, inner, 1, 1), "lora_mid.weight": core,
            "lora_up.weight": normal(out, RANK, 1, 1),
        } | alpha  # fmt: skip
        kinds["LoHa with cores"] = alpha | {
            "hada_w1_a": normal(RANK, out), "hada_w1_b": normal(RANK, inner), "hada_t1": core,
            "hada_w2_a": normal(RANK, out), "hada_w2_b": normal(RANK, inner), "hada_t2": normal(RANK, RANK, *kernel),
        }  # fmt: skip
        kinds["LoKr with a core"] = alpha | {
            "lokr_w1": normal(4, 4), "lokr_t2": core, "lokr_w2_a": normal(RANK, 6),
            "lokr_w2_b": normal(RANK, inner // 4),
        }  # fmt: skip
    return {kind: {f"{NAME}.{name}": tensor for name, tensor in tensors.items()} for kind, tensors in kinds.items()}


def ours(tensors: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
    """Return our delta, as sd_ort/integrations applies it in hosts."""
    adapter = read_adapter({name: tensor.numpy() for name, tensor in tensors.items()}, {"layers_per_block": 2})
    module = adapter.module("unet", NAME.removeprefix("lora_unet_"))
    module.scales_dora_norm = False
    delta = module.delta(strength, tuple(weight.shape), weight.numpy)
    assert delta is not None
    return torch.from_numpy(delta.dense().reshape(weight.shape))


def stub(name: str, **attributes: Any) -> ModuleType:
    """Register a module with these attributes, and as an attribute of its parent."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(attributes)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent] if parent in sys.modules else importlib.import_module(parent), last, module)
    return module


def cast(tensor: torch.Tensor, device: Any, dtype: Any, copy: bool = False) -> torch.Tensor:
    """Stand in for cast_to_device of ComfyUI and Forge."""
    return tensor.to(device, dtype, copy=copy)


def comfyui(checkout: Path) -> HostDelta:
    """Return ComfyUI's delta: comfy.lora.load_lora and calculate_weight."""
    sys.path.insert(0, str(checkout))
    importlib.import_module("comfy")
    for name in ("memory_management", "utils", "model_base", "patcher_extension"):
        stub(f"comfy.{name}", PatcherInjection=None)
    stub("comfy.model_management", cast_to_device=cast)
    lora = importlib.import_module("comfy.lora")

    def delta(tensors: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
        patch = lora.load_lora(dict(tensors), {NAME: "weight"})["weight"]
        patches = [(strength, patch, 1.0, None, None)]
        result: torch.Tensor = lora.calculate_weight(patches, weight.clone(), "weight") - weight
        return result

    return delta


def forge(checkout: Path) -> HostDelta:
    """Return Forge's delta: load_lora and merge_lora_to_weight of its backend."""
    sys.path.insert(0, str(checkout))
    stub("backend").__path__ = [str(checkout / "backend")]
    stub("backend.memory_management", cast_to_device=cast)
    stub("backend.utils")
    stub("backend.operations")
    lora = importlib.import_module("backend.patcher.lora")

    def delta(tensors: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
        patches, _ = lora.load_lora(dict(tensors), {NAME: "weight"})
        merged = lora.merge_lora_to_weight([(strength, patches["weight"], 1.0, None, None)], weight.clone())
        result: torch.Tensor = merged - weight
        return result

    return delta


def webui(checkout: Path) -> HostDelta:
    """Return the WebUI's delta: calc_updown of its network classes, in Forge's copy."""
    sys.path.insert(0, str(checkout / "packages_3rdparty" / "webui_lora_collection"))
    stub("modules", **dict.fromkeys(("sd_models", "cache", "errors", "hashes", "shared", "devices")))
    stub("modules.models")
    stub("modules.models.sd3")
    stub("modules.models.sd3.mmdit", QkvLinear=type("QkvLinear", (), {}))
    sys.modules["modules"].devices = SimpleNamespace(cpu="cpu", dtype=torch.float32)  # type: ignore[attr-defined]
    kinds = [
        getattr(importlib.import_module(f"network_{name}"), f"ModuleType{cls}")()
        for name, cls in (("lora", "Lora"), ("hada", "Hada"), ("lokr", "Lokr"), ("full", "Full"))
    ]

    def delta(tensors: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
        layer: torch.nn.Module = torch.nn.Linear(1, 1) if weight.ndim == 2 else torch.nn.Conv2d(1, 1, 3)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        own = {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items()}
        weights = SimpleNamespace(network_key=NAME, sd_key="unet", w=own, sd_module=layer)
        network = SimpleNamespace(unet_multiplier=strength, te_multiplier=strength, dyn_dim=None)
        module = next(created for kind in kinds if (created := kind.create_module(network, weights)) is not None)
        result: torch.Tensor = module.calc_updown(weight.clone())[0].detach()
        return result.reshape(weight.shape)

    return delta


def main() -> None:
    """Compare all kinds with all hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, metavar="CHECKOUT")
    parser.add_argument("--forge", type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    hosts: dict[str, HostDelta] = {}
    if options.comfyui:
        hosts["ComfyUI"] = comfyui(options.comfyui.resolve())
    if options.forge:
        hosts |= {"Forge": forge(options.forge.resolve()), "WebUI": webui(options.forge.resolve())}
    columns: dict[str, Any] = {}
    failures = []
    for host, host_delta in hosts.items():
        for layer, shape in SHAPES.items():
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
            for kind, tensors in files(shape).items():
                column = columns.setdefault(f"{host}, {layer}", {})
                try:
                    expected = [host_delta(tensors, weight, each).numpy() for each in STRENGTHS]
                except RuntimeError as refusal:
                    column[kind] = f"fails in {host}: {first_line(refusal)[:60]}"
                    continue
                if not any(each.any() for each in expected):  # ComfyUI logs the error
                    column[kind] = f"fails in {host}"
                    continue
                results = [ours(tensors, weight, each).numpy() for each in STRENGTHS]
                error = max(map(relative_l2_error, results, expected))
                column[kind] = f"{error:.1e}"
                if error > MAX_ERROR and (host, kind) not in DEVIATIONS:
                    failures.append(f"{host} {layer} {kind}: {error:.1e}")
    reasons = {f"{host}, {kind}": why for (host, kind), why in DEVIATIONS.items() if host in hosts}
    command = "scripts/checks/host_loras.py --comfyui CHECKOUT --forge CHECKOUT"
    title = "Deltas of LoRAs beside those of hosts: relative error, the larger of strengths 1 and 0.6"
    save_findings(title, command, {**columns, "differs by intention": reasons}, options.out)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
