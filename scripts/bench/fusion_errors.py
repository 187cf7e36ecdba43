"""Fused against unfused: the error of every component of every family, at two shapes, in each precision.

    python scripts/bench/fusion_errors.py EXPORT... [--dtypes float32 float16 bfloat16] [--target cuda] [--resume]

EXPORT are folders of `sd-ort export` (tiny presets have random, distinct, non-zero weights). Each is optimized and
compared with itself unfused and in float32 on made-up inputs (`sd-ort verify`; two batches and aspect ratios); GPU
operators run as the function bodies that say what they mean, half precision is rounded behind every operator. Beside
an error in half precision stands that of the same graph in half precision with nothing fused. Writes
results/fusion_errors.{json,md}; exits with 1 when an error exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.compare_fusion import measured_with
from sd_ort.benchmark.engine_builds import ablation_steps
from sd_ort.core import pipeline_folder
from sd_ort.inspect.verify import verify
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.stages import optimize

RESULTS = Path(__file__).resolve().parents[2] / "results"
KEYS = ("export", "component", "target", "dtype")


def errors(source: Path, component: str, target: str, dtype: str, work: Path) -> dict[str, Any]:
    """The row of one component: worst relative error, largest absolute one, shapes, and what stayed in float32."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        out = Path(scratch) / source.name
        entry = optimize(source, out, target=target, dtype=dtype, components=[component])["components"][component]
        result = verify(source, out, components=[component], library=False)
        unfused = None
        if dtype != "float32":
            bare = Path(scratch) / "unfused"
            shutil.copytree(
                out, bare, ignore=shutil.ignore_patterns(pipeline_folder.MANIFEST, f"{pipeline_folder.MODEL}*")
            )
            nothing_fused = ablation_steps(TARGETS[target])["none"]
            optimize_component(
                source / component / pipeline_folder.MODEL,
                bare / component / pipeline_folder.MODEL,
                nothing_fused,
                dtype,
            )
            unfused = verify(source, bare, components=[component], library=False)["rows"]
    rows = result["rows"]
    sites = entry.get("float32_sites", [])
    return {
        "relative_error": max(row["relative_error"] for row in rows),
        "unfused_relative_error": unfused and max(row["relative_error"] for row in unfused),
        "nmse": max(row["nmse"] for row in rows),
        "max_abs": max(row["max_abs"] for row in rows),
        "finite": all(row["finite"] for row in rows),
        "tolerance": rows[0]["tolerance"],
        "passed": result["passed"],
        "runs": sorted({row["run"] for row in rows}),
        "outputs": sorted({row["output"] for row in rows}),
        "float32_sites": len(sites),
        "largest": max((site["max_abs"] for site in sites), default=None),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown: a row per component of an export, a column per precision."""
    about, rows = result["machine"], result["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    limits = {row["dtype"]: row["tolerance"] for row in rows}
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"Written at commit {about['commit']} by `scripts/bench/fusion_errors.py`; {versions}.",
        "",
        "Largest relative error |fused - unfused| / |unfused| (L2 norms) over all outputs and two shapes ("
        + "; ".join(rows[0]["runs"])
        + "), the unfused component in float32 on the CPU. Allowed: "
        + ", ".join(f"{dtype} {limits[dtype]:.1e}" for dtype in dtypes)
        + ". In brackets: the same graph in the same half precision with nothing fused.",
        "",
        "| export | component | target | " + " | ".join(dtypes) + " |",
        "|---" * (3 + len(dtypes)) + "|",
    ]
    keys = dict.fromkeys(tuple(row[key] for key in KEYS[:3]) for row in rows)
    for key in keys:
        mine = {row["dtype"]: row for row in rows if tuple(row[k] for k in KEYS[:3]) == key}
        cells = [cell(mine[dtype]) if dtype in mine else "" for dtype in dtypes]
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any]) -> str:
    """An error, that with nothing fused, and what stayed in float32."""
    beside = f" ({row['unfused_relative_error']:.1e})" if row["unfused_relative_error"] is not None else ""
    float32_sites = (
        f" ({row['float32_sites']} values up to {row['largest']:.0f} in float32)" if row["float32_sites"] else ""
    )
    return f"{row['relative_error']:.1e}{beside}{'' if row['passed'] else ' FAILED'}{float32_sites}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path)
    parser.add_argument("--dtypes", nargs="*", help="precisions (all that the target has)")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--work", type=Path, help="where optimized folders are put for a moment")
    parser.add_argument("--resume", action="store_true", help="keep the rows there are")
    options = parser.parse_args()
    options.dtypes = options.dtypes or TARGETS[options.target].dtypes
    path = RESULTS / "fusion_errors.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if options.resume and path.is_file() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for source in options.exports:
        for component in pipeline_folder.components(source):
            for dtype in options.dtypes:
                key = (source.name, component, options.target, dtype)
                if key not in done:
                    row = errors(source, component, options.target, dtype, options.work)
                    rows.append({**dict(zip(KEYS, key, strict=True)), **row})
                    print(json.dumps(rows[-1]), flush=True)
                    write(path, rows)
    sys.exit(not all(row["passed"] for row in rows))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The JSON and the table of what there is by now."""
    rows.sort(key=lambda row: ("-tiny-" in row["export"], row["export"]))
    result = {"machine": measured_with(), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
