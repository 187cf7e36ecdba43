"""Quality of generated images: fidelity of the demo's shapes, CLIP score and FID, or why a score is not available."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort import demo
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.npz_file import read_npz
from sd_ort.demo import fidelity

# Names of a folder of weights: `--accuracy-weights`. MLPerf's statistics of its photographs have the last one.
CLIP, INCEPTION, STATISTICS = "clip", "inception.pth", "val2014.npz"


@dataclass(frozen=True)
class AccuracyWeights:
    """Weights of CLIP score and FID.

    Args:
        clip: folder with a CLIP model.
        inception: Inception's weights in torch-fidelity's format (.pth).
        fid_stats: an .npz of the photographs' statistics.
    """

    clip: Path | None = None
    inception: Path | None = None
    fid_stats: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> AccuracyWeights:
        """Return the weights that a folder has: CLIP, INCEPTION and STATISTICS. Raises InputError if it has none."""
        paths = [path if (path := folder / name).exists() else None for name in (CLIP, INCEPTION, STATISTICS)]
        if not any(paths):
            raise InputError(
                f"{folder} has no weights for --accuracy-weights: put a CLIP model into {CLIP}/, and Inception's "
                f"weights and the photographs' statistics into {INCEPTION} and {STATISTICS}."
            )
        return cls(*paths)

    def check(self) -> None:
        """Raise InputError for unusable weights or statistics, before minutes of generation."""
        if self.clip is not None and not (self.clip / "config.json").is_file():
            raise InputError(f"{self.clip} holds no CLIP model: give a folder with config.json, weights and tokenizer.")
        if (self.inception is None) != (self.fid_stats is None):
            raise InputError(
                "FID needs both Inception's weights and the photographs' statistics: give --inception and --fid-stats, "
                f"or put {INCEPTION} and {STATISTICS} into --accuracy-weights."
            )
        if self.inception is not None and not self.inception.is_file():
            raise InputError(f"{self.inception} is missing: give torch-fidelity's Inception weights (.pth).")
        if self.fid_stats is not None:
            read_statistics(self.fid_stats)
        # torch-fidelity is not of the extra: it brings torchvision, whose newest wheel fits one build of torch alone.
        for package, install in (("torchmetrics", "'sd-ort[mlperf]'"), ("torch_fidelity", "torch-fidelity")):
            if self.inception and importlib.util.find_spec(package) is None:
                raise InputError(f"{package} is not installed: pip install {install}.")


def scores(
    model: str, prompts: Sequence[str], images: Mapping[int, np.ndarray], weights: AccuracyWeights
) -> dict[str, Any]:
    """Return the scores of `images`, uint8 (H, W, 3) by prompt index; a reason for each score that is missing."""
    indices = sorted(images)
    image_prompts, generated = [prompts[i] for i in indices], [images[i] for i in indices]
    results: dict[str, Any] = {
        "fidelity_percent": "only the demo model's images can be read back",
        "clip_score": f"no CLIP weights: give --accuracy-weights DIR with {CLIP}/",
        "fid": f"no Inception weights: give --accuracy-weights DIR with {INCEPTION} and {STATISTICS}",
    }
    if model in demo.FOLDERS:
        results["fidelity_percent"] = 100 * fidelity.score(image_prompts, generated).share
    if weights.clip:
        results["clip_score"] = clip_score(image_prompts, generated, weights.clip)
    if weights.inception and weights.fid_stats:
        results["fid"] = fid(generated, weights.inception, weights.fid_stats)
    return results


def clip_score(prompts: Sequence[str], images: Sequence[np.ndarray], clip: Path) -> float | str:
    """Return the CLIP score with the model in the folder `clip`, or a reason: 100 x mean cosine, at least 0."""
    import torch
    from transformers import CLIPModel, CLIPProcessor

    try:
        model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
        cosines = []
        for prompt, image in zip(prompts, images, strict=True):
            inputs = processor(text=[prompt], images=[image], return_tensors="pt", truncation=True)
            with torch.inference_mode():
                outputs = model(**inputs)
            cosines.append(float(torch.cosine_similarity(outputs.text_embeds, outputs.image_embeds)))
        return 100 * max(float(np.mean(cosines)), 0.0)
    except Exception as error:  # transformers' errors share no base class
        return f"the CLIP model in {clip} cannot be used: {first_line(error)}"


def fid(images: Sequence[np.ndarray], feature: Any, fid_stats: Path) -> float | str:
    """Return torchmetrics' Frechet Inception distance to photographs of known statistics, or a reason.

    `feature`: Inception's weights in torch-fidelity's format (.pth), or a module from uint8 (B, 3, H, W) to features.
    """
    import torch
    from torchmetrics.image.fid import FrechetInceptionDistance

    mean, covariance = read_statistics(fid_stats)
    try:
        weights = {"feature": 2048, "feature_extractor_weights_path": str(feature)}
        metric = FrechetInceptionDistance(**weights if isinstance(feature, Path) else {"feature": feature})
        metric.set_dtype(torch.float64)
        for image in images:
            metric.update(torch.from_numpy(image.copy()).permute(2, 0, 1)[None], real=False)
        # The sums of n photographs with this mean and covariance.
        n, mu = 1000, torch.from_numpy(mean)
        metric.real_features_sum = n * mu
        metric.real_features_cov_sum = (n - 1) * torch.from_numpy(covariance) + n * torch.outer(mu, mu)
        metric.real_features_num_samples = torch.tensor(n)
        return float(metric.compute())
    except Exception as error:  # torch-fidelity missing, weights of another network, too few images
        return f"FID cannot be computed: {first_line(error)}"


def read_statistics(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return mean (F,) and covariance (F, F), float64, of the photographs' features from an .npz.

    Its arrays are `mu` and `sigma`, as in MLPerf's val2014.npz. Raises InputError for other files.
    """
    arrays = read_npz(path, ("mu", "sigma").__contains__)
    if len(arrays) < 2 or any(array.dtype.kind not in "fiu" for array in arrays.values()):
        raise InputError(f"{path} holds no mu and sigma: give an .npz such as MLPerf's val2014.npz.")
    mean, covariance = (arrays[name].astype(np.float64) for name in ("mu", "sigma"))
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or not np.isfinite(covariance).all():
        raise InputError(f"{path} holds mu and sigma of shapes that do not fit: give an .npz such as val2014.npz.")
    return mean, covariance
