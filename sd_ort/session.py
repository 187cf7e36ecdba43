"""ONNX Runtime sessions: the only Python file that knows provider names, their options and the op library.

ONNX Runtime falls back to the CPU without an error when a provider's shared libraries are missing. Here the provider
asked for is either really used, or the call fails and says what to install.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.errors import InputError, ProviderError, SdOrtError
from sd_ort.folder import MODEL, check_component

if TYPE_CHECKING:
    import onnxruntime as ort

log = logging.getLogger("sd_ort")

CPU_EP = "CPUExecutionProvider"
# All of these install the same package `onnxruntime` and overwrite each other's files.
WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-rocm",
    "onnxruntime-migraphx",
    "onnxruntime-directml",
    "onnxruntime-openvino",
)
# ONNX Runtime's element types -> NumPy's, for the inputs a Stable Diffusion graph can have.
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class Provider:
    """What one `--provider` name means: its ONNX Runtime name, the extra that installs it, and its options.

    `tuning` holds the options that make it search for the fastest kernels; empty when it has no such search.
    `graph` holds those that make it capture a run as a CUDA or HIP graph and replay it; None when it cannot.
    `device` is ONNX Runtime's name for its memory, "cuda" on AMD too.
    `library` is the shared library inside the wheel whose own dependencies must be on the machine.
    """

    ep: str
    extra: str
    options: dict[str, str] = field(default_factory=dict)
    tuning: dict[str, str] = field(default_factory=dict)
    graph: dict[str, str] | None = None
    device: str = "cpu"
    library: str | None = None
    needs: str = ""


PROVIDERS = {
    "cpu": Provider(CPU_EP, "cpu"),
    "cuda": Provider(
        "CUDAExecutionProvider",
        "cuda",
        options={"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_use_max_workspace": "1"},
        graph={"enable_cuda_graph": "1"},
        device="cuda",
        library="libonnxruntime_providers_cuda.so",
        needs="CUDA and cuDNN",
    ),
    "rocm": Provider(
        "ROCMExecutionProvider",
        "rocm",
        # Its MultiHeadAttention throws unless tunable ops are enabled, tuned or not.
        options={"tunable_op_enable": "1", "miopen_conv_use_max_workspace": "1"},
        tuning={"tunable_op_tuning_enable": "1", "miopen_conv_exhaustive_search": "1"},
        graph={"enable_hip_graph": "1"},
        device="cuda",
        library="libonnxruntime_providers_rocm.so",
        needs="ROCm 7 with MIOpen and hipBLAS",
    ),
    "migraphx": Provider(
        "MIGraphXExecutionProvider",
        "migraphx",
        tuning={"migraphx_exhaustive_tune": "1"},
        library="libonnxruntime_providers_migraphx.so",
        needs="ROCm with MIGraphX",
    ),
}


# `plugin:PATH` names the provider in a shared library of its own, which ONNX Runtime loads when asked to.
PLUGIN = "plugin:"


def provider_named(name: str) -> Provider:
    """The table's entry for a provider name, or one for a plugin. Raises ProviderError for a name that is neither."""
    if name.startswith(PLUGIN):
        return Provider(plugin_devices(Path(name.removeprefix(PLUGIN)))[0].ep_name, "", needs="what it drives")
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}: choose one of {', '.join(PROVIDERS)}.")
    return PROVIDERS[name]


@cache
def plugin_devices(library: Path) -> list[Any]:
    """Register a plugin provider with ONNX Runtime, once a process; the devices that it can run on.

    Raises ProviderError for a library that is missing, lacks libraries of its own, is no provider, or sees no device.
    """
    if not library.is_file():
        raise ProviderError(f"{library} does not exist: give the provider's shared library as {PLUGIN}LIBRARY.")
    onnxruntime = runtime()
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise ProviderError(f"ONNX Runtime {onnxruntime.__version__} takes no plugin providers: install 1.23 or later.")
    if missing := [needed for needed in needed_libraries(library) if not _loads(needed)]:
        raise ProviderError(f"{library} cannot load {', '.join(missing)}: add their folder to LD_LIBRARY_PATH.")
    before = {device.ep_name for device in onnxruntime.get_ep_devices()}
    try:
        onnxruntime.register_execution_provider_library(library.name, str(library.resolve()))
    except Exception as error:  # pybind's exceptions share no base class but Exception
        raise ProviderError(f"{library} is no plugin provider: {first_line(error)}") from error
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name not in before]
    if not devices:
        raise ProviderError(f"{library} finds no device on this machine that it can run on.")
    return devices


