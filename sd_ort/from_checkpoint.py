"""Checkpoint in, optimized folder out: a template is filled where there is one, else made on the way.

template there:   open the checkpoint, read each tensor, write it into the template's graphs       seconds
none yet:         export to a temporary folder beside the output, optimize, keep the template      minutes, once
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sd_ort.core import folder
from sd_ort.core.errors import InputError
from sd_ort.export.exporter import choose, export
from sd_ort.export.tracing import DEFAULT_OPSET
from sd_ort.family.checkpoints import FileOptions, Source, open_source
from sd_ort.family.weights import reader
from sd_ort.graphs import hoist
from sd_ort.optimize import templates
from sd_ort.optimize.optimizer import optimize
from sd_ort.optimize.targets import TARGETS, default_target

Report = Callable[[str], None]


def optimize_checkpoint(
    model: str,
    output: Path,
    *,
    target: str | None = None,
    dtype: str = "float32",
    components: Sequence[str] | None = None,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool = False,
    exporter: str = "dynamo",
    opset: int = DEFAULT_OPSET,
    files: FileOptions = FileOptions(),  # noqa: B008 (frozen)
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Optimize a checkpoint (a diffusers folder, a file, a hub id, `demo`) into `output`; returns the manifest.

    Options as for `optimize.optimizer.optimize` and `export.exporter.export`. With `calibrate` or `inputs` no template
    is used, since what stays in float32 is then measured on this checkpoint; a filled template keeps in float32 what
    its first checkpoint needed. Raises what the two stages raise.
    """
    if target is None:
        target, why = default_target()
        report(f"target {target}: {why}.")
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}.")
    source = open_source(model, None, False, 0, files=files)
    if source.about:
        report(source.about)
    names = choose(source, components)
    if hoisted and hoist.PARTS["step"] not in names:
        raise InputError("--hoist splits the UNet: take it into --component, or leave out --hoist.")
    options = {
        "target": target, "dtype": dtype, "components": names, "hoist": hoisted, "exporter": exporter, "opset": opset,
    }  # fmt: skip
    name = templates.key(source.configs, source.index, options)
    template = None if calibrate or inputs else templates.find(name)
    if template is not None:
        return _fill(template, source, output, options, report)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.export-", dir=output.parent) as scratch:
        raw = Path(scratch) / "raw"
        exported = export(model, raw, opset=opset, exporter=exporter, components=names, files=files, progress=report)
        manifest = optimize(
            raw, output, target=target, dtype=dtype, calibrate=calibrate, inputs=inputs, hoisted=hoisted, report=report
        )
        why_not = templates.store(name, output, exported)
    report(f"no template was kept: {why_not}." if why_not else f"template {name} was kept for the next of its kind.")
    return manifest


def _fill(template: Path, source: Source, output: Path, options: dict[str, Any], report: Report) -> dict[str, Any]:
    started = time.perf_counter()
    manifest = {
        "stage": "optimize",
        "source": {"model": source.name, "hash": source.hash, "random_weights": source.random_weights},
        "versions": {"sd-ort": version("sd-ort")},
        "options": options | {"template": template.stem},
    }
    with folder.staged(output, *source.folders) as work:
        source.write_configs(work)
        manifest["components"] = templates.fill(template, lambda model, names: reader(source, model, names), work)
        folder.write_manifest(work, manifest)
    report(f"{output}: template {template.stem} filled in {time.perf_counter() - started:.1f} s, nothing was traced.")
    return folder.read_manifest(output)
