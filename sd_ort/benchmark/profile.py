"""Time of one component by operator and by site, from ONNX Runtime's profile.

ONNX Runtime writes one event per node and run. The site of a node is its torch module (`inspect.explain`), found by the
node's name; nodes that ONNX Runtime added, or that came out of a function, match the longest node name that is a prefix
of theirs.

On a GPU a node's event only covers the launch of its kernels. The sd-ort provider adds the device time of each node. If
torch can record kernels (CUPTI, roctracer), each kernel counts for the node during whose event it was launched.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.benchmark.report_file import ReportFile
from sd_ort.benchmark.runner import BuiltEngine, build_engines
from sd_ort.benchmark.worker import Worker
from sd_ort.core import files
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.ownership import SharedFolder
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.graphs.load import load
from sd_ort.graphs.scopes import scope
from sd_ort.runtime.device_meters import DeviceMeter

STEP = "sd-ort step"  # name of a call in torch's trace
KERNEL = "_kernel_time"  # ONNX Runtime's suffix of node names
WARMUP = 3  # calls, in which kernels are chosen and memory is reserved
MAX_SHIFT = 200  # us from the Python call to ONNX Runtime's start of the run
HOTTEST = 40  # rows by site and operator
SITE_DEPTH = 2  # modules of a site's name by which rows are grouped: down_blocks.0
OTHER = "(made by ONNX Runtime)"


@dataclass(frozen=True)
class Event:
    """One node in one run: start and duration in us; `run_start`: start of the run in us."""

    name: str
    operator: str
    provider: str
    start: float
    duration: float
    run: int
    run_start: float
    site: str = OTHER


@dataclass(frozen=True)
class Kernel:
    """One GPU kernel: duration, and launch time since the start of the run's step, in us."""

    name: str
    duration: float
    run: int
    launch: float