def runtime() -> Any:
    """The module `onnxruntime`. Raises ProviderError when it is absent, or when two of its wheels lie in one folder."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ProviderError("onnxruntime is not installed: pip install 'sd-ort[cpu]' (or [cuda], [rocm], [migraphx]).")
    wheels = installed_wheels()
    if len(wheels) > 1:
        names = " and ".join(wheels)
        raise ProviderError(
            f"{names} are installed at once and overwrite each other: "
            f"pip uninstall -y {' '.join(wheels)}, then install one with pip install 'sd-ort[cpu]' (or another extra)."
        )
    import onnxruntime

    return onnxruntime


def installed_wheels() -> dict[str, str]:
    """Name -> version of each onnxruntime wheel unpacked in the folder that `import onnxruntime` reads."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return {}
    package = Path(spec.origin).resolve()
    found = {}
    for wheel in WHEELS:
        try:
            distribution = metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
        if Path(str(distribution.locate_file("onnxruntime/__init__.py"))).resolve() == package:
            found[wheel] = distribution.version
    return found


def missing_libraries(name: str) -> list[str]:
    """Shared libraries that the provider's own library asks for and this machine cannot load; [] if none or unknown."""
    provider = provider_named(name)
    if provider.library is None:
        return []
    onnxruntime = runtime()
    if name == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(None):  # it prints what it does not find, as missing_libraries says too
            onnxruntime.preload_dlls()  # finds the CUDA libraries that pip packages (torch's too) brought
    library = Path(onnxruntime.__file__).parent / "capi" / provider.library
    if not library.is_file():
        return []
    return [needed for needed in needed_libraries(library) if not _loads(needed)]


def needed_libraries(library: Path) -> list[str]:
    """The DT_NEEDED names of a 64-bit little-endian ELF library; [] for any other file.

    Field offsets: System V ABI, Elf64_Ehdr, Elf64_Phdr and Elf64_Dyn. Only the headers are read, never the code.
    """
    segment_load, segment_dynamic, tag_needed, tag_strings = 1, 2, 1, 5
    with library.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return []
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, entries = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        raw = file.read(entry_size * entries)
        # p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz
        segments = [struct.unpack_from("<IIQQQQ", raw, i * entry_size) for i in range(entries)]
        loads = [s for s in segments if s[0] == segment_load]
        dynamic = next((s for s in segments if s[0] == segment_dynamic), None)
        if dynamic is None:
            return []
        file.seek(dynamic[2])
        tags = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
        strings = next((value for tag, value in tags if tag == tag_strings), None)
        if strings is None:
            return []
        base = next(offset + strings - vaddr for _, _, offset, vaddr, _, size in loads if 0 <= strings - vaddr < size)
        names = []
        for tag, value in tags:
            if tag == tag_needed:
                file.seek(base + value)
                names.append(file.read(256).split(b"\0")[0].decode())
        return names


def _loads(library: str) -> bool:
    if library.startswith("libonnxruntime"):  # comes with the wheel itself, off the loader's path
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def op_library() -> Path | None:
    """The compiled custom-op library, or None when it was not built: the model's own function bodies run then."""
    if importlib.util.find_spec("sd_ort.ops") is None:
        return None
    path: Path | None = importlib.import_module("sd_ort.ops").library_path()
    return path


def check_provider(name: str, *, allow_fallback: bool = False) -> None:
    """Check that a provider is in the installed wheel and that the shared libraries it needs can be loaded.

    Raises ProviderError that names the extra or the libraries to install; a warning instead with `allow_fallback`.
    """
    provider = provider_named(name)
    if name.startswith(PLUGIN):
        return
    available = runtime().get_available_providers()
    if provider.ep not in available:
        _refuse(
            f"the {name} provider is not in the installed onnxruntime wheel (it has {', '.join(available)}): "
            f"pip uninstall -y {' '.join(installed_wheels())} && pip install 'sd-ort[{provider.extra}]'.",
            allow_fallback,
        )
    elif missing := missing_libraries(name):
        _refuse(
            f"the {name} provider cannot load {', '.join(missing)}: install {provider.needs}, "
            "or add their folder to LD_LIBRARY_PATH.",
            allow_fallback,
        )


def _refuse(message: str, allow_fallback: bool) -> None:
    if not allow_fallback:
        raise ProviderError(message)
    warn_once(f"{message} Falling back to the CPU.")


@cache
def warn_once(message: str) -> None:
    """Log a warning that every component would repeat."""
    log.warning(message)


