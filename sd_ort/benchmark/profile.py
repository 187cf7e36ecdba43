"""Where the time goes in one component: by operator class and by site, from ONNX Runtime's own profile.

ONNX Runtime writes one event a node and run. A node's site is the module of the torch model it came from (see
`check.explain`), found through the name of the node in our file; nodes that ONNX Runtime made itself, or that came out
of a function, are looked up by the longest name they start with.

On a GPU a node's event is only the time to launch its kernels. Our own provider adds the device's time of each of its
nodes. Where torch can record kernels (CUPTI, roctracer) they are recorded beside, and each belongs to the node in whose
event it was launched.
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

from sd_ort.benchmark.engines.interface import Engine, Settings
from sd_ort.benchmark.report_file import Record
from sd_ort.benchmark.runner import Prepared, prepare
from sd_ort.benchmark.worker import Worker
from sd_ort.core import files
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.load import load
from sd_ort.graphs.scopes import scope
from sd_ort.runtime.device_meters import Meter

STEP = "sd-ort step"
KERNEL = "_kernel_time"  # what ONNX Runtime puts behind a node's name
WARMUP = 3  # calls: kernels are chosen, memory is reserved
MAX_SHIFT = 200  # us that a call may need to get from Python into ONNX Runtime
HOTTEST = 40
SITE_DEPTH = 2  # modules of a site's name that rows are grouped by: down_blocks.0
OTHER = "(made by ONNX Runtime)"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Event:
    """One node in one run: name, operator, provider, start and duration in us, the run and its start, and the site."""

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
    """One GPU kernel: its duration in us, its run, and when it was launched, in us since that run's step began."""

    name: str
    duration: float
    run: int
    launch: float


