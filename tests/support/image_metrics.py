"""PSNR of float images in 0..1, as diffusers returns them with output_type="np"."""

from __future__ import annotations

from functools import partial

from sd_ort.core import metrics

psnr = partial(metrics.psnr, min_std=0.05, peak=1.0)