def create_session(
    model_path: Path,
    provider: str = "cpu",
    *,
    threads: int | None = None,
    allow_fallback: bool = False,
    tuning: bool = False,
    graph: bool = False,
    provider_options: Mapping[str, str] | None = None,
    library: Path | None = None,
    portable: bool = False,
    profile: Path | None = None,
) -> ort.InferenceSession:
    """Open `<pipeline folder>/<component>/model.onnx` on a provider.

    `threads`: intra-op threads, None for one a physical core. `allow_fallback`: warn instead of failing when the
    provider is not really used. `tuning`: let the provider search for its fastest kernels. `graph`: capture runs as
    CUDA or HIP graphs; such a session runs only through `GraphModel`. `provider_options`: more options of the
    provider, over those of the table. `library`: custom-op library to register instead of the one found; `portable`:
    register none. `profile`: file-name prefix of ONNX Runtime's profile.

    Raises InputError for a model that is missing, broken or refused, ProviderError for a provider that is not
    installed, not loadable or silently dropped.
    """
    model_path = Path(model_path)
    if model_path.name != MODEL:
        raise InputError(f"{model_path} is no component of a pipeline folder: expected <folder>/<component>/{MODEL}.")
    check_component(model_path.parent.parent, model_path.parent.name)
    check_provider(provider, allow_fallback=allow_fallback)
    onnxruntime = runtime()
    entry = provider_named(provider)
    if graph and entry.graph is None:
        raise ProviderError(f"the {provider} provider captures no graphs: leave graph capture off.")
    options = _session_options(provider, threads, profile)
    if not _register_ops(options, library, portable):
        _check_overloads(model_path, onnxruntime.__version__)
        if entry.device != "cpu" and not portable:
            warn_once(f"no op library: fused operators run as their parts on {provider}. Build it: sd-ort build-ops.")
    if provider.startswith(PLUGIN):
        devices = plugin_devices(Path(provider.removeprefix(PLUGIN)))
        options.add_provider_for_devices(devices, dict(provider_options or {}))
        providers = []  # those of the options; ONNX Runtime adds the CPU
    else:
        providers = _providers(entry, tuning, graph, provider_options or {})
    try:
        session = onnxruntime.InferenceSession(str(model_path), options, providers=providers)
    except Exception as error:  # pybind's exceptions share no base class but Exception
        raise InputError(f"ONNX Runtime refuses {model_path}: {first_line(error)}") from error
    if entry.ep not in session.get_providers():
        _refuse(
            f"ONNX Runtime dropped the {provider} provider and would run on the CPU: check that {entry.needs} is "
            "installed and that a GPU is visible (`sd-ort doctor`).",
            allow_fallback,
        )
    elif entry.ep != CPU_EP and not provider.startswith(PLUGIN):
        from sd_ort import tuning as results

        results.attach(session, entry.ep, _ops_path(library, portable), tuning, onnxruntime.__version__)
    return session


def _session_options(provider: str, threads: int | None, profile: Path | None) -> Any:
    options = runtime().SessionOptions()
    options.log_severity_level = 3  # errors only: the warnings are about the exporter's unused initializers
    if provider == "cpu":
        # It would keep one more block from the second step on, of a whole step: 100 MB for SD 1.5 at 256 x 256.
        options.enable_mem_pattern = False
    if threads:
        options.intra_op_num_threads = threads
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return options


def _providers(entry: Provider, tuning: bool, graph: bool, more: Mapping[str, str]) -> list[Any]:
    """What ONNX Runtime is asked for: the provider with its options, and the CPU for what it lacks."""
    if entry.ep == CPU_EP or entry.ep not in runtime().get_available_providers():
        return [CPU_EP]
    chosen = {**entry.options, **(entry.tuning if tuning else {}), **((entry.graph if graph else None) or {}), **more}
    return [(entry.ep, chosen), CPU_EP]


def _ops_path(library: Path | None, portable: bool) -> Path | None:
    return None if portable else library or op_library()


def _register_ops(options: Any, library: Path | None, portable: bool) -> bool:
    """Register the custom-op library, if there is one. Raises ProviderError when it is there but cannot be loaded."""
    path = _ops_path(library, portable)
    if path is None:
        log.info("no custom-op library: fused operators run as plain ONNX functions.")
        return False
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded: {first_line(error)} Build it again.") from error
    return True


def _check_overloads(model_path: Path, version: str) -> None:
    """Raise InputError for a model whose functions have overloads on an ONNX Runtime that takes them for one another.

    Versions 1.22 to 1.26 look functions up by name alone and crash on such a model; 1.27 does not.
    """
    if tuple(map(int, version.split(".")[:2])) >= (1, 27):
        return
    import onnx

    if any(function.overload for function in onnx.load(model_path, load_external_data=False).functions):
        raise InputError(
            f"{model_path} has overloaded functions, which ONNX Runtime {version} cannot run: build the op library "
            "with `sd-ort build-ops`, optimize for this provider's target, or install ONNX Runtime 1.27 or later."
        )


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, cut to 300 characters, or its type when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


