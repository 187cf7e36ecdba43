"""Tuning results in JSON files: the fastest candidate of each GPU operator call on one model of GPU.

A file holds `format`, `validators` (GPU architecture, driver and runtime versions, hash of the op library, version of
ONNX Runtime), `operators` (operator -> signature of the call -> candidate, microseconds, default_microseconds, and
`rejected`: failed or wrong candidates that may be faster) and `onnxruntime` (what its own tunable operators
found, as `InferenceSession.get_tuning_results` gives it). A file whose validators differ from this machine's is
rejected with the reason. There is one file for each set of validators, in $SD_ORT_TUNING, or else in results/tuning and
the cache folder; sessions load the one that fits, from there or from `tuning` in the folder of their model, without
being asked to.

Only the file logic and the op library's C functions are here; `sd_ort.inspect.tune` meets every shape of a model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

from custom_ops.libraries import GpuLibrary
from sd_ort.core import locks
from sd_ort.core.cache import cache_folder, is_reachable_file, list_files
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import read_json, without_nulls, write_text
from sd_ort.core.schema import dict_of, list_of, record_type, schema_mismatch
from sd_ort.runtime.library import GPU_LIBRARIES as GPU_LIBRARIES
from sd_ort.runtime.providers import is_plugin, plugin_library, provider_named

log = logging.getLogger("sd_ort")

FORMAT = 1
LABELS = {
    "arch": "GPU architecture",
    "driver": "driver and runtime",
    "library": "op library",
    "onnxruntime": "ONNX Runtime",
}

Record = dict[str, Any]
Operators = dict[str, dict[str, Record]]


class TuningError(InputError):
    """A tuning file that is broken, or that was measured elsewhere."""


class TunableLibrary(Protocol):
    """Source and destination of tuning results: the GPU op library, or a stand-in of the tests."""

    def validators(self) -> dict[str, str]:
        """arch, driver and library, as in the file."""

    def results(self) -> Operators:
        """Return all measurements of this process."""

    def apply_result(self, operator: str, signature: str, candidate: str) -> bool:
        """Use an earlier result; False when there is no such operator or candidate."""

    def enable(self, enabled: bool) -> None:
        """Set whether calls of unknown signature are measured when they occur."""


class GpuOps:
    """Tuning's part of libsd_ort_cuda.so, libsd_ort_hip.so or the provider's library (custom_ops/interface.h)."""

    def __init__(self, library: Path) -> None:
        """Raises TuningError when the library cannot be loaded."""
        try:
            self.library = GpuLibrary(library)
        except (OSError, AttributeError) as error:
            raise TuningError(f"{library} cannot be loaded ({error}): build it again with sd-ort build-ops.") from error
        self.c = self.library.c

    def validators(self) -> dict[str, str]:
        names = {"arch": "gpu_arch", "driver": "gpu_versions", "library": "build_hash"}
        versions = {key: getattr(self.c, f"sd_ort_{name}")().decode() for key, name in names.items()}
        # One build makes the op library's GPU half and the provider, which has operators and candidates of its own.
        return versions | {"library": f"{versions['library']} {self.library.path.name}"}

    def results(self) -> Operators:
        operators: Operators = {}
        for operator, signature, candidate, own, default, rejected in self.library.tuning_results():
            result = {"candidate": candidate, "microseconds": float(own), "default_microseconds": float(default)}
            if rejected:
                result["rejected"] = rejected
            operators.setdefault(operator, {})[signature] = result
        return operators

    def apply_result(self, operator: str, signature: str, candidate: str) -> bool:
        return bool(self.c.sd_ort_set_tuning_result(operator.encode(), signature.encode(), candidate.encode()))

    def enable(self, enabled: bool) -> None:
        self.c.sd_ort_enable_tuning(int(enabled))


def gpu_library(provider: str, op_library: Path | None) -> Path | None:
    """Return the library with a provider's kernels: the op library's GPU half or the sd-ort provider; None without."""
    entry = provider_named(provider)
    if is_plugin(provider):
        return plugin_library(provider) if entry.vendor else None
    ep = entry.ep
    if op_library is None or ep not in GPU_LIBRARIES:
        return None
    path = op_library.parent / GPU_LIBRARIES[ep]
    return path if path.is_file() else None


def gpu_ops(provider: str, op_library: Path | None) -> GpuOps | None:
    """The functions of `gpu_library`; None when there is none. Raises TuningError when it cannot be loaded."""
    path = gpu_library(provider, op_library)
    return None if path is None else GpuOps(path)


def folder() -> Path:
    """Return the folder of tuning files: $SD_ORT_TUNING, else results/tuning below the working directory."""
    return Path(os.environ.get("SD_ORT_TUNING") or "results/tuning")


def folders(model: Path | None = None) -> list[Path]:
    """Return the folders in which a session on `model` (a component's model.onnx) looks for tuning files, in order."""
    model_folders = [] if model is None else [model.parent.parent / "tuning"]
    cached = [] if os.environ.get("SD_ORT_TUNING") else [cache_folder() / "tuning"]
    return [folder(), *model_folders, *cached]


def path_for(validators: Mapping[str, str]) -> Path:
    """The file of one set of validators: the architecture and a digest of all."""
    return folder() / _name(validators)


def _name(validators: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(validators), sort_keys=True).encode()).hexdigest()[:12]
    return f"{validators['arch']}-{digest}.json"


