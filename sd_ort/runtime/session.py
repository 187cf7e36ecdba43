"""ONNX Runtime sessions on a component of a pipeline folder, as functions of NumPy arrays."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from custom_ops import amd_targets
from custom_ops.libraries import GpuLibrary
from sd_ort.core import embedded_weights
from sd_ort.core.errors import InputError, ProviderError, SdOrtError, describe_shortage, first_line, is_out_of_memory
from sd_ort.core.onnx_file import EMBEDDED_LIMIT
from sd_ort.core.pipeline_folder import MODEL, check_model, manifest_options, model_name, read_manifest
from sd_ort.runtime import op_library, rocm_checks
from sd_ort.runtime.capture_lock import CAPTURE_LOCK, device_calls
from sd_ort.runtime.glibc_malloc import return_heap
from sd_ort.runtime.machine import multiplies_bfloat16
from sd_ort.runtime.ort_values import host_value, keep_alive
from sd_ort.runtime.ort_wheel import ERRORS_ONLY, FATAL_ONLY, import_onnxruntime
from sd_ort.runtime.overloads import supports_overloads, without_overloads
from sd_ort.runtime.provider_table import CPU_EP, PROVIDERS, ProviderSpec
from sd_ort.runtime.providers import (
    check_provider,
    is_plugin,
    plugin_devices,
    plugin_library,
    provider_named,
    raise_or_warn,
    warn_once,
)
from sd_ort.runtime.weight_prefetch import PrefetchedWeights, start_prefetch

if TYPE_CHECKING:
    import onnxruntime as ort

# ONNX Runtime's element types -> NumPy's, for the inputs a Stable Diffusion graph can have.
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


# Where ONNX Runtime looks for the data of a graph that it is given as bytes.
DATA_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session, the same for every component of a pipeline.

    threads: intra-op threads, None for one a physical core. allow_fallback: warn instead of failing if the provider is
    not used. tuning: let the provider search for its fastest kernels. provider_options: options of the provider, over
    those of the table. library: the custom-op library to register, True for the one found, False for none. profile:
    path prefix of ONNX Runtime's profile. capture: capture runs as GPU graphs (`GpuGraphModel`). skip_optimization: the
    session runs once or twice, so that neither graph optimization nor prepacking pays. free_dimensions: sizes of
    symbolic dimensions by name; what depends on them alone is computed once, when the session is opened.
    record_assignment: record which provider runs each node.
    """

    threads: int | None = None
    allow_fallback: bool = False
    tuning: bool = False
    provider_options: Mapping[str, str] = field(default_factory=dict)
    library: Path | bool = True
    profile: Path | None = None
    capture: bool = False
    skip_optimization: bool = False
    free_dimensions: Mapping[str, int] = field(default_factory=dict)
    record_assignment: bool = False


@dataclass(frozen=True)
class ModelOverride:
    """Replacements for the weights and the graph of a model file.

    weights: values of initializers by name, with the shape and dtype of the file's. shared: those of them for
    whose values no graph optimizer asks; the CPU provider reads them where they are, or prepacks them without a copy.
    updatable: initializers in memory of the provider's device, read there at every run (`updatable_weights`). graph:
    serialized model over the file's data.
    """

    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared: Collection[str] = ()
    updatable: Mapping[str, ort.OrtValue] = field(default_factory=dict)
    graph: bytes | None = None


DEFAULT_OPTIONS, NO_OVERRIDE = SessionOptions(), ModelOverride()