class Model:
    """One ONNX component as a function of NumPy arrays: floating inputs are cast to the dtypes the graph declares."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.inputs = {i.name: i for i in session.get_inputs()}
        self.outputs = [o.name for o in session.get_outputs()]

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Run once. `arrays`: one array an input, by name, of the input's shape. Returns the outputs by name.

        Raises InputError when the names are not those of the graph's inputs, SdOrtError when ONNX Runtime fails, for
        example for want of memory.
        """
        if arrays.keys() != self.inputs.keys():
            raise InputError(
                f"the model takes {', '.join(self.inputs)}, not {', '.join(arrays)}: export the pipeline with sd-ort."
            )
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        try:
            results = self.session.run(None, feed)
        except Exception as error:  # pybind's exceptions share no base class but Exception
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}") from error
        return dict(zip(self.outputs, results, strict=True))

    def dtype(self, name: str) -> Any:
        """NumPy dtype of an input. Raises InputError for an element type no Stable Diffusion graph has."""
        declared = self.inputs[name].type
        if declared not in DTYPES:
            raise InputError(f"input {name} has the unsupported type {declared}: export the pipeline with sd-ort.")
        return DTYPES[declared]


class GraphModel(Model):
    """A component whose runs are captured: fixed device buffers and one CUDA or HIP graph for each set of input shapes.

    Made from a session opened with `graph=True`. A call copies its inputs into the buffers, replays the graph and
    copies the outputs out. For more control, `bind` gives the buffers themselves. At most `SHAPES` sets of shapes are
    kept; then the oldest one's buffers are dropped (its graph stays with the session).
    """

    SHAPES = 8

    def __init__(self, session: ort.InferenceSession, device: str = "cuda") -> None:
        super().__init__(session)
        self.device = device
        self.bound: dict[tuple[Any, ...], BoundShapes] = {}
        self.captured = 0

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        """As `Model.__call__`."""
        if arrays.keys() != self.inputs.keys():
            return super().__call__(**arrays)  # which refuses
        feed = {name: np.ascontiguousarray(array, self.dtype(name)) for name, array in arrays.items()}
        bound = self.bind(feed)
        for name, array in feed.items():
            bound.inputs[name].update_inplace(array)
        try:
            bound.run()
        except Exception as error:  # pybind's exceptions share no base class but Exception
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise SdOrtError(f"ONNX Runtime failed on {shapes}: {first_line(error)}") from error
        return {name: value.numpy() for name, value in bound.outputs.items()}

    def bind(self, feed: Mapping[str, np.ndarray]) -> BoundShapes:
        """The buffers and the graph for inputs of the shapes and dtypes of `feed`, whose numbers the inputs get.

        A new set of shapes runs twice: once uncaptured, so that kernels are chosen, memory is reserved and the
        outputs' shapes are known, and then for the capture.
        """
        key = tuple((name, array.shape) for name, array in sorted(feed.items()))
        if key not in self.bound:
            if len(self.bound) == self.SHAPES:
                del self.bound[next(iter(self.bound))]
            self.bound[key] = BoundShapes(self.session, feed, self.device, self.captured)
            self.captured += 1
        return self.bound[key]


class BoundShapes:
    """Input and output OrtValues at fixed device addresses for one set of shapes, and the graph captured over them."""

    UNCAPTURED = -1  # ONNX Runtime's annotation for a run that neither captures nor replays

    def __init__(self, session: ort.InferenceSession, feed: Mapping[str, np.ndarray], device: str, number: int) -> None:
        self.session = session
        value = runtime().OrtValue
        self.inputs = {name: value.ortvalue_from_numpy(array, device, 0) for name, array in feed.items()}
        self.binding = session.io_binding()
        for name, bound in self.inputs.items():
            self.binding.bind_ortvalue_input(name, bound)
        names = [output.name for output in session.get_outputs()]
        for name in names:
            self.binding.bind_output(name, device)
        self._run(self.UNCAPTURED)
        sizes = zip(names, session.get_outputs(), self.binding.get_outputs(), strict=True)
        self.outputs = {
            name: value.ortvalue_from_shape_and_type(made.shape(), DTYPES[declared.type], device, 0)
            for name, declared, made in sizes
        }
        self.binding.clear_binding_outputs()
        for name, bound in self.outputs.items():
            self.binding.bind_ortvalue_output(name, bound)
        self.number = number
        self.run()

    def run(self, wait: bool = True) -> None:
        """Run over the buffers, by replay once the graph is captured.

        Returns when the outputs are there or, without `wait`, when the run is queued on the session's own stream: the
        next `run` follows it, and whatever else reads the outputs must come after a `run` that waits.
        """
        self._run(self.number, wait)

    def _run(self, number: int, wait: bool = True) -> None:
        options = runtime().RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(number))
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.session.run_with_iobinding(self.binding, options)


def load(folder: Path, component: str, provider: str = "cpu", **options: Any) -> Model:
    """Open one component of a pipeline folder; options as for `create_session`."""
    return Model(create_session(Path(folder) / component / MODEL, provider, **options))