# ---- files


def read(path: Path) -> Record:
    """A file's content. Raises TuningError that says what is wrong with it."""
    try:
        record = read_json(path)
    except InputError as error:
        raise TuningError(f"{path} cannot be read: delete it and tune again with sd-ort tune.") from error
    if record.get("format") != FORMAT:
        version = record.get("format")
        advice = "delete it and tune again with sd-ort tune"
        raise TuningError(f"{path} has format {version}, this version reads {FORMAT}: {advice}.")
    record = without_nulls(record)
    if schema_mismatch(record, _RECORD) or _has_lone_time(record):
        raise TuningError(f"{path} is no tuning file: validators or operators are missing or damaged: delete it.")
    return record


_TIMES = ("microseconds", "default_microseconds")  # of a candidate and of the default, where they were measured
_RESULT = record_type("Result", {**dict.fromkeys(_TIMES, float), "rejected": str}, {"candidate": str})
_OF_ONNXRUNTIME = record_type("ProviderResults", {}, {"ep": str, "validators": dict, "results": dict[str, dict]})
_RECORD = record_type(
    "TuningFile",
    {"onnxruntime": list_of(_OF_ONNXRUNTIME)},
    {"validators": dict[str, str], "operators": dict_of(dict_of(_RESULT))},
)


def _has_lone_time(record: Record) -> bool:
    """Return whether a candidate was measured without the default beside it."""
    results = (result for operator in record["operators"].values() for result in operator.values())
    return any(result.get(_TIMES[0]) and _TIMES[1] not in result for result in results)


def check(path: Path, record: Record, validators: Mapping[str, str]) -> None:
    """Raise TuningError, with every difference, when a file was measured elsewhere."""
    differences = [
        f"{LABELS.get(key, key)} {record['validators'].get(key)!r} there, {value!r} here"
        for key, value in validators.items()
        if record["validators"].get(key) != value
    ]
    if differences:
        # A session reads no other file than that of this name.
        advice = "Delete it and tune" if "arch" in validators and path.name == _name(validators) else "Tune"
        raise TuningError(f"{path} is rejected: {'; '.join(differences)}. {advice} again with sd-ort tune.")


def merge(path: Path, record: Record) -> Record:
    """Merge results into a file, replacing those of the same calls, and return its content.

    Writers wait for each other, and readers see the file before or after, never between. Raises TuningError when the
    file is another build's, OutputError when it cannot be written.
    """
    with _locked(path):
        merged = record
        if path.is_file():
            merged = read(path)
            check(path, merged, record["validators"])
            for operator, results in record["operators"].items():
                merged["operators"].setdefault(operator, {}).update(results)
            merged["onnxruntime"] = merge_onnxruntime(merged.get("onnxruntime", []), record["onnxruntime"])
        write_text(path, json.dumps(merged, indent=1, sort_keys=True) + "\n")
    return merged


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}.") from error
    with lock:
        locks.lock(lock.fileno(), locks.EXCLUSIVE)
        yield


def merge_onnxruntime(earlier: list[Record], more: list[Record]) -> list[Record]:
    """ONNX Runtime's results, by provider: {"ep", "validators", "results": {operator: {parameters: candidate}}}.

    Results of a provider whose own validators have changed take the place of the old ones.
    """
    by_provider = {entry["ep"]: entry for entry in earlier}
    for entry in more:
        old = by_provider.get(entry["ep"])
        if old is None or old["validators"] != entry["validators"]:
            by_provider[entry["ep"]] = entry
            continue
        for operator, results in entry["results"].items():
            old["results"].setdefault(operator, {}).update(results)
    return list(by_provider.values())