def create_session(
    model_path: Path,
    provider: str = "cpu",
    options: SessionOptions = DEFAULT_OPTIONS,
    override: ModelOverride = NO_OVERRIDE,
    *,
    checked: bool = False,
) -> ort.InferenceSession:
    """Open `<pipeline folder>/<component>/model.onnx`, or any .onnx file, on a provider.

    `checked`: the file went through `check_model` before.

    Raises InputError for a model that is missing, broken or rejected, ProviderError for a provider that is not
    installed, not loadable or silently dropped, MemoryError if there is too little memory.
    """
    model_path = Path(model_path)
    if model_path.suffix != ".onnx":
        raise InputError(f"{model_path} is no ONNX model: expected <folder>/<component>/{MODEL}, or an .onnx file.")
    if not checked:
        check_model(model_path)
    check_provider(provider, allow_fallback=options.allow_fallback)
    entry = provider_named(provider)
    if options.capture and entry.graph is None:
        raise ProviderError(f"the {provider} provider captures no graphs: leave graph capture off.")
    warn_of_missing_units(model_path, provider)
    graph, external = _embed_weights(model_path, override.graph, override.weights)

    def opened(prefetched: PrefetchedWeights | None) -> ort.InferenceSession:
        return _open(model_path, provider, options, replace(override, graph=graph, weights=external), prefetched)

    try:
        reads_file = entry.vendor and not override.weights and graph is None and not options.skip_optimization
        settings = _provider_settings(entry, options)
        prefetched = start_prefetch(provider, settings, model_path, override.updatable) if reads_file else None
        session = opened(None) if prefetched is None else prefetched.open_session(opened)
    except SdOrtError:
        raise
    except Exception as error:  # pybind's exceptions share no base class but Exception
        if is_out_of_memory(error):
            raise MemoryError(first_line(error)) from error
        raise InputError(_open_error(model_path, provider, error)) from error
    if entry.ep not in session.get_providers():
        raise_or_warn(
            f"ONNX Runtime dropped the {provider} provider and would run on the CPU: check that {entry.needs} is "
            "installed and that a GPU is visible (`sd-ort doctor`).",
            options.allow_fallback,
        )
    elif entry.ep != CPU_EP:
        from sd_ort.runtime.tuning import setup_tuning

        ops = op_library.op_library(options.library, provider)
        setup_tuning(session, provider, ops, options.tuning, import_onnxruntime().__version__, model_path)
    return session


def _open(
    model_path: Path,
    provider: str,
    options: SessionOptions,
    override: ModelOverride,
    prefetched: PrefetchedWeights | None,
) -> ort.InferenceSession:
    """Open a session; the weights of `override` are all in the data file."""
    entry = provider_named(provider)
    ort_options = _ort_options(provider, options)
    formats = manifest_options(model_path.parent.parent)
    own_kernels = "eight_bits" in formats and formats.get("target") == "cpu"
    if own_kernels or formats.get("eight_bits") == "float8" or (is_plugin(provider) and not formats.get("weights")):
        # onnxruntime 1.31 fuses DequantizeLinear and MatMul to an operator of integers, whatever the 8 bits are, and
        # moves QuantizeLinear before a Reshape with a DequantizeLinear behind. With this setting it folds the
        # DequantizeLinear of a stored weight, which is then in memory in 16 bits.
        ort_options.add_session_config_entry("session.disable_quant_qdq", "1")
    if override.graph is not None:
        ort_options.add_session_config_entry(DATA_FOLDER, str(model_path.parent))
    if prefetched is not None:
        ort_options.log_severity_level = FATAL_ONLY  # if it is rejected, the session is opened without `prefetched`
    shared = _add_weights(ort_options, provider, override)
    initializers = {**(prefetched.values if prefetched else {}), **override.updatable}
    arguments = _add_initializers(ort_options, provider, initializers)
    graph = override.graph
    if not (has_ops := op_library.register(ort_options, options.library, provider)):
        _warn_of_missing_library(model_path, provider, options.library)
        graph = _with_distinct_functions(ort_options, model_path, graph)
    if entry.ep == PROVIDERS["rocm"].ep and entry.ep in import_onnxruntime().get_available_providers():
        rocm_checks.check_graph(model_path, graph, has_ops=has_ops)
    settings = _provider_settings(entry, options) | (prefetched.option if prefetched else {})
    arguments |= _add_provider(provider, ort_options, settings, options.record_assignment)
    with _opening(provider, override.weights):
        session = import_onnxruntime().InferenceSession(graph or str(model_path), ort_options, **arguments)
    # weights in memory that is not ONNX Runtime's
    session.shared = {**shared, **(prefetched.values if prefetched else {})}
    session.prefetched = prefetched
    return keep_alive(session, (session.shared, prefetched, override.updatable))


