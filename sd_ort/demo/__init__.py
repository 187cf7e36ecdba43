"""The demo model: a small Stable Diffusion that draws colored shapes, and the score of how well it does.

`MODEL_DIR` is a stock diffusers folder; `scenes` makes captioned scenes; `fidelity` reads pictures back.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["GUIDANCE", "HEIGHT", "MODEL_DIR", "STEPS", "VOCABULARY", "WIDTH"]

MODEL_DIR = Path(__file__).parent / "model"
STEPS = 25
GUIDANCE = 3.0
VOCABULARY = 621  # tokens: bytes and the captions' words, by which a checkpoint of the demo's family is known
HEIGHT = WIDTH = 128
