"""Components of a pipeline folder as functions of torch tensors, with LoRAs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.tokenizer import load_hf_tokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import read_index
from sd_ort.integrations.tensors import Tensors, TorchOrtModel, torch_dtype
from sd_ort.pipelines.lora_methods import LoraMixin
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import ORT_PROVIDERS, choose_provider, installed_gpus, provider_for
from sd_ort.runtime.providers import log
from sd_ort.runtime.session import SessionOptions


def default_provider() -> str:
    """Return the best of ONNX Runtime's providers that runs here, which share tensors with torch; log the choice."""
    choice = choose_provider(ORT_PROVIDERS)
    log.info(choice.line)
    if choice.provider == "cpu" and installed_gpus():
        log.warning(choice.line)
    return choice.provider


class TorchComponentSessions(LoraMixin):
    """Components of a pipeline folder as functions of torch tensors, opened at their first use.

    `device` is the device of the outputs: the GPU that torch and ONNX Runtime share, or the CPU.
    """

    def __init__(
        self, folder: Path | str, provider: str | None = None, *, share: bool = True,
        low_memory: bool = False, graph: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Open the folder.

        Args:
            provider: None for the best one that runs the folder here.
            share: bind torch's tensors directly on a GPU that torch also uses; without, data is copied through the CPU.
            low_memory, graph: as in `runtime.components.Components`.
            options: fields of `runtime.session.SessionOptions`.

        Raises:
            InputError: if the folder has no pipeline.
            ProviderError: if the provider cannot be used.
        """
        self.folder = Path(folder)
        self.provider = provider or provider_for(self.folder).provider
        self.models = Components(
            self.folder, self.provider, SessionOptions(**options), low_memory=low_memory, graph=graph
        )
        self.index = read_index(self.folder)
        denoiser = "transformer" if "transformer" in self.models else "unet"
        self.unet_config = component_config(self.folder, denoiser)
        device_id = int(self.models.options.provider_options.get("device_id", 0))
        on_gpu = self.models.device == "cuda" and self.models.stream is not None
        self.shared = share and on_gpu and device_id < torch.cuda.device_count()
        self.device = torch.device("cuda", device_id) if self.shared else torch.device("cpu")
        self.torch_models: dict[str, TorchOrtModel] = {}
        self.input_dtypes: dict[str, dict[str, torch.dtype]] = {}  # by component, which an edited graph may replace
        self.weights_version = 0  # increased by every update of weights, to invalidate cached outputs

    def __contains__(self, name: object) -> bool:
        return name in self.models

    def config(self, component: str) -> dict[str, Any]:
        """Return config.json of a component. Raises InputError if it is missing or invalid."""
        return component_config(self.folder, component, required=True)

    def tokenizer(self, component: str) -> Any:
        """Return the transformers tokenizer of a text encoder. Raises InputError if the folder has none."""
        return load_hf_tokenizer(self.folder / component.replace("text_encoder", "tokenizer"))

    def dtype(self, component: str) -> torch.dtype:
        """Return the dtype of a component's first floating-point input, or float32 if it has none."""
        dtypes = self._input_dtypes(component).values()
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    def inputs(self, component: str) -> list[str]:
        """Return the names of a component's inputs."""
        return list(self._input_dtypes(component))

    def _input_dtypes(self, component: str) -> dict[str, torch.dtype]:
        if component not in self.input_dtypes:
            model = self.models[component]
            self.input_dtypes[component] = {name: torch_dtype(model.dtype(name)) for name in model.inputs}
        return self.input_dtypes[component]

    def run(self, component: str, **tensors: torch.Tensor) -> Tensors:
        """Run a component with the inputs as keyword arguments; see `call`."""
        return self.call(component, tensors)

    def call(
        self,
        component: str,
        tensors: Mapping[str, torch.Tensor],
        zero_copy_inputs: Mapping[str, torch.Tensor] | None = None,
        *,
        reuse_outputs: bool = False,
    ) -> Tensors:
        """Run a component and return its outputs by name, on `device`. Inputs may have any floating-point dtype.

        Args:
            zero_copy_inputs: further inputs, which are reused outputs of another component.
            reuse_outputs: return output tensors that the next such run with equal shapes overwrites.

        Raises:
            InputError: if the names are not those of the graph's inputs.
            SdOrtError: if ONNX Runtime fails.
        """
        model = self.models[component]
        zero_copy_inputs = zero_copy_inputs or {}
        tensors = {**tensors, **zero_copy_inputs}
        if not self.shared or tensors.keys() != model.inputs.keys():
            outputs = model(**{name: _array(tensor) for name, tensor in tensors.items()})
            return {name: torch.from_numpy(array) for name, array in outputs.items()}
        torch_model = self.torch_models.get(component)
        if torch_model is None or torch_model.model is not model:
            stream = self.models.stream
            torch_model = TorchOrtModel(model, self.device, None if stream is None else stream.handle)
            self.torch_models[component] = torch_model
        return torch_model(tensors, zero_copy_inputs, reuse_outputs=reuse_outputs)

    def set_weight_deltas(self, component: str, deltas: Mapping[str, np.ndarray]) -> None:
        """Run `component` with `deltas` (float32, torch layout, by weight name) added to its original weights.

        Raises:
            InputError: if a weight does not exist or has another shape.
        """
        if deltas or self.loras is not None:
            manager = self._lora_manager()
            self.on_weights_updated(manager.apply(self.models, {component: deltas}))

    def original_weight(self, component: str, name: str) -> np.ndarray:
        """Return a weight (float32, torch layout) without deltas. Raises InputError if the graph lacks it."""
        return self._lora_manager().source(component, name)

    def on_weights_updated(self, closed: bool) -> None:
        """Invalidate cached outputs after an update of weights. `closed`: sessions were closed for it."""
        if closed:
            self.torch_models.clear()
        self.weights_version += 1


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_same_model(expected: Mapping[str, Any], folder: Path, component: str) -> None:
    """Raise InputError if the folder's component has another architecture than the config `expected`."""
    config = component_config(folder, component, required=True)
    keys = ("in_channels", "out_channels", "block_out_channels", "cross_attention_dim", "latent_channels",
            "hidden_size", "num_hidden_layers", "time_cond_proj_dim", "addition_embed_type")  # fmt: skip
    for key in keys:
        value, expected_value = (list(v) if isinstance(v, tuple) else v for v in (config.get(key), expected.get(key)))
        if value != expected_value:
            raise InputError(
                f"{folder} holds another model: its {component} has {key} {value}, and the pipeline's {expected_value}."
            )