def _open_error(model: Path, provider: str, error: Exception) -> str:
    """Return ONNX Runtime's message for a model that it cannot run, with the model's target."""
    if not model.exists():
        return f"{model} is gone: make the folder again, and open the pipeline again."
    # What a plugin says comes behind the places in ONNX Runtime's sources that it passed through.
    reason = str(error).rpartition("[ONNXRuntimeError] : 1 : FAIL : ")[2] if is_plugin(provider) else ""
    line = f"ONNX Runtime rejects {model}: {reason or _newer_opset(error) or first_line(error)}"
    target = manifest_options(model.parent.parent).get("target", "portable")
    expected = provider_named(provider).target or provider
    if target in ("portable", expected):
        return line
    return (
        f"{line} It was optimized for target {target}: optimize it for {expected}, or use the provider it was made for."
    )


def _newer_opset(error: Exception) -> str | None:
    """Return advice for a model whose opset is newer than ONNX Runtime's; None for another error."""
    match = re.search(r"Opset (\d+) is under development.* till opset (\d+)", str(error), re.DOTALL)
    if match is None:
        return None
    return (
        f"it is of opset {match[1]}, and ONNX Runtime {import_onnxruntime().__version__} has opsets up to {match[2]}: "
        "optimize it with --target portable, or install a newer ONNX Runtime."
    )


def _warn_of_missing_library(model_path: Path, provider: str, library: Path | bool) -> None:
    """A warning where the op library should be there."""
    missing = library and not is_plugin(provider)  # ours brings its kernels along
    if missing and provider_named(provider).device != "cpu":
        build = op_library.build_command(provider)
        warn_once(f"no op library for {provider}: fused operators run as their parts. Build it: {build}.")
    elif missing and read_manifest(model_path.parent.parent).get("stage") == "optimize":
        warn_once("no op library: a CPU takes about 1.4 times as long without it. Build it: sd-ort build-ops.")


def warn_of_missing_units(model_path: Path, provider: str) -> None:
    """Log a line if the folder's number format is one that this CPU or GPU has no matrix units for."""
    options = manifest_options(model_path.parent.parent)
    is_bfloat16 = (options.get("target"), options.get("dtype")) == ("cpu", "bfloat16")
    if provider == "cpu" and is_bfloat16 and not multiplies_bfloat16():
        warn_once("this CPU has no matrix units for bfloat16: without --bfloat16 a folder is faster here.")
    if provider_named(provider).vendor and options.get("eight_bits") == "float8":
        library = GpuLibrary(plugin_library(provider)).c
        architecture = library.sd_ort_gpu_arch().decode()
        if not _has_float8_units(architecture):
            warn_once(
                f"{architecture} has no matrix units for float8: without --float8 a folder is faster here, and "
                "--weights int8 saves the memory."
            )
        elif options.get("convolutions") and not library.sd_ort_multiplies_float8():
            warn_once(
                f"the library has no kernel for convolutions in float8 on {architecture}, which become 16 bits in each "
                "call: without --convolutions a folder is faster here."
            )


def _has_float8_units(architecture: str) -> bool:
    """Return whether QuantizedLinear multiplies float8 on a GPU (sm_90, gfx1100) by more than its generic kernel."""
    if architecture.startswith("sm_"):
        return int(architecture.removeprefix("sm_")) >= 89
    target = architecture.partition(":")[0]
    return target not in amd_targets.TARGETS or target in amd_targets.FLOAT8


