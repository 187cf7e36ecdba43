"""A folder's scheduler is used as diffusers' pipeline of the folder's class uses it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest

from sd_ort.checkpoints.schedulers import make_scheduler

PIPELINES = ("", "Img2Img", "Inpaint", "XL", "XLInpaint", "ControlNet")
# As folders of 2022 have it, and one that says what diffusers' pipelines mend.
OLD: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def theirs(name: str, scheduler: Any) -> Any:
    """The scheduler of diffusers' pipeline, which has no models."""
    cls = getattr(diffusers, name)
    parts = dict.fromkeys(inspect.signature(cls).parameters.keys() & cls.__init__.__annotations__.keys())
    settings = {name: False for name in ("requires_safety_checker", "force_zeros_for_empty_prompt") if name in parts}
    return cls(**{**parts, **settings, "scheduler": scheduler}).scheduler


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("scheduler", ["PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler"])
@pytest.mark.filterwarnings("ignore:.*The configuration file of this scheduler:FutureWarning")
def test_old_configurations(tmp_path: Path, kind: str, scheduler: str) -> None:
    """`steps_offset` and, for inpainting, `skip_prk_steps`."""
    name = f"StableDiffusion{kind}Pipeline"
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    for more in ({}, {"steps_offset": 3}):
        config = {"_class_name": scheduler, **OLD, **more}
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
        ours = make_scheduler(tmp_path)
        expected = theirs(name, getattr(diffusers, scheduler).from_pretrained(tmp_path / "scheduler"))
        for each in (ours, expected):
            each.set_timesteps(7)
        assert ours.timesteps.tolist() == expected.timesteps.tolist()
