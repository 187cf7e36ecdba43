"""How good pictures are: the demo's shapes read back, CLIP score and FID. What cannot be scored here says why."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError, first_line
from sd_ort.demo import fidelity

NEEDS = "torchmetrics is not installed: pip install 'sd-ort[mlperf]'"


def check(clip: Path | None, inception: Path | None, fid_stats: Path | None) -> None:
    """Raise InputError for weights or statistics that cannot be used, before minutes of drawing."""
    if clip is not None and not (clip / "config.json").is_file():
        raise InputError(f"{clip} holds no CLIP model: give a folder with config.json, weights and tokenizer.")
    if (inception is None) != (fid_stats is None):
        raise InputError("FID needs both --inception (Inception's weights) and --fid-stats (the photographs').")
    if inception is not None and not inception.is_file():
        raise InputError(f"{inception} is missing: give torch-fidelity's Inception weights (.pth).")
    if fid_stats is not None:
        read_statistics(fid_stats)
    if (clip or inception) and importlib.util.find_spec("torchmetrics") is None:
        raise InputError(f"{NEEDS}.")


def scores(
    model: str,
    prompts: Sequence[str],
    images: Mapping[int, np.ndarray],
    clip: Path | None = None,
    inception: Path | None = None,
    fid_stats: Path | None = None,
) -> dict[str, Any]:
    """Scores of the pictures drawn, uint8 (H, W, 3) by number of prompt; a reason for each that cannot be had."""
    numbers = sorted(images)
    asked, drawn = [prompts[i] for i in numbers], [images[i] for i in numbers]
    found: dict[str, Any] = {"fidelity_percent": "only the demo model's pictures can be read back"}
    if model == "demo":
        found["fidelity_percent"] = 100 * fidelity.score(asked, drawn).share
    found["clip_score"] = clip_score(asked, drawn, clip) if clip else "no CLIP weights: give --clip DIR"
    found["fid"] = "no Inception weights: give --inception and --fid-stats"
    if inception and fid_stats:
        found["fid"] = fid(drawn, inception, fid_stats)
    return found


def clip_score(prompts: Sequence[str], images: Sequence[np.ndarray], clip: Path) -> float | str:
    """Mean CLIP score (100 x cosine) by torchmetrics with the model in the folder `clip`, or why there is none."""
    import torch
    from torchmetrics.multimodal import CLIPScore
    from transformers import CLIPModel, CLIPProcessor

    try:
        metric = CLIPScore(lambda: (CLIPModel.from_pretrained(clip), CLIPProcessor.from_pretrained(clip)))
        for prompt, image in zip(prompts, images, strict=True):
            metric.update(torch.from_numpy(image.copy()).permute(2, 0, 1), prompt)
        return float(metric.compute())
    except Exception as error:  # transformers' and torchmetrics' errors share no base class
        return f"the CLIP model in {clip} cannot be used: {first_line(error)}"


def fid(images: Sequence[np.ndarray], feature: Any, fid_stats: Path) -> float | str:
    """Frechet Inception distance by torchmetrics to photographs of known statistics, or why there is none.

    `feature`: Inception's weights as torch-fidelity has them (.pth), or a module that makes features of uint8
    (B, 3, H, W).
    """
    import torch
    from torchmetrics.image.fid import FrechetInceptionDistance

    mean, covariance = read_statistics(fid_stats)
    try:
        if isinstance(feature, Path):
            metric = FrechetInceptionDistance(2048, feature_extractor_weights_path=str(feature))
        else:
            metric = FrechetInceptionDistance(feature)
        metric.set_dtype(torch.float64)
        for image in images:
            metric.update(torch.from_numpy(image.copy()).permute(2, 0, 1)[None], real=False)
        # The photographs' sums, as if they had been seen: n of them with this mean and covariance.
        n, mu = 1000, torch.from_numpy(mean)
        metric.real_features_sum = n * mu
        metric.real_features_cov_sum = (n - 1) * torch.from_numpy(covariance) + n * torch.outer(mu, mu)
        metric.real_features_num_samples = torch.tensor(n)
        return float(metric.compute())
    except Exception as error:  # torch-fidelity missing, weights of another network, too few pictures
        return f"FID cannot be computed: {first_line(error)}"


def read_statistics(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Mean (F,) and covariance (F, F) of the photographs' features, float64: `mu` and `sigma` of an .npz, as MLPerf's
    val2014.npz has them. Raises InputError for another file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            mean, covariance = np.asarray(file["mu"], np.float64), np.asarray(file["sigma"], np.float64)
    except Exception as error:  # zipfile's, NumPy's and the operating system's
        raise InputError(f"{path} holds no mu and sigma: give an .npz such as MLPerf's val2014.npz.") from error
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or not np.isfinite(covariance).all():
        raise InputError(f"{path} holds mu and sigma of shapes that do not fit: give an .npz such as val2014.npz.")
    return mean, covariance