def check_opens(path: Path) -> None:
    """Raise InputError unless ONNX Runtime takes the graph at `path`: operators, inputs, types and shapes.

    Nothing is optimized and weights stay on disk, so this takes a fraction of a second. A kernel that the CPU lacks is
    no fault: another provider may have it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_ONLY
    _skip_optimization(options)
    try:
        graph = _with_distinct_functions(options, path)
        if graph is None and path.stat().st_size > EMBEDDED_LIMIT:
            options.add_session_config_entry(DATA_FOLDER, str(path.absolute().parent))
            graph = embedded_weights.skeleton(path)
        onnxruntime.InferenceSession(graph or str(path), options, providers=[CPU_EP])
    except Exception as error:  # pybind's exceptions share no base class but Exception
        if type(error).__name__ != "NotImplemented":
            reason = _newer_opset(error) or " ".join(str(error).split())[:300]
            raise InputError(f"{model_name(path)} is a graph that ONNX Runtime rejects: {reason}") from error


def _skip_optimization(options: Any) -> None:
    """Have a session neither optimize its graph nor pack weights, nor its threads burn time while they wait."""
    options.graph_optimization_level = import_onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


@contextmanager
def report_invalid_model(path: Path) -> Iterator[None]:
    """Turn an exception of a rewrite into InputError if ONNX Runtime rejects the model at `path`.

    Other exceptions are bugs and pass through.
    """
    try:
        yield
    except (SdOrtError, CancelledError):
        raise
    except Exception:
        check_opens(path)
        raise


def _ort_options(provider: str, options: SessionOptions = DEFAULT_OPTIONS) -> Any:
    ort_options = import_onnxruntime().SessionOptions()
    if options.skip_optimization:
        _skip_optimization(ort_options)
    for name, size in options.free_dimensions.items():
        ort_options.add_free_dimension_override_by_name(name, size)
    ort_options.log_severity_level = ERRORS_ONLY
    if provider == "cpu":
        # It would keep one more block from the second step on, of a whole step: 100 MB for SD 1.5 at 256 x 256.
        ort_options.enable_mem_pattern = False
    else:  # a pool for each session would spin beside the driver's threads
        ort_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if options.threads:
        ort_options.intra_op_num_threads = options.threads
        if options.threads > (os.cpu_count() or 1):  # that many would spin against each other for minutes
            ort_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if options.profile:
        ort_options.enable_profiling = True
        ort_options.profile_file_prefix = str(options.profile)
    return ort_options


def _embed_weights(
    model_path: Path, graph: bytes | None, weights: Mapping[str, np.ndarray]
) -> tuple[bytes | None, Mapping[str, np.ndarray]]:
    """Write `weights` into the initializers whose values are in the graph itself, which sessions replace by no option.

    Returns the graph to open, None for the file's, and the weights that are in the data file.
    """
    if not weights:
        return graph, weights
    import onnx

    model = onnx.ModelProto.FromString(model_path.read_bytes() if graph is None else graph)
    embedded = {
        tensor.name: tensor
        for tensor in model.graph.initializer
        if tensor.name in weights and tensor.data_location != tensor.EXTERNAL
    }
    for name, tensor in embedded.items():
        value = np.ascontiguousarray(weights[name])
        for typed in ("float_data", "int32_data", "double_data"):
            tensor.ClearField(typed)
        tensor.raw_data = value.tobytes()
    external = {name: value for name, value in weights.items() if name not in embedded}
    return (model.SerializeToString() if embedded else graph), external


def _add_weights(options: Any, provider: str, override: ModelOverride) -> dict[str, Any]:
    """Replace the file's values of initializers; return the OrtValues that the session reads where they are.

    Graph optimizers read the file's values of the latter, so that only weights may be shared for whose values they do
    not ask. ONNX Runtime copies the others: all of an SD 1.5 UNet with a LoRA takes half a second of opening it.
    """
    values = {n: host_value(np.ascontiguousarray(a)) for n, a in override.weights.items()}
    shared = {n: values.pop(n) for n in override.shared if n in values} if provider == "cpu" else {}
    for name, value in shared.items():
        options.add_initializer(name, value)
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    return shared


def _add_initializers(options: Any, provider: str, initializers: Mapping[str, Any]) -> dict[str, Any]:
    """Have initializers read where they are; return further arguments of the session.

    On a CPU no kernel may prepack them and no layout optimizer may copy them.
    """
    for name, value in initializers.items():
        options.add_initializer(name, value)
    if not initializers or provider != "cpu":
        return {}
    options.add_session_config_entry("session.disable_prepacking", "1")
    return {"disabled_optimizers": ["NchwcTransformer"]}


def _add_provider(
    provider: str, options: Any, settings: Mapping[str, str], record_assignment: bool = False
) -> dict[str, Any]:
    """Append the provider with its `settings`, and the CPU for its missing kernels; return the session's arguments.

    A plugin is asked for in `options`.
    """
    entry = provider_named(provider)
    if is_plugin(provider) and entry.ep != CPU_EP:
        options.add_provider_for_devices(_plugin_devices(provider, settings), settings)
        options.enable_mem_pattern = False  # ONNX Runtime does not look whether a plugin had memory for its one buffer
        # A buffer that it hands on is held until the last tensor in it is dead, between them too. The provider's pool
        # hands on what is free: a step of SD 1.5 then needs 86 MiB beside its weights, not 204.
        options.enable_mem_reuse = False
        if record_assignment:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return {"enable_fallback": 0}  # a plugin that rejects its options would be replaced by the CPU
    if entry.ep == CPU_EP or entry.ep not in import_onnxruntime().get_available_providers():
        return {"providers": [CPU_EP]}
    return {"providers": [(entry.ep, settings), CPU_EP]}


def _plugin_devices(provider: str, settings: Mapping[str, str]) -> list[Any]:
    """Return the devices of a plugin provider for one session: of ours the one that `settings` name.

    ONNX Runtime rejects several with memory of their own. Raises ProviderError if there is none of that number.
    """
    devices = plugin_devices(plugin_library(provider))
    if provider_named(provider).vendor is None:
        return devices
    number = settings.get("device_id", "0")
    if matches := [device for device in devices if device.ep_metadata["device_id"] == number]:
        return matches
    count = f"{len(devices)} GPU{'s' if len(devices) != 1 else ''}"
    raise ProviderError(f"GPU {number} is not there: the {provider} provider finds {count}, counted from 0.")


def _provider_settings(entry: ProviderSpec, options: SessionOptions) -> dict[str, str]:
    """Return the provider's options: the table's, for tuning, for captures, then the caller's."""
    tuning, capture = entry.tuning if options.tuning else {}, (entry.graph if options.capture else None) or {}
    return {**entry.options, **tuning, **capture, **options.provider_options}


