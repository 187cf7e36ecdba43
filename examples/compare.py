"""Compare two ways to run a model: `python examples/compare.py [MODEL]`.

Two folders are optimized for different targets and take turns. The lines are the report's; see
docs/tutorial/benchmark_report.md.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
with tempfile.TemporaryDirectory() as work:

    def sd_ort(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "sd_ort", *words], cwd=work, check=True)

    for target in ("portable", "cpu"):
        sd_ort("optimize", model, target, "--target", target)
    options = "--provider cpu --component unet --height 64 --width 64 --runs 5 --steps 4 --torch none --out out"
    sd_ort("benchmark", "portable", "cpu", *options.split())
    for row in json.loads((Path(work) / "out/benchmark.json").read_text())["engines"]:
        speedup = row.get("step_speedup", {})
        print(
            row["label"],
            row["status"],
            f"{speedup.get('median', 0):.2f} x ({speedup.get('min', 0):.2f} to {speedup.get('max', 0):.2f})",
        )
