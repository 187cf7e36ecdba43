#!/usr/bin/env python3
"""Expected times of U-Nets and VAE decoders on AMD GPUs, from counted operations and bytes: results/amd/expected.json.

    scripts/amd/expected.py --write                                    # expected.json and expected.md
    scripts/amd/expected.py --compare results/amd/first_numbers_gfx1100 --target gfx1100 [--seconds 500]

Modules run on torch's meta device, so nothing is computed. A layer takes at least the larger of its operations at the
data sheet's matrix rate and its bytes (weights, input and output in float16) at the data sheet's bandwidth. The sum of
all layers is the roofline. A real call takes longer; by how much was measured for the same sources on an H200, and the
expected time is the card's roofline times that factor. The time of scripts/amd/first_numbers is the sum of what its
steps were measured to take elsewhere, by `first_numbers`. Nothing here was measured on an AMD GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sd_ort.checkpoints.presets import PRESETS
from sd_ort.core.files import read_json, write_json, write_text

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = ROOT / "results/amd/expected.json"
HALF = 2  # bytes


@dataclass(frozen=True)
class Card:
    """A GPU: its target, dense float16 matrix rate in TFLOP/s and memory bandwidth in GB/s, from AMD's data sheets."""

    target: str
    tflops: float
    gbs: float


CARDS = {
    "Radeon RX 6900 XT": Card("gfx1030", 46.1, 512),
    "Radeon RX 7900 XTX": Card("gfx1100", 122.8, 960),
    "Radeon RX 9070 XT": Card("gfx1201", 195, 640),
    "Radeon 8060S (Ryzen AI Max+ 395)": Card("gfx1151", 59.4, 256),
    "Instinct MI100": Card("gfx908", 184.6, 1229),
    "Instinct MI210": Card("gfx90a", 181, 1638),
    "Instinct MI300X": Card("gfx942", 1307, 5300),
    "Instinct MI355X": Card("gfx950", 2516, 8000),
}
H200 = Card("sm_90", 989, 4800)  # NVIDIA's data sheet, not an AMD card: the calls below were measured on it
# Call -> preset, component, rows, edge of the latent, and the result of our own provider on an H200.
CALLS = {
    "SD 1.5, a step with guidance at 512²": ("sd15", "unet", 2, 64, "sd15_unet_b2_64"),
    "SD 1.5, one row at 512²": ("sd15", "unet", 1, 64, None),
    "SD 1.5, VAE decoder, 512²": ("sd15", "vae_decoder", 1, 64, "sd15_vae_decoder_b1_64"),
    "SDXL, a step with guidance at 1024²": ("sdxl", "unet", 2, 128, "sdxl_unet_b2_128"),
}


# Folder of a benchmark of first_numbers -> the call it times. A U-Net's call has two rows, as with guidance.
MEASURED = {"sd15_unet": "SD 1.5, a step with guidance at 512²", "sd15_vae": "SD 1.5, VAE decoder, 512²"}
# Of scripts/amd/first_numbers: calls of a component, (1 warm-up + 3 runs) of 2, and images of the demo, 1 + 5.
COMPONENT_CALLS, DEMO_IMAGES = 8, 6
CORES = 8  # of the machine that first_numbers is promised for
# On two shared cores without a GPU: exporting and optimizing, by one process, and compiling, by a process a core.
PREPARING_S, COMPILING_S = 240, 300
REPLAY_S = 0.004  # kReplayMicroseconds of custom_ops/common/tuner.cc: a launch of a captured graph while tuning


@dataclass(frozen=True)
class Layer:
    """Operations and bytes of one layer."""

    operations: float
    bytes: float