def _opening(provider: str, weights: Mapping[str, np.ndarray] | None = None) -> AbstractContextManager[None]:
    """Return the context in which a session is opened."""
    if provider == "cpu":
        return nullcontext() if weights else return_heap()  # the next weights take the freed memory
    return CAPTURE_LOCK.shared()


def _with_distinct_functions(options: Any, model_path: Path, override: bytes | None = None) -> bytes | None:
    """Return the graph to open instead of the file's; None to open the file.

    It is `override` or, if this ONNX Runtime does not distinguish overloads of functions, a graph without overloads.
    `options` then get the folder of the file's data.
    """
    if supports_overloads(import_onnxruntime().__version__):
        return override
    graph = without_overloads(override or model_path)
    if graph is None:
        return override
    options.add_session_config_entry(DATA_FOLDER, str(model_path.parent))
    return graph


def run_error(error: Exception, shapes: Mapping[str, Sequence[int]]) -> SdOrtError:
    """Return the error of a run that failed over inputs of these shapes: ONNX Runtime's, or that memory is short."""
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    if is_out_of_memory(error):
        return SdOrtError(f"{describe_shortage(error)} ONNX Runtime: {first_line(error)} (on {inputs})")
    return SdOrtError(f"ONNX Runtime failed: {first_line(error)} (on {inputs})")