def run(
    contenders: Sequence[Engine],
    settings: Settings,
    out: Path,
    *,
    notes: Sequence[str] = (),
    work: Path | None = None,
    jobs: int = 1,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Profile the ONNX engines one by one; the report is returned and kept in `out`/profile.json.

    Beside it lies one `trace-<label>.json` an engine, for ui.perfetto.dev or chrome://tracing. `settings.component`,
    or the UNet, is called `settings.steps` times at the first batch size after a warm-up.
    """
    settings = replace(settings, component=settings.component or "unet", batches=settings.batches[:1])
    record = Record(settings, out, notes, "profile")
    rows: list[dict[str, Any]] = record.report["engines"]
    chosen = [engine for engine in contenders if engine.engine == "onnxruntime" and not engine.graph]
    if not chosen:
        raise InputError("--profile reads ONNX Runtime's profile: give a pipeline folder, and no graph capture.")
    with record.kept(record.write):
        for item in prepare(chosen, settings, work or out / "work", jobs, say):
            say(f"profiling {item.engine.label}")
            rows.append({"label": item.engine.label, "model": item.engine.model, **_profile(item, settings, out)})
            record.write()
    return record.report


def _profile(item: Prepared, settings: Settings, out: Path) -> dict[str, Any]:
    """One engine's row; its trace is written to `out`."""
    try:
        with Worker(item.engine, Meter(), item.failure) as worker, tempfile.TemporaryDirectory() as scratch:
            if worker.failure:
                raise SdOrtError(worker.failure)
            result, _ = worker.call(record_profile, item.engine, settings, Path(scratch))
            trace = json.loads(Path(result["profile"]).read_text())
            nodes = node_events(trace, settings.steps)
            kernels = kernel_events(json.loads(Path(result["kernels"]).read_text())) if result["kernels"] else []
        sites = site_names(Path(item.engine.directory) / str(settings.component) / MODEL)
        nodes, clock = by_device(nodes, trace)
        events = with_sites(nodes, sites)
        if kernels:
            events, clock = by_kernels(events, kernels), "kernels"
        name = f"trace-{item.engine.label.replace(' ', '-')}.json"
        files.write_json(out / name, to_trace(events, in_turn=clock != "nodes"))
        return {"status": "ok", "trace": name, "clock": clock, **summary(events)}
    except SdOrtError as error:
        return {"status": "failed", "reason": str(error)}


# --- Recording, in the engine's process -----------------------------------------------------------------------------


def record_profile(engine: Engine, settings: Settings, scratch: Path) -> dict[str, Any]:
    """Run the component with profiling on: paths of ONNX Runtime's profile, and of torch's or None without kernels."""
    from sd_ort.benchmark.engines import interface

    return interface.with_plain_errors(_record, engine, settings, scratch)


def _record(engine: Engine, settings: Settings, scratch: Path) -> dict[str, Any]:
    from sd_ort.benchmark.engines import ort
    from sd_ort.benchmark.engines.interface import component_call

    model = ort.open_model(engine, settings, profile=scratch / "ort")
    feeds = component_call(engine, settings, settings.batches[0]).feeds
    step, _ = ort.bind(model, ort.all_feeds(engine, settings, feeds), settings)
    for _ in range(WARMUP):
        step()
    kernels = scratch / "torch.json" if settings.provider != "cpu" and _torch_sees_gpu() else None
    if kernels is None:
        for _ in range(settings.steps):
            step()
    else:
        _with_kernels(step, settings.steps, kernels)
    return {"profile": model.session.end_profiling(), "kernels": kernels and str(kernels)}


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _with_kernels(step: Callable[[], Any], count: int, path: Path) -> None:
    """Call `step` under torch's profiler, which sees every kernel of the process; write its trace to `path`."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            with torch.profiler.record_function(STEP):
                step()
    profiler.export_chrome_trace(str(path))


# --- Reading --------------------------------------------------------------------------------------------------------


def node_events(trace: Sequence[Mapping[str, Any]], runs: int) -> list[Event]:
    """The nodes of the last `runs` runs of an ONNX Runtime profile, in order, each with its time in us."""
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
    """The events with the device's times, which our provider tells ONNX Runtime, and the clock that they are of then:
    "device", or "nodes" where it told none."""
    told = [
        e["args"] | {"name": e["name"]} for e in trace if e.get("cat") == "Kernel" and "node_ts" in e.get("args", {})
    ]
    times = {(each["name"], int(each["node_ts"])): float(each["device_us"]) for each in told}
    made = [replace(event, duration=times.get((event.name, int(event.start)), event.duration)) for event in events]
    return made, "device" if times else "nodes"


def kernel_events(trace: Mapping[str, Any]) -> list[Kernel]:
    """The GPU kernels (and copies) in torch's trace, each with the time of its launch relative to its step's start."""
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
    """The events with the time of the kernels launched in each instead of their own; the rest is one event a run.

    The two clocks are aligned at the start of each run; what is left, the way from Python into the run, is the shift
    that puts most launches inside an event.
    """
    starts: dict[int, list[float]] = defaultdict(list)
    members: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        starts[event.run].append(event.start - event.run_start)
        members[event.run].append(event)

    def owner(kernel: Kernel, shift: float) -> Event | None:
        at = kernel.launch - shift
        index = bisect.bisect_right(starts[kernel.run], at) - 1
        event = members[kernel.run][index] if index >= 0 else None
        return event if event is not None and at <= event.start - event.run_start + event.duration else None

    shift = max(range(MAX_SHIFT), key=lambda s: sum(owner(kernel, s) is not None for kernel in kernels))
    times: dict[Event | int, float] = defaultdict(float)
    for kernel in kernels:
        times[owner(kernel, shift) or kernel.run] += kernel.duration
    made = [replace(event, duration=times[event]) for event in events]
    rest = [Event("", "(other kernels)", "", 0, t, run, 0) for run, t in times.items() if isinstance(run, int)]
    return [*made, *rest]


def site_names(path: Path) -> dict[str, str]:
    """Name -> module scope, of every node of a model that knows its module, and of the values it makes.

    ONNX Runtime names some nodes it makes after the value they make, as in `conv2d_nchwc`.
    """
    names: dict[str, str] = {}
    for node in load(path).graph:
        if found := scope(node):
            names |= {str(output.name): found for output in node.outputs} | {str(node.name): found}
    return {name: found for name, found in names.items() if name not in ("", "None")}


def with_sites(events: Iterable[Event], sites: Mapping[str, str]) -> list[Event]:
    """The events with their sites: the node's own, or that of the longest node name theirs starts with."""
    names = sorted(sites)

    def site(name: str) -> str:
        if name in sites:
            return sites[name]
        index = bisect.bisect_right(names, name) - 1
        while index >= 0 and names[index][:1] == name[:1]:
            if name.startswith(names[index]):
                return sites[names[index]]
            index -= 1
        return OTHER

    return [replace(event, site=site(event.name)) for event in events]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Time by operator class, by group of sites, and by site and operator: ms per call, nodes per call, share."""
    runs = len({event.run for event in events})
    total = sum(event.duration for event in events) or 1.0

    def table(key: Callable[[Event], str]) -> list[dict[str, Any]]:
        times: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for event in events:
            times[key(event)] += event.duration
            counts[key(event)] += 1
        rows = [
            {"name": name, "ms": time / 1e3 / runs, "count": counts[name] / runs, "share": time / total}
            for name, time in times.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])

    return {
        "total_ms": total / 1e3 / runs,
        "by_operator": table(lambda e: f"{e.operator} [{e.provider}]" if e.provider else e.operator),
        "by_site": table(lambda e: ".".join(e.site.split(".")[:SITE_DEPTH])),
        "hottest": table(lambda e: f"{e.site} {e.operator}")[:HOTTEST],
    }


def to_trace(events: Sequence[Event], *, in_turn: bool) -> dict[str, Any]:
    """Chrome's trace format: a track a provider, events named after operators, sites in their arguments.

    `in_turn`: times of a device have no start of their own here: the events are laid end to end, in their nodes' order.
    """
    tracks = sorted({event.provider for event in events})
    made: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": name or "other"}}
        for i, name in enumerate(tracks)
    ]
    cursor = 0.0
    for event in events:
        start = cursor if in_turn else event.start
        cursor += event.duration
        arguments = {"node": event.name, "site": event.site, "run": event.run}
        track = tracks.index(event.provider)
        made.append(
            {"ph": "X", "pid": 1, "tid": track, "ts": start, "dur": event.duration, "name": event.operator}
            | {"cat": event.site.split(".")[0], "args": arguments}
        )
    return {"displayTimeUnit": "ms", "traceEvents": made}


def to_table(report: dict[str, Any]) -> str:
    """Time by operator class, engine by engine, then by site."""
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
