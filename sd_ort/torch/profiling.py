"""`profile`: where a call's time goes, by operator, ours or torch's, and by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sd_ort.core.errors import OutputError
from sd_ort.torch.operators.contract import BY_TORCH
from sd_ort.torch.replace import components

_MODULE = "module: "


@dataclass(frozen=True)
class Row:
    """An operator or a module: how often it ran, and milliseconds of its own (modules: without those inside it)."""

    name: str
    kind: str  # of an operator, "ours" or "torch"; of a module, its class
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """One call. `clock` says what the milliseconds are: of the GPU's kernels, or of the CPU's operators."""

    clock: str
    operators: tuple[Row, ...]
    modules: tuple[Row, ...]
    result: Any

    @property
    def milliseconds(self) -> float:
        """Of all operators."""
        return sum(row.milliseconds for row in self.operators)

    def table(self, rows: int = 15) -> str:
        """The longest operators and modules as text."""
        ours = sum(row.milliseconds for row in self.operators if row.kind == "ours")
        lines = [f"{self.milliseconds:.2f} ms of {self.clock}, {ours:.2f} in our operators", ""]
        for title, found in (("operator", self.operators), ("module", self.modules)):
            lines.append(f"{'ms':>10} {'share':>6} {'calls':>6}  {title}")
            for row in found[:rows]:
                share = row.milliseconds / max(self.milliseconds, 1e-9)
                lines.append(f"{row.milliseconds:10.3f} {share:6.1%} {row.calls:6}  {row.name} ({row.kind})")
            lines.append("")
        return "\n".join(lines)

    __str__ = table


def profile(target: Any, *arguments: Any, trace: Path | str | None = None, **keywords: Any) -> Profile:
    """Runs `target(*arguments, **keywords)` once under torch's profiler: a diffusers pipeline, or a torch module.

    Call it once before: first calls compile, tune and allocate. `trace` is a file for chrome://tracing or Perfetto. An
    operator's time holds what it calls; an operator of ours that fell back counts as torch's. Layers whose work one of
    our operators does are not called: their time is that of the module around them. A compiled module's inner modules
    are not seen. Raises InputError for a target without modules, OutputError when `trace` cannot be written.
    """
    names: dict[int, tuple[str, nn.Module]] = {}
    for component in components(target):
        names |= {id(m): (f"{type(component).__name__}.{n}".rstrip("."), m) for n, m in component.named_modules()}
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities) as profiler, _scopes({key: n for key, (n, _) in names.items()}):
        result = target(*arguments, **keywords)
        if on_gpu:
            torch.cuda.synchronize()
    if trace is not None:
        try:
            Path(trace).touch()
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise OutputError(f"cannot write {trace}: {error}") from error
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CPU]
    on_gpu = on_gpu and any(event.self_device_time_total for event in events)
    kinds = {name: type(module).__name__ for name, module in names.values()}
    operators, modules = _rows(events, on_gpu, kinds)
    return Profile("GPU kernels" if on_gpu else "CPU operators", operators, modules, result)


@contextmanager
def _scopes(names: dict[int, str]) -> Iterator[None]:
    """Every call of these modules as a range of the profiler. Global hooks: a module's own would change what runs."""
    open_ranges: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        opened = torch.profiler.record_function(_MODULE + names.get(id(module), type(module).__name__))
        open_ranges.append(opened)
        opened.__enter__()

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(events: list[FunctionEvent], on_gpu: bool, kinds: dict[str, str]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Rows of operators and modules, the longest first. Every event's own time belongs to one of each."""
    times: dict[bool, defaultdict[str, float]] = {
        True: defaultdict(float),
        False: defaultdict(float),
    }  # of modules, of operators
    calls: dict[bool, Counter[str]] = defaultdict(Counter)
    for event in events:
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if event.name.startswith(_MODULE):
            calls[True][event.name] += 1
            times[True][event.name] += own if on_gpu else 0.0
            continue
        operator, module = _places(event)
        times[False][operator.name] += own
        times[True][module] += own
        calls[False][operator.name] += operator is event
    operators = [
        Row(name, "ours" if name.startswith("sd_ort::") and BY_TORCH not in name else "torch", calls[False][name], ms)
        for name, ms in sorted(times[False].items(), key=lambda item: -item[1])
        if ms
    ]
    modules = []
    for name, ms in sorted(times[True].items(), key=lambda item: -item[1]):
        short = name.removeprefix(_MODULE)
        modules.append(Row(short, kinds.get(short, "outside of modules"), calls[True][name], ms))
    return tuple(operators), tuple(modules)


def _places(event: FunctionEvent) -> tuple[FunctionEvent, str]:
    """The outermost operator that an event is part of, below its module; and that module. A fallback is its own."""
    operator, at = event, event.cpu_parent
    while at is not None and not at.name.startswith(_MODULE):
        if BY_TORCH not in operator.name:
            operator = at
        at = at.cpu_parent
    return operator, at.name if at is not None else "the call"
