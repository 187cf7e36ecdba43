"""The demo model: a small Stable Diffusion that generates colored shapes, and a score of its prompt fidelity.

`MODEL_DIR` is a diffusers folder; `scenes` generates captioned scenes; `fidelity` detects the scene in an image.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["GUIDANCE", "HEIGHT", "MODEL_DIR", "STEPS", "VOCABULARY", "WIDTH"]

MODEL_DIR = Path(__file__).parent / "model"
STEPS = 25
GUIDANCE = 3.0
VOCABULARY = 621  # tokens: bytes and words of the captions; identifies a checkpoint of the demo family
HEIGHT = WIDTH = 128
