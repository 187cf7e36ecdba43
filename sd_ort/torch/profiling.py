"""`profile`: the time of one call by operator (of sd_ort or of torch) and by module."""

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
from sd_ort.torch.operators.registration import FALLBACK_SUFFIX
from sd_ort.torch.replace import components

_MODULE = "module: "


@dataclass(frozen=True)
class Row:
    """An operator or a module in a profile, with its calls and its own time.

    kind: of an operator, "ours" (a kernel of sd_ort) or "torch"; of a module, its class.
    milliseconds: of a module, without the modules inside it.
    """

    name: str
    kind: str
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """The profile of one call. clock: the measured time, "GPU kernels" or "CPU operators". result: of the call."""

    clock: str
    operators: tuple[Row, ...]
    modules: tuple[Row, ...]
    result: Any

    @property
    def milliseconds(self) -> float:
        """The time of all operators."""
        return sum(row.milliseconds for row in self.operators)

    def table(self, rows: int = 15) -> str:
        """Return the slowest operators and modules as text."""
        kernel_ms = sum(row.milliseconds for row in self.operators if row.kind == "ours")
        lines = [f"{self.milliseconds:.2f} ms of {self.clock}, {kernel_ms:.2f} ms of these in sd_ort kernels", ""]
        for title, entries in (("operator", self.operators), ("module", self.modules)):
            lines.append(f"{'ms':>10} {'share':>6} {'calls':>6}  {title}")
            for row in entries[:rows]:
                share = row.milliseconds / max(self.milliseconds, 1e-9)
                lines.append(f"{row.milliseconds:10.3f} {share:6.1%} {row.calls:6}  {row.name} ({row.kind})")
            lines.append("")
        return "\n".join(lines)

    __str__ = table


def profile(target: Any, *arguments: Any, trace: Path | str | None = None, **keywords: Any) -> Profile:
    """Run `target(*arguments, **keywords)`, a diffusers pipeline or a torch module, once under torch's profiler.

    Call the target once before: first calls compile, tune and allocate. The time of an operator includes the operators
    that it calls. An sd_ort operator that ran its torch fallback counts as torch's. A layer that is part of a fused
    operator is not called: its time is that of the module around it. Modules inside a compiled module do not appear.

    trace: file to write for chrome://tracing or Perfetto. Raises InputError for a target without modules, OutputError
    if `trace` cannot be written.
    """
    names: dict[int, tuple[str, nn.Module]] = {}
    for component in components(target):
        names |= {id(m): (f"{type(component).__name__}.{n}".rstrip("."), m) for n, m in component.named_modules()}
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    ranges = _module_ranges({key: name for key, (name, _) in names.items()})
    with torch.profiler.profile(activities=activities) as profiler, ranges:
        result = target(*arguments, **keywords)
        if on_gpu:
            torch.cuda.synchronize()
    if trace is not None:
        try:
            Path(trace).touch()
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            raise OutputError(f"Cannot write {trace}: {error}") from error
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CPU]
    on_gpu = on_gpu and any(event.self_device_time_total for event in events)
    classes = {name: type(module).__name__ for name, module in names.values()}
    operators, modules = _rows(events, on_gpu, classes)
    return Profile("GPU kernels" if on_gpu else "CPU operators", operators, modules, result)


@contextmanager
def _module_ranges(names: dict[int, str]) -> Iterator[None]:
    """Record every call of a module as a profiler range. `names`: id of a module -> name.

    The hooks are global: hooks of a module would change how it runs.
    """
    open_ranges: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        module_range = torch.profiler.record_function(_MODULE + names.get(id(module), type(module).__name__))
        open_ranges.append(module_range)
        module_range.__enter__()

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(
    events: list[FunctionEvent], on_gpu: bool, classes: dict[str, str]
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the rows of operators and of modules, slowest first. The own time of an event counts for one of each."""
    operator_ms: defaultdict[str, float] = defaultdict(float)
    module_ms: defaultdict[str, float] = defaultdict(float)
    operator_calls: Counter[str] = Counter()
    module_calls: Counter[str] = Counter()
    for event in events:
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if event.name.startswith(_MODULE):
            module_calls[event.name] += 1
            module_ms[event.name] += own if on_gpu else 0.0
            continue
        operator, module = _operator_and_module(event)
        operator_ms[operator.name] += own
        module_ms[module] += own
        operator_calls[operator.name] += operator is event
    operators = []
    for name, ms in sorted(operator_ms.items(), key=lambda item: -item[1]):
        is_ours = name.startswith("sd_ort::") and FALLBACK_SUFFIX not in name
        if ms:
            operators.append(Row(name, "ours" if is_ours else "torch", operator_calls[name], ms))
    modules = []
    for name, ms in sorted(module_ms.items(), key=lambda item: -item[1]):
        short = name.removeprefix(_MODULE)
        modules.append(Row(short, classes.get(short, "outside of modules"), module_calls[name], ms))
    return tuple(operators), tuple(modules)


def _operator_and_module(event: FunctionEvent) -> tuple[FunctionEvent, str]:
    """Return the outermost operator that contains an event within its module, and the name of that module.

    A fallback is an operator of its own.
    """
    operator, parent = event, event.cpu_parent
    while parent is not None and not parent.name.startswith(_MODULE):
        if FALLBACK_SUFFIX not in operator.name:
            operator = parent
        parent = parent.cpu_parent
    return operator, parent.name if parent is not None else "the call"
