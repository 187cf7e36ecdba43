"""Models of random weights on a GPU (or, to try it, on the CPU), their inputs and their raw exports."""

from __future__ import annotations

import lzma
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.random_weights import fill_random
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALIBRATION_SIZE = 16  # edge of the latent
TAESD = {
    "_class_name": "AutoencoderTiny", "in_channels": 3, "out_channels": 3, "latent_channels": 4,
    "encoder_block_out_channels": [64, 64, 64, 64], "decoder_block_out_channels": [64, 64, 64, 64],
    "num_encoder_blocks": [1, 3, 3, 3], "num_decoder_blocks": [3, 3, 3, 1], "block_out_channels": [64, 64, 64, 64],
}  # fmt: skip
# Configurations by preset and model; "taesd" is Stable Diffusion 1.5 with a VAE of convolutions and Relus alone.
CONFIGS = {name: preset.models for name, preset in PRESETS.items()} | {"taesd": PRESETS["sd15"].models | {"vae": TAESD}}

# ---- The model


def random_module(preset: str, component: str) -> torch.nn.Module:
    """The component with weights as `fill_random` draws them, made on the device, in float32."""
    config = CONFIGS[preset][MODEL_OF.get(component, component)]
    import diffusers

    model_class = getattr(diffusers, config["_class_name"])
    with torch.device(DEVICE):
        module = model_class.from_config(config)
    fill_random(module, 0)
    return module.eval()


def random_inputs(preset: str, component: str, batch: int, size: int) -> dict[str, torch.Tensor]:
    """Float32 inputs on the device, named as the graph's."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    if component == "vae_decoder":
        return {"latent_sample": normal(batch, 4, size, size) / 0.18215}
    config = CONFIGS[preset]["unet"]
    inputs = {
        "sample": normal(batch, config["in_channels"], size, size),
        "timestep": torch.tensor([500.0], device=DEVICE),
        "encoder_hidden_states": normal(batch, 77, config["cross_attention_dim"]),
    }
    if "addition_time_embed_dim" in config:
        edge = 8.0 * size
        inputs["text_embeds"] = normal(batch, 1280)
        inputs["time_ids"] = torch.tensor([[edge, edge, 0, 0, edge, edge]] * batch, device=DEVICE)
    return inputs


def calibration_run(preset: str, path: Path) -> Path:
    """Write one recorded run of random inputs of the U-Net and of the VAE decoder, and return the file."""
    arrays: dict[str, Any] = {}
    for component, batch in (("unet", 2), ("vae_decoder", 1)):
        for name, value in random_inputs(preset, component, batch, CALIBRATION_SIZE).items():
            arrays[f"{component}/{name}"] = value.float().cpu().numpy()
    np.savez(path, **arrays)
    return path


def fill(graph: Path, weights: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write `out`/model.onnx: a graph of export_without_weights.py, its weight references filled with these arrays."""
    model = onnx.load_from_string(lzma.decompress(graph.read_bytes()))
    out.mkdir(parents=True, exist_ok=True)
    with (out / pipeline_folder.DATA).open("wb") as data:
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            name = {entry.key: entry.value for entry in tensor.external_data}["location"]
            value = weights.get(name.removesuffix(".T"))
            if value is None or value.numel() != prod(tensor.dims):
                raise ValueError(f"{graph}: its {tensor.name} is no {name} of the model; make the graph again")
            value = value.T if name.endswith(".T") else value
            data.seek(-data.tell() % 65536, 1)
            location = {"location": pipeline_folder.DATA, "offset": data.tell(), "length": 4 * value.numel()}
            data.write(value.contiguous().cpu().numpy().tobytes())
            del tensor.external_data[:]
            for key, entry in location.items():
                tensor.external_data.add(key=key, value=str(entry))
    (out / pipeline_folder.MODEL).write_bytes(model.SerializeToString())


def export_raw(preset: str, component: str, net: torch.nn.Module, out: Path) -> None:
    """The same by exporting the wrapped module now."""
    import onnx_ir as ir

    from sd_ort.checkpoints import checkpoint
    from sd_ort.export import exporter, tracing

    source = open_preset("sd15" if preset == "taesd" else preset, 0)
    config = CONFIGS[preset][MODEL_OF.get(component, component)]
    signature = checkpoint.component_signature(source, component, config)
    arguments = [exporter.example_input(t, exporter.TRACE_SIZES, config, 0) for t in signature.inputs]
    with torch.no_grad():
        exported = tracing.export_dynamo(net.cpu(), arguments, signature, tracing.DEFAULT_OPSET, out.parent)
    tracing.normalize_exported_names(exported, signature)
    out.parent.mkdir(parents=True, exist_ok=True)
    ir.save(exported, out, external_data=pipeline_folder.DATA)
    net.to(DEVICE)


def elapsed_log() -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since this call."""
    begun = time.perf_counter()
    return lambda text: print(f"[{time.perf_counter() - begun:6.1f} s] {text}", flush=True)


def provider_library() -> Path:
    """Return the library of our provider: for CUDA, or the simulated device without a GPU."""
    library = library_path(PROVIDER_LIBRARIES["cuda" if DEVICE == "cuda" else "simulated"])
    if library is None:
        raise SystemExit("Build our provider first: sd-ort build-ops --cuda sm_90.")
    return library


def limits() -> dict[str, float]:
    """This GPU's float16 matrix product in TFLOP/s and device-to-device copy in GB/s (read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    to = torch.empty_like(source)

    def seconds(run: Callable[[], object]) -> float:
        for _ in range(3):
            run()
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e4

    return {
        "matrix_tflops": 2 * 8192**3 / seconds(lambda: torch.matmul(a, b)) / 1e12,
        "copy_gbs": 2 * source.numel() / seconds(lambda: to.copy_(source)) / 1e9,
    }