def table(record: Record) -> list[str]:
    """A file's content as lines for a terminal: validators, then a line per call."""
    lines = [f"{LABELS.get(key, key)}: {value}" for key, value in sorted(record["validators"].items())]
    for operator, results in sorted(record["operators"].items()):
        for signature, result in sorted(results.items()):
            gain = ""
            if result.get("microseconds"):
                faster = result["default_microseconds"] / result["microseconds"]
                gain = f"  {result['microseconds']:9.2f} us  {faster:5.2f}x of the default"
            lines.append(f"{operator:24} {signature:40} {result['candidate']:28}{gain}")
            if rejected := result.get("rejected"):
                lines.append(f"{'':24} rejected, though perhaps faster: {rejected}")
    for entry in record.get("onnxruntime", []):
        count = sum(len(results) for results in entry["results"].values())
        lines.append(f"ONNX Runtime, {entry['ep']}: {count} results of {len(entry['results'])} operators")
    return lines


# ---- sessions


def validators_of(source: TunableLibrary | None, onnxruntime_version: str) -> dict[str, str]:
    """Return the values that a tuning file must match. Without an op library only ONNX Runtime's version is known."""
    own = source.validators() if source is not None else {"arch": "unknown", "driver": "", "library": ""}
    return {**own, "onnxruntime": onnxruntime_version}


def setup_tuning(
    session: Any,
    provider: str,
    op_library: Path | None,
    tune: bool,
    onnxruntime_version: str,
    model: Path | None = None,
) -> None:
    """Tuning of a session on a GPU: load the matching file and, with `tune`, measure, and save when the session ends.

    Raises TuningError for a fitting file that is damaged.
    """
    source = gpu_ops(provider, op_library)
    load(session, source, onnxruntime_version, model)
    if tune:
        if source is not None:
            source.enable(True)
        # At the end of the process, of a worker of a pool too; the session may be gone by then.
        Finalize(None, save_at_exit, (weakref.ref(session), source, onnxruntime_version), exitpriority=1)


def save_at_exit(session: weakref.ref[Any], source: TunableLibrary | None, onnxruntime_version: str) -> None:
    alive = session()
    save([] if alive is None else [alive], source, onnxruntime_version)


def find(validators: Mapping[str, str], model: Path | None = None) -> Path | None:
    """Return the file of results with these validators, or None."""
    paths = (results_folder / _name(validators) for results_folder in folders(model))
    return next((path for path in paths if is_reachable_file(path)), None)


def load(
    session: Any, source: TunableLibrary | None, onnxruntime_version: str, model: Path | None = None
) -> Path | None:
    """Give a session the results of the file that fits; its path, or None. The log says why others do not fit."""
    validators = validators_of(source, onnxruntime_version)
    fitting = find(validators, model)
    if fitting is None:
        _log_rejections(
            (path for results_folder in folders(model) for path in list_files(results_folder, "*.json")), validators
        )
        return None
    record = read(fitting)
    check(fitting, record, validators)
    apply(session, source, record)
    log.info("tuning results of %s are used.", fitting)
    return fitting


def _log_rejections(paths: Iterable[Path], validators: Mapping[str, str]) -> None:
    for path in sorted(paths):
        try:
            check(path, read(path), validators)
        except TuningError as error:
            log.info("%s", error)


def apply(session: Any, source: TunableLibrary | None, record: Record) -> None:
    """Hand a file's results to the op library and to ONNX Runtime.

    Raises TuningError for an operator or candidate that the library lacks: the file was edited.
    """
    if source is not None:
        for operator, results in record["operators"].items():
            for signature, result in results.items():
                if not source.apply_result(operator, signature, result["candidate"]):
                    raise TuningError(f"the op library has no candidate {result['candidate']!r} of {operator}.")
    if record.get("onnxruntime"):
        session.set_tuning_results(record["onnxruntime"], error_on_invalid=False)


def _rejected(operators: Operators) -> Iterator[tuple[str, str, str]]:
    """Yield operator, signature and rejected candidates of the calls that have some."""
    for operator, results in operators.items():
        for signature, result in results.items():
            if "rejected" in result:
                yield operator, signature, result["rejected"]


def save(sessions: Iterable[Any], source: TunableLibrary | None, onnxruntime_version: str) -> Path | None:
    """Write the results of this process and its sessions to their file and return its path; None without results."""
    ort_results: list[Record] = []
    for session in sessions:
        ort_results = merge_onnxruntime(
            ort_results, [entry for entry in session.get_tuning_results() if entry["results"]]
        )
    operators = source.results() if source is not None else {}
    if not operators and not ort_results:
        return None
    for operator, signature, rejected in _rejected(operators):
        log.warning("%s %s: candidates that may be faster were rejected: %s.", operator, signature, rejected)
    validators = validators_of(source, onnxruntime_version)
    path = path_for(validators)
    record = {"format": FORMAT, "validators": validators, "operators": operators, "onnxruntime": ort_results}
    for results_folder in folders():
        merge(results_folder / path.name, copy.deepcopy(record))
    return path
