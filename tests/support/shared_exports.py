"""Exports of components with random weights that all tests of a run share: tracing one takes seconds."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sd_ort.checkpoints.checkpoint import Checkpoint
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.export import templates, tracing
from sd_ort.export.exporter import ExportOptions

ExportComponent = Callable[[Checkpoint, str, Path, ExportOptions], dict[str, Any]]
Trace = Callable[..., torch.export.ExportedProgram]

MAX_PROGRAMS = 8  # in memory; another export of a program comes soon after the first one


def share_exports(export: ExportComponent, folder: Path) -> ExportComponent:
    """Return an `export_component` that copies what it exported before, in this process or another one of the run.

    folder: of the exports, by a hash of what determines the graph and the weights. Those of files are not shared.
    Exports at several opsets, and of equal models of several pipelines, share the torch program in one process.
    """
    programs: dict[str, torch.export.ExportedProgram] = {}

    @functools.wraps(export)
    def export_component(source: Checkpoint, component: str, out: Path, options: ExportOptions) -> dict[str, Any]:
        model = MODEL_OF.get(component, component)
        if source.seed is None or source.models[model].files:
            return export(source, component, out, options)
        graph = templates.component_key(source, component, options.opset, options.exporter)
        content = [graph, component, source.index[model], source.configs[model], source.seed, vars(options)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        program = f"{model}-{templates.component_key(source, component, 0, options.exporter)}-{source.seed}"
        first, entry = folder / key, folder / f"{key}.json"
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if entry.is_file():
                shutil.copytree(first, out)
            else:
                with mock.patch.object(tracing, "trace", share_program(tracing.trace, programs, program)):
                    exported = export(source, component, out, options)
                shutil.rmtree(first, ignore_errors=True)  # of an export that was interrupted
                shutil.copytree(out, first)
                entry.write_text(json.dumps(exported))
        loaded: dict[str, Any] = json.loads(entry.read_text())
        return loaded

    return export_component


def share_program(trace: Trace, programs: dict[str, torch.export.ExportedProgram], key: str) -> Trace:
    """Return a `trace` that returns the program of `key` if it is in `programs`, and stores it there if not."""

    def shared(*args: Any) -> torch.export.ExportedProgram:
        if key not in programs:
            if len(programs) == MAX_PROGRAMS:
                del programs[next(iter(programs))]
            programs[key] = trace(*args)
        return programs[key]

    return shared