def layers(preset: str, component: str, batch: int, edge: int) -> list[Layer]:
    """Return the layers of a call: convolutions, linear layers, normalizations and attentions."""
    import diffusers
    import torch

    config = PRESETS[preset].models["unet" if component == "unet" else "vae"]
    with torch.device("meta"), torch.no_grad():
        model = getattr(diffusers, config["_class_name"]).from_config(config)
        of_model: list[Layer] = []
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear | torch.nn.GroupNorm | torch.nn.LayerNorm):
                module.register_forward_hook(lambda *call: of_model.append(_of_layer(*call)))
        attention = torch.nn.functional.scaled_dot_product_attention

        def counted(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            of_model.append(_of_attention(query.shape, key.shape))
            return attention(query, key, value, *arguments, **options)

        torch.nn.functional.scaled_dot_product_attention = counted
        try:
            if component == "unet":
                states = torch.zeros(batch, 77, config["cross_attention_dim"])
                added = {"text_embeds": torch.zeros(batch, 1280), "time_ids": torch.zeros(batch, 6)}
                options = {"added_cond_kwargs": added} if "addition_time_embed_dim" in config else {}
                model(torch.zeros(batch, config["in_channels"], edge, edge), torch.zeros(1), states, **options)
            else:
                model.decode(torch.zeros(batch, config["latent_channels"], edge, edge))
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention
    return of_model


def _of_layer(module: torch.nn.Module, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> Layer:
    import torch

    weights = sum(parameter.numel() for parameter in module.parameters())
    operations = 0
    if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
        operations = 2 * output.numel() * prod(module.weight.shape[1:])
    return Layer(operations, HALF * (weights + inputs[0].numel() + output.numel()))


def _of_attention(query: Sequence[int], key: Sequence[int]) -> Layer:
    return Layer(4 * prod(query) * key[-2], HALF * (2 * prod(query) + 2 * prod(key)))


def roofline_ms(layers: Sequence[Layer], card: Card) -> float:
    """Return the least milliseconds of a call on a card."""
    return 1e3 * sum(max(each.operations / card.tflops / 1e12, each.bytes / card.gbs / 1e9) for each in layers)


def h200_factor(layers: Sequence[Layer], result: str) -> float:
    """Return measured time by roofline of our own provider on an H200."""
    rows = read_json(ROOT / f"results/gpu_provider/{result}.json")["rows"]
    measured: float = next(row["device_ms"] for row in rows if row["engine"] == "SdOrtCuda")
    return measured / roofline_ms(layers, H200)


def expected() -> dict[str, Any]:
    """Return the contents of results/amd/expected.json: each call's operations, bytes, and milliseconds by card.

    A call that was not measured on an H200 takes the factor of the one before.
    """
    calls, factor = {}, 0.0
    for name, (preset, component, batch, edge, result) in CALLS.items():
        of_call = layers(preset, component, batch, edge)
        factor = h200_factor(of_call, result) if result else factor
        rooflines = {title: roofline_ms(of_call, card) for title, card in CARDS.items()}
        calls[name] = {
            "tflop": round(sum(each.operations for each in of_call) / 1e12, 3),
            "gb": round(sum(each.bytes for each in of_call) / 1e9, 2),
            "factor": round(factor, 2),
            "roofline_ms": {title: round(ms, 1) for title, ms in rooflines.items()},
            "expected_ms": {title: round(ms * factor, 1) for title, ms in rooflines.items()},
        }
    seconds = {title: first_numbers(calls, title) for title in CARDS}
    return {"cards": {title: asdict(card) for title, card in CARDS.items()}, "calls": calls, "first_numbers": seconds}


def first_numbers(calls: Mapping[str, Any], card: str) -> dict[str, float]:
    """Return the expected seconds of each step of scripts/amd/first_numbers on a card, without the installation.

    Parts that a CPU does are those measured on two cores, which eight are not slower than.
    """
    step, decode = (calls[name] for name in MEASURED.values())
    cpu = read_json(ROOT / "results/cpu_unet_sd15.json")["rows"]
    raw, ours = (next(row for row in cpu if row["engine"] == engine) for engine in ("raw", "ours cpu"))
    demo = read_json(ROOT / "results/demo_cpu.json")["engines"]
    tuned = next(row for row in read_json(ROOT / "results/amd/hip.json")["rows"] if row["case"] == "first_numbers")
    parts = {
        "compile": COMPILING_S * 2 / CORES,
        "export and optimize": PREPARING_S,
        "open two components by three engines": 2 * (2 * raw["open_s"] + ours["open_s"]),
        "call raw ONNX, whose convolutions run on the CPU": COMPONENT_CALLS
        * median(raw["seconds"]["64"])
        * (1 + decode["tflop"] / step["tflop"]),
        "draw the demo, as on a CPU": DEMO_IMAGES * sum(row["image_s"]["median"] for row in demo),
        "search kernels": tuned["graph_launches"] * REPLAY_S,
        "call ours and torch, as if as fast, on the GPU": 2
        * COMPONENT_CALLS
        * (step["expected_ms"][card] + decode["expected_ms"][card])
        / 1e3,
    }
    return {name: round(seconds, 1) for name, seconds in parts.items()}


def page(report: Mapping[str, Any]) -> str:
    """Return results/amd/expected.md."""
    cards = " | ".join(f"{title} ({card['target']})" for title, card in report["cards"].items())
    lines = [
        "# Expected milliseconds on AMD GPUs", "",
        "**Nothing here was measured on an AMD GPU.** Roofline, and in bold the expected time: the roofline times what "
        "our kernels took of it on an H200. By `scripts/amd/expected.py`, which says how it counts.", "",
        f"| | TFLOP | GB | factor on an H200 | {cards} |", "|---|" + "---|" * (3 + len(report["cards"])),
    ]  # fmt: skip
    for name, call in report["calls"].items():
        times = (f"{call['roofline_ms'][title]:.1f}, **{call['expected_ms'][title]:.1f}**" for title in report["cards"])
        lines.append(
            f"| {name} | {call['tflop']:.3f} | {call['gb']:.2f} | {call['factor']:.2f} | {' | '.join(times)} |"
        )
    rates = " | ".join(f"{card['tflops']:g} TFLOP/s, {card['gbs']:g} GB/s" for card in report["cards"].values())
    lines += [f"| data sheet: dense float16, memory | | | | {rates} |", "", *NOTES, ""]
    titles = ("Radeon RX 7900 XTX", "Instinct MI300X")
    parts = {title: report["first_numbers"][title] for title in titles}
    lines += [*FIRST_NUMBERS, "", f"| first_numbers, s | {' | '.join(titles)} |", "|---|---|---|"]
    lines += [
        f"| {name} | {' | '.join(f'{parts[title][name]:.1f}' for title in titles)} |" for name in parts[titles[0]]
    ]
    lines.append(f"| **all of it** | {' | '.join(f'**{sum(parts[title].values()):.0f}**' for title in titles)} |")
    return "\n".join(lines) + "\n"


NOTES = (
    "Caches that hold activations between layers (Infinity Cache: 96 MB on the 7900 XTX, 64 MB on the 9070 XT, 256 MB "
    "on MI300X) lower the bytes; power limits lower the matrix rate, on laptops most. A measured time more than twice "
    "the expected one points at a fault and not at a slow card.",
    "",
    "gfx1030 has no matrix units: its rate is that of the vector units' dot products. hipBLASLt has no kernels for it: "
    "its linear layers run on the tile kernel of convolutions.",
)
FIRST_NUMBERS = (
    "`scripts/amd/first_numbers` promises ten minutes on eight cores when the packages are installed. Its parts, "
    "counted: what a CPU does took so long on two cores (scripts/amd/README.md, cpu_unet_sd15.md, demo_cpu.json), of "
    "which compiling uses all. The search launches as many graphs as the run on the simulated gfx1100 (hip.md), each "
    "for at most 4 ms.",
)


def compare(folder: Path, target: str, seconds: float | None = None) -> str:
    """Return a line for each call that `first_numbers` timed: its time, and the time expected of the target's cards.

    `seconds` of the whole run get a line too.
    """
    report = read_json(EXPECTED)
    cards = [title for title, card in report["cards"].items() if card["target"] == target]
    if not cards:
        targets = ", ".join(sorted({card["target"] for card in report["cards"].values()}))
        return f"No time is expected of {target}, only of {targets}."
    lines = []
    for result, name in MEASURED.items():
        path, call = folder / result / "benchmark.json", report["calls"][name]
        rows = read_json(path)["engines"] if path.is_file() else []
        rows = [row for row in rows if row.get("stage") == "optimize" and row["status"] == "ok" and row["batch"] == 1]
        if not rows:
            lines.append(f"{name}: not measured.")
        for row in rows:
            ms = row["step_ms"]["median"]
            for title in cards:
                expected_ms = call["expected_ms"][title]
                roofline = call["roofline_ms"][title]
                verdict = (
                    "less than the work takes, which points at a fault"
                    if ms < roofline
                    else "as expected"
                    if ms < 2 * expected_ms
                    else "more than twice that, which points at a fault"
                )
                lines.append(
                    f"{name}, {row['label']}: {ms:.1f} ms; expected of a {title} {expected_ms:.1f} ms, at least "
                    f"{roofline:.1f} ms: {verdict}."
                )
    if seconds is not None:
        expected_s = sum(report["first_numbers"][cards[0]].values())
        lines.append(f"first_numbers: {seconds:.0f} s; expected with eight cores and a {cards[0]} {expected_s:.0f} s.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/amd/expected.json and expected.md")
    parser.add_argument("--compare", type=Path, help="folder of first_numbers")
    parser.add_argument("--seconds", type=float, help="of the run that is compared")
    parser.add_argument("--target", default="gfx1100", help="its GPU [%(default)s]")
    options = parser.parse_args()
    if options.write:
        report = expected()
        write_json(EXPECTED, report)
        write_text(EXPECTED.with_suffix(".md"), page(report))
    if options.compare:
        print(compare(options.compare, options.target, options.seconds))


if __name__ == "__main__":
    main()
