"""The demo models: small ones that generate colored shapes, and a score of their prompt fidelity.

`MODEL_DIR` (`demo`) is a diffusers folder of a Stable Diffusion, `TRANSFORMER_DIR` (`demo-dit`) of a FLUX.1. `scenes`
generates captioned scenes; `fidelity` detects the scene in an image.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "FOLDERS", "GUIDANCE", "HEIGHT", "MODEL_DIR", "STEPS", "TEXT_LENGTH", "TRANSFORMER_DIR", "TRANSFORMER_STEPS",
    "VOCABULARY", "WIDTH",
]  # fmt: skip

MODEL_DIR = Path(__file__).parent / "model"
TRANSFORMER_DIR = Path(__file__).parent / "transformer"
# By the name of the model.
FOLDERS = {"demo": MODEL_DIR, "demo-dit": TRANSFORMER_DIR}
TRANSFORMER_STEPS = 20
TEXT_LENGTH = 32  # T5 tokens that `demo-dit` was trained with
STEPS = 25
GUIDANCE = 3.0
VOCABULARY = 621  # tokens: bytes and words of the captions; identifies a checkpoint of the demo family
HEIGHT = WIDTH = 128
