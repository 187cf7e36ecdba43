"""A pipeline folder that a host draws with: its components as functions of torch tensors, its LoRAs, its UNet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.folder import read_index
from sd_ort.family.configs import component_config
from sd_ort.family.tokenizer import whole_tokenizer
from sd_ort.hosts.tensors import TensorModel, Tensors, torch_dtype
from sd_ort.pipeline.lora_methods import LoraMethods
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_records import WHEELS
from sd_ort.runtime.providers import check_provider, log
from sd_ort.runtime.wheels import installed_wheels


def default_provider() -> str:
    """The provider that the installed ONNX Runtime wheel is for, or, said on the log, the CPU where it cannot load."""
    name = next((name for wheel in installed_wheels() if (name := WHEELS[wheel])), "cpu")
    try:
        check_provider(name)
    except SdOrtError as error:
        log.warning("sd-ort draws on the CPU: %s", error)
        return "cpu"
    return name


class HostModels(LoraMethods):
    """The components of a pipeline folder, opened when they are first used, as functions of torch tensors.

    `device` is where their outputs lie: the GPU that torch and ONNX Runtime share, or else the host's memory.
    """

    def __init__(self, folder: Path | str, provider: str | None = None, *, share: bool = True, **options: Any) -> None:
        """`provider`: None for `default_provider`. `share`: on a GPU that torch sees too bind its tensors where they
        lie; else they go through the host's memory. `options`: those of `runtime.components.Components`.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that cannot be used.
        """
        self.folder = Path(folder)
        self.provider = provider or default_provider()
        self.models = Components(self.folder, self.provider, **options)
        self.index = read_index(self.folder)
        self.unet_config = component_config(self.folder, "unet")
        number = int(self.models.options["provider_options"].get("device_id", 0))
        on_gpu = self.models.device == "cuda" and self.models.stream is not None and number < torch.cuda.device_count()
        self.shared = share and on_gpu
        self.device = torch.device("cuda", number) if self.shared else torch.device("cpu")
        self.on_device: dict[str, TensorModel] = {}
        self.changes = 0  # of weights: what was computed with others is no longer true

    def __contains__(self, name: str) -> bool:
        return name in self.models

    def config(self, component: str) -> dict[str, Any]:
        """config.json of a component. Raises InputError when it is missing or damaged."""
        return component_config(self.folder, component, required=True)

    def tokenizer(self, component: str) -> Any:
        """transformers' tokenizer of a text encoder. Raises InputError when the folder holds none."""
        return whole_tokenizer(self.folder / component.replace("text_encoder", "tokenizer"))

    def dtype(self, component: str) -> torch.dtype:
        """The dtype of a component's first floating input, float32 for one that has none."""
        model = self.models[component]
        dtypes = [torch_dtype(model.dtype(name)) for name in model.inputs]
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    def inputs(self, component: str) -> list[str]:
        """Names of a component's inputs."""
        return list(self.models[component].inputs)

    def run(self, component: str, **tensors: torch.Tensor) -> Tensors:
        """`call` with the inputs by name; the outputs are the caller's own."""
        return self.call(component, tensors)

    def call(
        self,
        component: str,
        tensors: Mapping[str, torch.Tensor],
        lent: Mapping[str, torch.Tensor] | None = None,
        *,
        lend: bool = False,
    ) -> Tensors:
        """Outputs by name, on `device`, for one tensor an input, of any floating dtype.

        They are the caller's own, or with `lend` good until the component's next such run for the same shapes. `lent`:
        further inputs, which another component's run lent.

        Raises InputError when the names are not those of the graph's inputs, SdOrtError when ONNX Runtime fails.
        """
        model = self.models[component]
        lent = lent or {}
        tensors = {**tensors, **lent}
        if not self.shared or tensors.keys() != model.inputs.keys():
            outputs = model(**{name: _array(tensor) for name, tensor in tensors.items()})
            return {name: torch.from_numpy(array) for name, array in outputs.items()}
        made = self.on_device.get(component)
        if made is None or made.model is not model:
            stream = self.models.stream
            made = TensorModel(model, self.device, None if stream is None else stream.handle)
            self.on_device[component] = made
        return made(tensors, lent, lend=lend)

    def change(self, component: str, changes: Mapping[str, np.ndarray]) -> None:
        """From now on run `component` with these numbers, float32 in torch's layout, added to its weights by name.

        Raises InputError for a weight that is not there, or a change of another shape.
        """
        if changes and self.loras is None:
            from sd_ort.pipeline.lora import Loras  # needs onnx, for which a host's protobuf may be too old

            self.loras = Loras(self.folder)
        if self.loras is not None:
            self.weights_changed(self.loras.apply(self.models, {component: changes}))

    def weights_changed(self, closed: bool) -> None:
        """After a change of weights, for which sessions may have been closed."""
        if closed:
            self.on_device.clear()
        self.changes += 1


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_same_model(wanted: Mapping[str, Any], folder: Path, component: str) -> None:
    """Raise InputError when the folder's component is of another architecture than the config `wanted` of a host's."""
    have = component_config(folder, component, required=True)
    keys = ("in_channels", "out_channels", "block_out_channels", "cross_attention_dim", "latent_channels",
            "hidden_size", "num_hidden_layers", "time_cond_proj_dim", "addition_embed_type")  # fmt: skip
    for key in keys:
        ours, theirs = (list(v) if isinstance(v, tuple) else v for v in (have.get(key), wanted.get(key)))
        if ours != theirs:
            raise InputError(
                f"{folder} holds another model: its {component} has {key} {ours}, and the pipeline's {theirs}."
            )
