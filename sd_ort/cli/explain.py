"""`sd-ort explain DIR`: what is fused, what is not, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

SCOPES_PER_REASON = 3  # scopes named for each reason; --all names every one


@click.command()
@click.argument("path", metavar="DIR|MODEL", type=click.Path(path_type=Path))
@click.option("--component", "components", multiple=True, help="Only this component; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="List every site, the fused ones too.")
@click.option(
    "--provider",
    help="Which nodes a provider leaves, and why: hip, sdcuda, plugin:PATH of ours (opens the graphs), or rocm.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all sites and counts as JSON.")
def command(path: Path, components: tuple[str, ...], everything: bool, provider: str | None, as_json: bool) -> None:
    """Say for every site, by module, whether it is fused, and why not.

    DIR is an exported or an optimized pipeline folder, MODEL any .onnx file. What an optimized folder was made from is
    read from its manifest.
    """
    from sd_ort.inspect.explain import explain

    result = explain(path, list(components) or None, provider)
    if as_json:
        click.echo(json.dumps(result, indent=1))
        return
    for name, entry in result["components"].items():
        click.echo(
            "\n".join([name, *histogram(entry), *(every_site(entry) if everything else unfused_lines(entry)), ""])
        )


def histogram(entry: dict[str, Any]) -> list[str]:
    """Operators before and after, most frequent first."""
    before, after = entry["before"], entry["after"]
    lines = [f"  {'operator':36}{'before':>8}{'after':>8}"]
    for op in sorted(before.keys() | after.keys(), key=lambda op: (-max(before.get(op, 0), after.get(op, 0)), op)):
        lines.append(f"  {op:36}{before.get(op, 0):>8}{after.get(op, 0):>8}")
    lines.append(f"  {'all':36}{sum(before.values()):>8}{sum(after.values()):>8}")
    return lines + [f"  {reason}" for reason in entry.get("kernel_fallbacks", ())]


def unfused_lines(entry: dict[str, Any]) -> list[str]:
    """Return the number of fused sites, and the unfused ones by operator and reason."""
    lines = ["  fused: " + (", ".join(f"{count} {op}" for op, count in entry["fused"].items()) or "nothing")]
    unfused = [site for site in entry["sites"] if not site["fused"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for site in unfused:  # what follows the colon is each site's own
        groups.setdefault((site["op"], site["reason"].partition(": ")[0]), []).append(site)
    for (op, _), alike in sorted(groups.items(), key=lambda group: -len(group[1])):
        named = some(site["scope"] or site["value"] for site in alike)
        lines.append(f"  left: {len(alike)} {op}: {alike[0]['reason']} ({named})")
    return lines + list(lowering_lines(entry)) + list(placement_lines(entry))


def some(names: Iterable[str], limit: int = SCOPES_PER_REASON) -> str:
    """The first of the names, each once."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:limit]) + (", ..." if len(distinct) > limit else "")


def lowering_lines(entry: dict[str, Any]) -> Iterator[str]:
    """Return the rewrites of each pass of the target, and its rejections by reason."""
    for name, outcome in entry["lowered"].items():
        counts = {"rewritten" if key == name else key: count for key, count in outcome["rewrote"].items() if count}
        rewrote = ", ".join(f"{count} {key}" for key, count in counts.items())
        yield f"  {name}: {rewrote or 'nothing to rewrite'}"
        for (op, reason), count in Counter((site["op"], site["reason"]) for site in outcome["unfused"]).most_common():
            yield f"    left: {count} {op}: {reason}"


def placement_lines(entry: dict[str, Any], limit: int = SCOPES_PER_REASON) -> Iterator[str]:
    """Return the number of nodes per execution provider, and the operators that ours rejects, by reason."""
    if (placement := entry.get("placement")) is None:
        return
    yield f"  with {placement['provider']}: " + ", ".join(
        f"{count} nodes on {ep}" for ep, count in placement["nodes"].items()
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for node in placement["unassigned_nodes"]:
        groups.setdefault((node["op"], node["reason"]), []).append(node["scope"] or node["node"])
    for (op, reason), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        names_ = some(filter(None, names), limit)
        yield f"    left: {len(names)} {op}: {reason}" + (f" ({names_})" if names_ else "")


def every_site(entry: dict[str, Any]) -> list[str]:
    """Return one line per site, and one per rejection of a pass of the target."""
    lines = [
        f"  {site['op']:28}{site['scope'] or site['value']}{'' if site['fused'] else '  LEFT: ' + site['reason']}"
        for site in entry["sites"]
    ]
    return (
        lines
        + [
            f"  {site['op']:28}{site['scope'] or site['value']}  {name}: {site['reason']}"
            for name, outcome in entry["lowered"].items()
            for site in outcome["unfused"]
        ]
        + list(placement_lines(entry, limit=1 << 30))
    )