def run(
    engines: Sequence[Engine],
    settings: BenchmarkSettings,
    out: Path,
    *,
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Profile the ONNX engines one by one; return the report, which is saved in `out`/profile.json.

    `settings.component`, or the UNet, is called `settings.steps` times at the first batch size, after a warm-up. Each
    engine also gets a `trace-<label>.json` for ui.perfetto.dev or chrome://tracing.
    """
    settings = replace(settings, component=settings.component or "unet", batches=settings.batches[:1])
    onnx_engines = [engine for engine in engines if engine.engine == "onnxruntime" and not engine.graph]
    if not onnx_engines:
        raise InputError("--profile reads ONNX Runtime's profile: give a pipeline folder, and no graph capture.")
    report = ReportFile(settings, out, notes, "profile", overwrite, [trace_name(engine) for engine in onnx_engines])
    rows: list[dict[str, Any]] = report.report["engines"]
    with report.saving(report.write):
        for built in build_engines(onnx_engines, settings, work or out / "work", jobs, on_progress):
            on_progress(f"profiling {built.engine.label}")
            row = {"label": built.engine.label, "model": built.engine.model}
            try:
                rows.append({**row, "status": "ok", **_profile(built, settings, report.out)})
            except SdOrtError as error:
                rows.append({**row, "status": "failed", "reason": str(error)})
            report.write()
    return report.report


def trace_name(engine: Engine) -> str:
    """Return the file name of an engine's trace."""
    return f"trace-{engine.label.replace(' ', '-')}.json"


def _profile(built: BuiltEngine, settings: BenchmarkSettings, out: SharedFolder) -> dict[str, Any]:
    """Return trace, clock and summary of one engine, and write its trace."""
    engine = built.engine
    with Worker(engine, DeviceMeter(), built.failure) as worker, tempfile.TemporaryDirectory() as scratch:
        if worker.failure:
            raise SdOrtError(worker.failure)
        paths, _ = worker.call(record_profile, engine, settings, Path(scratch))
        trace = json.loads(Path(paths["profile"]).read_text())
        kernels = kernel_events(json.loads(Path(paths["kernels"]).read_text())) if paths["kernels"] else []
    nodes, clock = by_device(node_events(trace, settings.steps), trace)
    events = with_sites(nodes, site_names(Path(engine.directory) / str(settings.component) / MODEL))
    if kernels:
        events, clock = by_kernels(events, kernels), "kernels"
    sequential = clock != "nodes"
    out.write(trace_name(engine), files.json_bytes(to_trace(events, sequential=sequential)))
    line = time_line(events, sequential=sequential)
    return {"trace": trace_name(engine), "clock": clock, **summary(events), "time_line": line}


# --- Recording, in the engine's process -----------------------------------------------------------------------------


def record_profile(engine: Engine, settings: BenchmarkSettings, scratch: Path) -> dict[str, Any]:
    """Run the component with profiling; return the paths of ONNX Runtime's profile and torch's (None: no kernels)."""
    return interface.convert_errors(_record, engine, settings, scratch)


def _record(engine: Engine, settings: BenchmarkSettings, scratch: Path) -> dict[str, Any]:
    from sd_ort.benchmark.engines import ort

    model = ort.open_model(engine, settings, profile=scratch / "ort")
    feeds, _ = interface.component_call(engine, settings, settings.batches[0])
    step, _ = ort.bind(model, ort.all_feeds(engine, settings, feeds), settings)
    for _ in range(WARMUP):
        step()
    kernels = None if settings.provider == "cpu" else _record_kernels(step, settings.steps, scratch / "torch.json")
    if kernels is None:
        for _ in range(settings.steps):
            step()
    return {"profile": model.session.end_profiling(), "kernels": kernels}


def _record_kernels(step: Callable[[], Any], count: int, path: Path) -> str | None:
    """Call `step` under torch's profiler, which records every kernel of the process; None if torch has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            with torch.profiler.record_function(STEP):
                step()
    profiler.export_chrome_trace(str(path))
    return str(path)


# --- Reading --------------------------------------------------------------------------------------------------------


def node_events(trace: Sequence[Mapping[str, Any]], runs: int) -> list[Event]:
    """Return the nodes of the last `runs` runs in an ONNX Runtime profile, in order of time."""
    starts = sorted((e["ts"], e["ts"] + e["dur"]) for e in trace if e.get("name") == "model_run")[-runs:]
    if not starts:
        raise SdOrtError("ONNX Runtime's profile holds no run.")
    events = []
    for event in trace:
        name, arguments = event.get("name", ""), event.get("args", {})
        if event.get("cat") != "Node" or not name.endswith(KERNEL) or "op_name" not in arguments:
            continue
        run = bisect.bisect_right(starts, (event["ts"], float("inf"))) - 1
        if run >= 0 and event["ts"] < starts[run][1]:
            provider = str(arguments.get("provider", "")).removesuffix("ExecutionProvider")
            name = name.removesuffix(KERNEL)
            events.append(Event(name, arguments["op_name"], provider, event["ts"], event["dur"], run, starts[run][0]))
    return sorted(events, key=lambda event: event.start)


def by_device(events: Sequence[Event], trace: Sequence[Mapping[str, Any]]) -> tuple[list[Event], str]:
    """Return the events with the sd-ort provider's device times and "device", or unchanged and "nodes"."""
    times = {
        (e["name"], int(e["args"]["node_ts"])): float(e["args"]["device_us"])
        for e in trace
        if e.get("cat") == "Kernel" and "node_ts" in e.get("args", {})
    }
    timed = [replace(event, duration=times.get((event.name, int(event.start)), event.duration)) for event in events]
    return timed, "device" if times else "nodes"


def kernel_events(trace: Mapping[str, Any]) -> list[Kernel]:
    """Return the GPU kernels and copies in torch's trace."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = sorted(e["ts"] for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation")
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = []
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or launch is None:
            continue
        run = bisect.bisect_right(steps, launch) - 1
        if run >= 0:
            kernels.append(Kernel(event["name"], event["dur"], run, launch - steps[run]))
    return kernels


def by_kernels(events: Sequence[Event], kernels: Sequence[Kernel]) -> list[Event]:
    """Return the events with the times of the kernels launched during each; other kernels are one event per run.

    The two clocks are aligned at the start of each run. The remaining shift, from Python into the run, is the one with
    which most launches are inside an event.
    """
    starts: dict[int, list[float]] = defaultdict(list)
    members: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        starts[event.run].append(event.start - event.run_start)
        members[event.run].append(event)

    def owner(kernel: Kernel, shift: float) -> Event | None:
        launch = kernel.launch - shift
        index = bisect.bisect_right(starts[kernel.run], launch) - 1
        event = members[kernel.run][index] if index >= 0 else None
        return event if event is not None and launch <= event.start - event.run_start + event.duration else None

    shift = max(range(MAX_SHIFT), key=lambda s: sum(owner(kernel, s) is not None for kernel in kernels))
    times: dict[Event | int, float] = defaultdict(float)
    for kernel in kernels:
        times[owner(kernel, shift) or kernel.run] += kernel.duration
    others = [Event("", "(other kernels)", "", 0, t, run, 0) for run, t in times.items() if isinstance(run, int)]
    return [*(replace(event, duration=times[event]) for event in events), *others]


def site_names(path: Path) -> dict[str, str]:
    """Return the module scope of each node name and output name of a model.

    ONNX Runtime names some nodes that it adds after their output, as in `conv2d_nchwc`.
    """
    names: dict[str, str] = {}
    for node in load(path).graph:
        if site := scope(node):
            names |= {str(output.name): site for output in node.outputs} | {str(node.name): site}
    return {name: site for name, site in names.items() if name not in ("", "None")}


def with_sites(events: Iterable[Event], sites: Mapping[str, str]) -> list[Event]:
    """Return the events with the site of the node, or of the longest node name that theirs starts with."""

    def site(name: str) -> str:
        prefixes = (name[:length] for length in range(len(name), 0, -1))
        return next((sites[prefix] for prefix in prefixes if prefix in sites), OTHER)

    return [replace(event, site=site(event.name)) for event in events]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return the times by operator, by group of sites, and by site and operator: ms and nodes per call, share."""
    runs = len({event.run for event in events})
    total = sum(event.duration for event in events) or 1.0

    def table(key: Callable[[Event], str]) -> list[dict[str, Any]]:
        durations: dict[str, list[float]] = defaultdict(list)
        for event in events:
            durations[key(event)].append(event.duration)
        rows = [
            {"name": name, "ms": sum(us) / 1e3 / runs, "count": len(us) / runs, "share": sum(us) / total}
            for name, us in durations.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])

    return {
        "total_ms": total / 1e3 / runs,
        "by_operator": table(lambda e: f"{e.operator} [{e.provider}]" if e.provider else e.operator),
        "by_site": table(lambda e: ".".join(e.site.split(".")[:SITE_DEPTH])),
        "hottest": table(lambda e: f"{e.site} {e.operator}")[:HOTTEST],
    }