class OrtModel:
    """ONNX component as a function of NumPy arrays: floating inputs are cast to the dtypes the graph declares."""

    def __init__(self, session: ort.InferenceSession, lock: AbstractContextManager[Any] | None = None) -> None:
        """`lock`: held while the session runs, where sessions that share a stream must not run at once."""
        self.session = session
        self.lock = lock or nullcontext()
        self.device = "cpu" if session.get_providers() == [CPU_EP] else session.get_providers()[0]
        self.inputs = {i.name: i for i in session.get_inputs()}
        self.outputs = [o.name for o in session.get_outputs()]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError, the error of `copy` and `pickle`: a session holds memory of its device."""
        raise TypeError(
            "an open ONNX Runtime session cannot be copied or pickled: call from_pretrained again, in another process "
            "too, or share one pipeline between threads."
        )

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run once. `arrays`: one array an input, by name, of the input's shape. Returns the outputs by name.

        Raises InputError when the names are not those of the graph's inputs, SdOrtError when ONNX Runtime fails, for
        example for want of memory.
        """
        self.check_names(arrays)
        feed = {name: np.asarray(array, self.dtype(name), order="C") for name, array in arrays.items()}
        try:
            with self.lock, device_calls(self.device):
                results = self.session.run(None, feed)
        except Exception as error:  # pybind's exceptions share no base class but Exception
            raise run_error(error, {name: array.shape for name, array in feed.items()}) from error
        return dict(zip(self.outputs, results, strict=True))

    def run_with_shared(self, shared: Mapping[str, np.ndarray], **arrays: Any) -> dict[str, np.ndarray]:
        """Run as `__call__` over `arrays` and `shared`, inputs of several runs, whose arrays must not change.

        A captured component copies `shared` to the device only if its last run of these shapes had another one.
        """
        return self(**shared, **arrays)

    def check_names(self, arrays: Mapping[str, Any]) -> None:
        """Raise InputError for other names than those of the inputs."""
        if arrays.keys() != self.inputs.keys():
            raise InputError(
                f"the model takes {', '.join(self.inputs)}, not {', '.join(arrays)}: export the pipeline with sd-ort."
            )

    def dtype(self, name: str) -> Any:
        """NumPy dtype of an input. Raises InputError for an element type no Stable Diffusion graph has."""
        declared = self.inputs[name].type
        if declared not in DTYPES:
            raise InputError(f"input {name} has the unsupported type {declared}: export the pipeline with sd-ort.")
        return DTYPES[declared]

    def one(self, name: str, number: float = 0) -> np.ndarray:
        """A number as the input `name` takes it: in its type, with as many axes of size 1 as the graph declares."""
        return np.full((1,) * len(self.inputs[name].shape), number, self.dtype(name))


def load(folder: Path, component: str, provider: str = "cpu", options: SessionOptions = DEFAULT_OPTIONS) -> OrtModel:
    """Open one component of a pipeline folder."""
    return OrtModel(create_session(Path(folder) / component / MODEL, provider, options))


def open_graph(
    graph: bytes,
    provider: str,
    provider_options: Mapping[str, str] | None = None,
    *,
    capture: bool = False,
    updatable: Mapping[str, Any] | None = None,
) -> Any:
    """A session on a small graph of our own, a serialized ONNX model, beside a component's on the same provider.

    `capture`: its runs are captured as graphs. `updatable`: as in `ModelOverride`. Raises SdOrtError when ONNX Runtime
    rejects that.
    """
    options = SessionOptions(provider_options=provider_options or {}, capture=capture)
    ort_options = _ort_options(provider)
    arguments = _add_initializers(ort_options, provider, updatable or {})
    arguments |= _add_provider(provider, ort_options, _provider_settings(provider_named(provider), options))
    try:
        with _opening(provider):
            session = import_onnxruntime().InferenceSession(graph, ort_options, **arguments)
    except Exception as error:  # pybind's exceptions share no base class but Exception
        reason = f"ONNX Runtime rejects a graph of our own: {first_line(error)}"
        raise SdOrtError(describe_shortage(error) if is_out_of_memory(error) else reason) from error
    return keep_alive(session, updatable)
