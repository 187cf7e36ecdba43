#!/usr/bin/env python3
"""First choices of tiles on AMD cards beside a roofline: results/amd/first_choices.json and .md.

    python scripts/amd/first_choices.py wheel/libsd_ort_hip.so     # of a wheel by scripts/build_wheels --hip, unpacked

The library is asked under scripts/amd/simulate which candidate it takes without tuning, for the convolutions and
attentions of Stable Diffusion. It knows the card's multiprocessors: CDNA's compute units, RDNA's pairs of them. Blocks
are counted from that answer, and their registers and LDS are those of results/amd/resources_wheel.md.

A call of B blocks on M multiprocessors takes at least ceil(B / M) times the operations of a block at a multiprocessor's
share of the card's matrix rate, and its bytes at the card's bandwidth. Splits of a sum write and read float32 sums
besides. Latency is left out, which a second block on a multiprocessor hides. Nothing was measured on an AMD GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from custom_ops.amd_targets import WHEEL_TARGETS, covers
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import OperatorCase, load
from scripts.amd.expected import CARDS, HALF, Card
from scripts.amd.simulated_runs import ROOT, Simulation
from sd_ort.core.files import write_json, write_text
from sd_ort.runtime import machine

OUT = ROOT / "results/amd/first_choices.json"
MULTIPROCESSORS = 63  # hipDeviceAttributeMultiprocessorCount
ADDRESS = 4096  # of every buffer: nothing is read
# Of operators/nhwc_conv/op.h and launch_config.cc: pixels and filters of a block, depth of a step, least steps of a
# split and most splits.
PIXELS, FILTERS, DEPTH, STEPS_PER_SPLIT, MOST_SPLITS = 128, 64, 32, 16, 16
# Of operators/multi_head_attention/kernels/tiles.h: candidate -> queries of a block, for heads of up to LARGEST_HEAD.
QUERIES = {"large_tiles": 128, "small_tiles": 64}
LARGEST_HEAD = 128
# Kernels whose registers and LDS are shown, in float16: title -> name in resources_wheel.md, threads of a block.
KERNELS = {
    "convolution": ("nhwc_conv_tiles_kernel<_Float16, _Float16, 8, false>", 256),
    "attention, heads of 64": ("flash_attention_kernel<_Float16, 64, 128, 64, 256>", 256),
}


def cases(folder: str) -> list[OperatorCase]:
    """Return the calls of Stable Diffusion that are asked for: those of an operator's benchmark, without Winograd's."""
    return [case for case in load(folder).cases if case.benchmark and "transformed_filters" not in case.inputs]


def ask(library: Path) -> dict[str, Any]:
    """Return the multiprocessors of the current device, and the candidate and workspace bytes of each call."""
    count = ctypes.c_int()
    assert ctypes.CDLL("libamdhip64.so.7").hipDeviceGetAttribute(ctypes.byref(count), MULTIPROCESSORS, 0) == 0
    opened, choices = GpuLibrary(library), {}
    for folder in ("nhwc_conv", "multi_head_attention"):
        operator = load(folder)
        for case in cases(folder):
            names = (*case.inputs, *operator.output_shapes(case))
            params = operator.params(case, "float16", dict.fromkeys(names, ADDRESS))
            index = opened.operator(operator.name, params)
            choice = opened.default_candidate(index, params)
            size = opened.workspace_bytes(index, choice, params)
            choices[f"{folder} {case.name}"] = [opened.candidates(index)[choice], size]
    return {"multiprocessors": count.value, "choices": choices}


class Convolution:
    """Sizes of a convolution's call as the tile kernel splits it."""

    def __init__(self, case: OperatorCase) -> None:
        x, filters = case.inputs["X"], case.inputs["W"]
        (y,) = load("nhwc_conv").output_shapes(case).values()
        self.depth = prod(filters[1:])
        self.blocks = ceil(prod(y[:3]) / PIXELS) * ceil(y[3] / FILTERS)
        self.elements = prod(y)
        self.bytes = HALF * (prod(x) + prod(filters) + prod(y) * (2 if "skip" in case.inputs else 1))
        self.most_splits = max(1, min(ceil(self.depth / DEPTH) // STEPS_PER_SPLIT, MOST_SPLITS))

    def microseconds(self, splits: int, card: Card, multiprocessors: int) -> float:
        """Return the least time of a call on a card."""
        depth = ceil(ceil(self.depth / splits) / DEPTH) * DEPTH
        rounds = ceil(self.blocks * splits / multiprocessors)
        multiply = rounds * 2 * PIXELS * FILTERS * depth / (card.tflops * 1e6 / multiprocessors)
        sums = 0 if splits == 1 else 2 * 4 * splits * self.elements
        return max(multiply, self.bytes / (card.gbs * 1e3)) + sums / (card.gbs * 1e3)

    def splits(self, candidate: str, workspace: int) -> int:
        """Return the number of splits of a candidate by the size of its workspace, which holds each split's sums."""
        return max(1, workspace // (4 * self.elements)) if candidate == "split_tiles" else 1


def convolutions(answer: Mapping[str, Any], card: Card) -> dict[str, dict[str, Any]]:
    """Return for each convolution its blocks, the splits that the library takes, and the roofline's microseconds.

    These are for the splits that it takes, for the fastest number of splits, and for one.
    """
    choices = {}
    for case in cases("nhwc_conv"):
        call = Convolution(case)
        splits = call.splits(*answer["choices"][f"nhwc_conv {case.name}"])
        times = {n: call.microseconds(n, card, answer["multiprocessors"]) for n in range(1, call.most_splits + 1)}
        choices[case.name] = {
            "blocks": call.blocks,
            "splits": splits,
            "first_us": round(times[splits], 2),
            "best_us": round(min(times.values()), 2),
            "unsplit_us": round(times[1], 2),
        }
    return choices


def attentions(answer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each attention its kernel, its blocks, and the share of the time in which they fill the card."""
    choices = {}
    for case in cases("multi_head_attention"):
        choice, _ = answer["choices"][f"multi_head_attention {case.name}"]
        batch, sequence, *sizes = case.inputs["query"]
        heads = int(case.attributes["num_heads"])
        head = sizes[-1] if len(sizes) > 1 else sizes[0] // heads
        if choice not in QUERIES or head > LARGEST_HEAD:
            continue
        blocks = batch * heads * ceil(sequence / QUERIES[choice])
        rounds = ceil(blocks / answer["multiprocessors"])
        choices[case.name] = {
            "choice": choice,
            "blocks": blocks,
            "busy": round(blocks / (rounds * answer["multiprocessors"]), 3),
        }
    return choices


def resident_blocks(kernel: str, threads: int, target: str) -> int:
    """Return the blocks of a kernel that a multiprocessor of a target holds at a time, by registers and LDS."""
    lines = (ROOT / "results/amd/resources_wheel.md").read_text().splitlines()
    row, head = (
        next(line.split(" | ") for line in lines if line.startswith(f"| {name} ")) for name in (kernel, "kernel")
    )
    in_wheel = next(name for name in WHEEL_TARGETS if covers([name], target))
    cell = row[[re.sub(r"\W+$", "", name) for name in head].index(in_wheel)]
    _, _, lds, _, waves = (int(part) for part in re.findall(r"\d+", cell))
    is_rdna = target.startswith("gfx1")
    memory = (128 if is_rdna else 160 if target == "gfx950" else 64) << 10
    simds = 4  # of a compute unit of CDNA, of a pair of them of RDNA
    return min(waves * simds // (threads // (32 if is_rdna else 64)), memory // lds)


def of_card(card: Card, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a card in results/amd/first_choices.json."""
    return {
        "target": card.target,
        "multiprocessors": answer["multiprocessors"],
        "resident_blocks": {title: resident_blocks(*kernel, card.target) for title, kernel in KERNELS.items()},
        "convolutions": convolutions(answer, card),
        "attentions": attentions(answer),
    }


def page(report: Mapping[str, Any]) -> str:
    """Return results/amd/first_choices.md."""
    head = ["card", "multiprocessors", *(f"blocks of {title}" for title in KERNELS)]
    head += ["us of all convolutions: first choice", "best splits", "no splits", "worst call", "attention"]
    lines = ["# First choices on AMD cards", "", *INTRODUCTION, "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for title, card in report["cards"].items():
        calls, attention = card["convolutions"], card["attentions"].values()
        sums = [sum(call[key] for call in calls.values()) for key in ("first_us", "best_us", "unsplit_us")]
        worst = max(calls, key=lambda name: calls[name]["first_us"] / calls[name]["best_us"])
        ratio = calls[worst]["first_us"] / calls[worst]["best_us"]
        large = [call["busy"] for call in attention if call["choice"] == "large_tiles"]
        small = sum(call["choice"] == "small_tiles" for call in attention)
        cells = [
            f"{title} ({card['target']})", card["multiprocessors"], *card["resident_blocks"].values(),
            *(f"{us:.0f}" for us in sums), f"{ratio:.2f}: {worst.partition('-b')[0]}",
            f"{len(large)} by {small}, {min(large, default=1):.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *NOTES, "", f"Commit {report['commit']}."]
    return "\n".join(lines) + "\n"


INTRODUCTION = (
    "**Nothing here was measured on an AMD GPU.** What the wheel's library takes without tuning, asked on each",
    "simulated card, beside a roofline. By `scripts/amd/first_choices.py`, which says how it counts. Blocks: those",
    "that a multiprocessor holds at a time, by registers and LDS. Worst call: how much longer than the best splits",
    "its first choice takes. Attention: calls with large tiles and with small ones, and the least share of the time",
    "in which large tiles keep all multiprocessors busy.",
)
NOTES = (
    "A convolution's sum is split until two blocks are on each multiprocessor, which holds at least as many: the",
    "second hides the latency of the first, which the roofline does not count. What a first choice takes beyond the",
    "best splits is the traffic of float32 sums at the memory's bandwidth. They have at most 64 KB a multiprocessor,",
    "20 MB on MI300X, and stay in the Infinity Cache of the cards that have one. Attention takes large tiles from",
    "three blocks on each multiprocessor on, so that the last round costs at most a quarter.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="libsd_ort_hip.so, beside libsd_ort_ep_hip.so")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)  # under scripts/amd/simulate
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(options.library.absolute())))
        return
    report: dict[str, Any] = {"commit": machine.commit(), "cards": {}}
    for title, card in CARDS.items():
        if card.target != "gfx908":  # which is not simulated
            answer = ask_on_simulated_card(options.library, card.target, ROOT / "out/first_choices")
            report["cards"][title] = of_card(card, answer)
    write_json(OUT, report)
    write_text(OUT.with_suffix(".md"), page(report))


def ask_on_simulated_card(library: Path, target: str, folder: Path) -> dict[str, Any]:
    """Run `ask` on a simulated card and return its result. Raises SystemExit with the faults if it fails."""
    simulation = Simulation(target, folder, ("--kernels", "skip"), {"SD_ORT_TUNING": str(folder / "tuning")})
    run = simulation.run(target, [sys.executable, Path(__file__), library.absolute(), "--ask"])
    if run.faults:
        raise SystemExit("; ".join(run.faults))
    answer: dict[str, Any] = json.loads(run.output.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
