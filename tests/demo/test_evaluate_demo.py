"""The fidelity bounds of evaluate_demo.py reject worse images."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scripts.bench import evaluate_demo
from sd_ort.core import metrics
from sd_ort.demo import scenes


def test_worse_images_fail_the_fidelity_bounds() -> None:
    prompts = scenes.unseen_prompts(20)
    parsed = [scenes.parse(prompt) for prompt in prompts]
    images = [scenes.render(scene, scenes.random_geometry(scene, random.Random(i))) for i, scene in enumerate(parsed)]
    right = np.stack(images)
    reference = {**evaluate_demo.row("torch fp32", prompts, right, None), "pictures": right}
    assert reference["share_percent"] == 100
    same = evaluate_demo.row("fused fp32", prompts, right, reference)
    assert (same["passed"], same["lost_points"], same["psnr_db"]["min"]) == (True, 0, metrics.EQUAL_DB)

    one_wrong = right.copy()
    one_wrong[3] = 255 - one_wrong[3]  # 5 points of fidelity, while the median image is as before
    entry = evaluate_demo.row("fused fp16", prompts, one_wrong, reference)
    assert (entry["passed"], entry["right"], entry["lost_points"]) == (False, 19, pytest.approx(5))
    assert entry["failures"][0]["prompt"] == prompts[3]

    noisy = (right.astype(int) + np.random.default_rng(0).integers(-9, 10, right.shape)).clip(0, 255).astype(np.uint8)
    entry = evaluate_demo.row("fused fp32", prompts, noisy, reference)
    assert entry["psnr_db"]["median"] < 40
    assert entry["passed"] is False
