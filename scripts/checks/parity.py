"""Compare sd-ort's pipelines with the installed diffusers', argument by argument, and write a page of the result.

    python scripts/checks/parity.py results/parity.md

tests/parity runs most of the pairs; the command fails if one of them differs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from scripts.report import table

VERDICTS = ("equal", "refused", "fails in diffusers", "different")
HEAD = """# Parity with diffusers

By `scripts/checks/parity.py`. Each pair is one call of a pipeline class with the same arguments, random weights and
seed in diffusers {diffusers} (torch {torch}, transformers {transformers}) and in sd-ort, in float32 on a CPU, with
U-Nets of two resolutions and 8x8 latents, transformers of one block of each kind, and `demo-dit`. Equal:
{bound:.0f} dB or more. Arguments, their order, defaults and effect follow this version of diffusers; `tests/parity`
runs most of the pairs and compares the signatures.

{summary}

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    from scripts.fixtures.parity_models import Models
    from scripts.fixtures.parity_pairs import MIN_PSNR, Outcome, Pair, compare, pairs

    torch.set_num_threads(1)
    started = time.process_time()
    outcomes: list[tuple[Pair, Outcome]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        outcomes += ((pair, compare(models, pair)) for pair in pairs())
    counts = Counter(outcome.verdict for _, outcome in outcomes)
    least = min(outcome.psnr for _, outcome in outcomes if outcome.psnr is not None)
    summary = f"{len(outcomes)} pairs in {time.process_time() - started:.0f} s of CPU: " + ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in VERDICTS
    )
    text = HEAD.format(
        **{name: version(name) for name in ("diffusers", "torch", "transformers")},
        bound=MIN_PSNR,
        summary=f"{summary}. The least similar pair has {least:.0f} dB.",
    )
    rows = []
    for kind in dict.fromkeys(pair.kind for pair, _ in outcomes):
        own = [outcome for pair, outcome in outcomes if pair.kind == kind]
        by_verdict = Counter(outcome.verdict for outcome in own)
        least = min((outcome.psnr for outcome in own if outcome.psnr is not None), default=0.0)
        rows.append([kind, len(own), *(by_verdict[verdict] for verdict in VERDICTS), f"{least:.0f}"])
    text += "\n".join(table(("class", "pairs", *VERDICTS, "least dB"), rows)) + "\n"
    rest = [
        (pair, outcome.verdict, outcome.reason or ("an image" if outcome.psnr is None else f"{outcome.psnr:.1f} dB"),
         outcome.theirs or "an image")
        for pair, outcome in outcomes if outcome.verdict != "equal"
    ]  # fmt: skip
    if rest:
        text += "\n## Not equal\n\n" + "\n".join(table(("pair", "verdict", "sd-ort", "diffusers"), rest)) + "\n"
    out.write_text(text + NOTES)
    print(summary)
    if counts["different"]:
        sys.exit(f"{counts['different']} pairs differ: see {out}.")


NOTES = """
## As diffusers does, though one may not expect it

- Height or width alone is ignored by `StableDiffusionPipeline`, with a warning here.
- Inpainting has the model's size unless the call gives one; with a ControlNet the image's.
- Several images are taken in turn, while each prompt's images lie side by side: with two prompts, two images and two
  images per prompt, the images are 1, 2, 1, 2 and the prompts 1, 1, 2, 2.
- SDXL from an image tells the negative rows the crop of the positive ones; its refiner and text to image their own.
- The refiner ignores `prompt_2`. `denoising_end=0` ends nothing.
- Inpainting with a U-Net of 4 channels samples noise for the masked image too, which the U-Net does not read.
- Latent consistency models ignore `interrupt`, and latents that a callback returns after the last step.
- PAG with ControlNets ignores `interrupt`, and its ControlNets read the prompt as it was before callbacks; that of SDXL
  from an image ignores `guess_mode`.

## What changed since diffusers 0.30.0

No argument or default of these classes did.

- `StableDiffusionPipeline` ignores height or width alone; the U-Net's `sample_size` may be a pair.
- Callbacks of SDXL's classes without ControlNet no longer read the negative tensors; those of ControlNets read the
  control image too, and for inpainting the mask and `masked_image_latents`, and set `interrupt`.
- SDXL's `denoising_start` ignores `strength` and sets the scheduler's first step.
- Schedulers have exponential and beta sigmas, `flow_prediction`, and betas of a Laplace distribution.

## Refused, with the reason in one line

- `callback` and `callback_steps`: deprecated in diffusers; use `callback_on_step_end`.
- `denoised` in `callback_on_step_end_tensor_inputs`.
- A scheduler that computes NaN, such as DPMSolverMultistepInverseScheduler with an SDE algorithm.
- Methods: `enable_freeu`, `enable_model_cpu_offload`, `load_ip_adapter` and others of `REJECTED_METHODS`.
"""


if __name__ == "__main__":
    main()
