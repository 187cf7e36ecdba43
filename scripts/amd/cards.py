#!/usr/bin/env python3
"""Write results/amd/cards.md: a table of AMD's cards with the runs, expected times and measurements of each target.

    scripts/amd/cards.py

Everything but the names of cards is read: the targets of the wheel, the tables of registers, operators and commands,
the expected times, and folders of first_numbers. Run it again after any of these changed; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from custom_ops.amd_targets import TARGETS, WHEEL_TARGETS, covers
from sd_ort.core.files import write_text

ROOT = Path(__file__).resolve().parents[2]
CALL = "SD 1.5, a step with guidance at 512²"
# Cards of each target, by AMD's names; those of gfx1153 have none yet.
CARDS = {
    "gfx908": "Instinct MI100",
    "gfx90a": "Instinct MI210, MI250, MI250X",
    "gfx942": "Instinct MI300A, MI300X, MI325X",
    "gfx950": "Instinct MI350X, MI355X",
    "gfx1030": "Radeon RX 6950 XT, 6900 XT, 6800 XT, 6800, PRO W6800",
    "gfx1031": "Radeon RX 6750 XT, 6700 XT",
    "gfx1032": "Radeon RX 6650 XT, 6600 XT, 6600, PRO W6600",
    "gfx1033": "Steam Deck",
    "gfx1034": "Radeon RX 6500 XT, 6400",
    "gfx1035": "Radeon 680M, 660M",
    "gfx1036": "graphics of Ryzen 7000 and 9000 for desktops",
    "gfx1100": "Radeon RX 7900 XTX, 7900 XT, 7900 GRE, PRO W7900, W7800",
    "gfx1101": "Radeon RX 7800 XT, 7700 XT, PRO W7700",
    "gfx1102": "Radeon RX 7600, 7600 XT",
    "gfx1103": "Radeon 780M, 760M",
    "gfx1150": "Radeon 890M, 880M",
    "gfx1151": "Radeon 8060S, 8050S, 8040S",
    "gfx1152": "Radeon 860M, 840M",
    "gfx1200": "Radeon RX 9060 XT, 9060",
    "gfx1201": "Radeon RX 9070 XT, 9070, AI PRO R9700",
}
# Targets without kernels and their cards. They have neither matrix instructions nor RDNA2's dot products
# (custom_ops/common/mma.h); a build for them ends with an error.
UNSUPPORTED = {"gfx1010 to gfx1012": "Radeon RX 5000", "gfx906": "Radeon VII, Instinct MI50"}


def main() -> None:
    write_text(ROOT / "results/amd/cards.md", page())


def page() -> str:
    """Return results/amd/cards.md."""
    compiled, expected = _compiled(), _expected()
    lines = [
        "# AMD cards",
        "",
        "**No AMD GPU was ever used.** *Simulated* is `scripts/amd/simulate`: the machine code of the target in an",
        "emulator. Expected is a step of SD 1.5 with guidance at 512² in float16, from [counted operations and",
        "bytes](expected.md). By `scripts/amd/cards.py`.",
        "",
        "| target | cards | kernels in the wheel | compiled | operators, simulated | commands, simulated "
        "| expected, ms | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target, cards in CARDS.items():
        in_wheel = next((name for name in WHEEL_TARGETS if covers([name], target)), "no: `build-ops`")
        cells = (
            target,
            cards,
            in_wheel,
            "yes" if target in compiled else "never",
            _operators(target),
            _commands(target),
            expected.get(target, ""),
            "yes" if (ROOT / f"results/amd/first_numbers_{target}").is_dir() else "nothing",
        )
        lines.append(f"| {' | '.join(cells)} |")
    others = [
        f"| {target} | {cards} | none: no matrix instructions | never | never | never | | nothing |"
        for target, cards in UNSUPPORTED.items()
    ]
    return "\n".join([*lines, *others]) + "\n"


def _compiled() -> set[str]:
    """Return the targets that are compiled: by the wheel, or for a table of register use in results/."""
    exact: set[str] = set()
    for path in (ROOT / "results/ops_amd_resources.md", *ROOT.glob("results/amd/resources_*.md")):
        heading = next(line for line in path.read_text().splitlines() if line.startswith("| kernel |"))
        exact |= set(re.findall(r"gfx\w+", heading))
    return exact | {target for target in TARGETS if covers(WHEEL_TARGETS, target)}


def _operators(target: str) -> str:
    """Return the runs and faults of all candidates of all operators on a target.

    No emulator has the instructions of RDNA2: its entry is of the matrix multiplications, emulated as gfx1100.
    """
    path, prefix = ROOT / f"results/amd/operators_{target}.txt", ""
    if covers(["gfx10-3-generic"], target):
        path, prefix = ROOT / "results/amd/dot_products.txt", "products, as gfx1100: "
    if not path.is_file():
        return "never"
    counts = re.findall(r"(\d+) runs, +\d+ candidates, (\d+) faults", path.read_text())
    runs, faults = (sum(int(match[index]) for match in counts) for index in (0, 1))
    return f"{prefix}[{runs:,} runs, {faults} faults]({path.name})"


def _commands(target: str) -> str:
    """Return the tables whose commands all ran on a target."""
    names = []
    for name in ("hip", "rocm"):
        rows = json.loads((ROOT / f"results/amd/{name}.json").read_text())["rows"]
        rows = [row for row in rows if row["target"] == target and row.get("verdict") != "not run"]
        if rows:
            failed = sum(bool(row["status"] or row["faults"]) for row in rows)
            names.append(f"[{name}]({name}.md): {len(rows)}" + (f", {failed} failed" if failed else ""))
    return ", ".join(names) or "never"


def _expected() -> dict[str, str]:
    """Return the expected milliseconds of a target's card, from results/amd/expected.json."""
    report = json.loads((ROOT / "results/amd/expected.json").read_text())
    times = report["calls"][CALL]["expected_ms"]
    return {card["target"]: f"{times[title]} ({title.split(' (')[0]})" for title, card in report["cards"].items()}


if __name__ == "__main__":
    main()