def time_line(events: Sequence[Event], *, sequential: bool) -> list[tuple[str, float]]:
    """Return the operators of the last run in order of time, each with its ms; neighbors of one operator are one part.

    "" is the time between two nodes. `sequential`: as in `to_trace`.
    """
    last = max((event.run for event in events), default=0)
    parts: list[tuple[str, float]] = []
    end = float("inf")
    for event in events:
        if event.run != last:
            continue
        gap = [("", event.start - end)] if not sequential and event.start > end else []
        for name, duration in [*gap, (event.operator, event.duration)]:
            before = parts.pop()[1] if parts and parts[-1][0] == name else 0.0
            parts.append((name, before + duration / 1e3))
        end = event.start + event.duration
    return parts


def to_trace(events: Sequence[Event], *, sequential: bool) -> dict[str, Any]:
    """Return the events in Chrome's trace format: one track per provider, named after operators, sites as arguments.

    `sequential`: device times have no start, so events follow each other without gaps in the order of the nodes.
    """
    tracks = sorted({event.provider for event in events})
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": name or "other"}}
        for i, name in enumerate(tracks)
    ]
    cursor = 0.0
    for event in events:
        start = cursor if sequential else event.start
        cursor += event.duration
        arguments = {"node": event.name, "site": event.site, "run": event.run}
        entry = {"ph": "X", "pid": 1, "tid": tracks.index(event.provider), "ts": start, "dur": event.duration}
        entries.append(entry | {"name": event.operator, "cat": event.site.split(".")[0], "args": arguments})
    return {"displayTimeUnit": "ms", "traceEvents": entries}


def to_table(report: dict[str, Any]) -> str:
    """Return the times by operator, then by site, for each engine."""
    lines = []
    for row in report["engines"]:
        if row["status"] != "ok":
            lines.append(f"{row['label']} failed: {row['reason']}")
            continue
        lines.append(f"{row['label']}: {row['total_ms']:.2f} ms per call in {row['clock']}, trace {row['trace']}")
        for title in ("by_operator", "by_site"):
            lines += [
                f"    {r['ms']:9.3f} ms {r['share']:6.1%} {r['count']:6.0f}x  {r['name']}" for r in row[title][:12]
            ]
            lines.append("")
    return "\n".join([*lines, *report["notes"]])
