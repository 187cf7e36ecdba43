"""The kinds of engine, one record each: the module that opens it, and the names of --engines that stand for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """`module` has `open_component` and `open_pipeline` (see `contract`). `imports`: what else is imported before it is
    opened, since imports are not its time to load. `names`: of --engines, each with its `Engine.variant` and label.
    """

    module: str
    imports: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)


# ONNX Runtime's names are those of the folders that it runs (see `contenders`). Eager diffusers attends through torch's
# scaled_dot_product_attention.
KINDS: Mapping[str, Kind] = {
    "onnxruntime": Kind(
        "sd_ort.benchmark.engines.ort",
        ("sd_ort.pipelines.text_to_image", "transformers.models.clip.tokenization_clip"),
    ),
    "torch": Kind(
        "sd_ort.benchmark.engines.pytorch",
        (
            "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
            "transformers.models.clip.modeling_clip",
        ),
        {
            "torch": ("", "torch eager"),
            "torch-channels-last": ("channels_last", "torch channels last"),
            "torch-graph": ("graph", "torch eager + graph"),
            "torch-compile": ("compile", "torch.compile"),
            "xformers": ("xformers", "torch + xFormers"),
        },
    ),
    "tensorrt": Kind("sd_ort.benchmark.engines.ort", names={"tensorrt": ("", "TensorRT fp16")}),
    "openvino": Kind(
        "sd_ort.benchmark.engines.openvino",
        names={"openvino": ("float32", "OpenVINO fp32"), "openvino-bf16": ("bfloat16", "OpenVINO bf16")},
    ),
}
