"""The NumPy schedulers are diffusers': the same timesteps and, within float32's rounding, the same coefficients."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import pytest

from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.checkpoints.numpy_schedulers import CLASSES, class_name, numpy_scheduler
from sd_ort.checkpoints.schedule import DiffusersTimetable
from sd_ort.checkpoints.schedulers import scheduler_class
from sd_ort.core.errors import InputError

BASE: dict[str, Any] = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
OPTIONS: list[dict[str, Any]] = [
    {"beta_schedule": "linear"},
    {"beta_schedule": "squaredcos_cap_v2"},
    {"prediction_type": "sample"},
    {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"},
    {"use_karras_sigmas": True},
    {"use_exponential_sigmas": True},
    {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2"},
    {"final_sigmas_type": "sigma_min"},
    {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"},
    {"set_alpha_to_one": False},
    {"num_train_timesteps": 500},
    {"variance_type": "fixed_small_log"},
]
# Where our tables cannot be compared: an option that is not implemented, or numbers of diffusers' that are not finite.
LEFT_TO_DIFFUSERS = {
    "PNDMScheduler": ["sample"], "EulerAncestralDiscreteScheduler": ["sample"],
    "DPMSolverMultistepScheduler": ["fixed_small_log", "use_exponential_sigmas"],
    "UniPCMultistepScheduler": ["use_exponential_sigmas"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = diffusers.logging.get_verbosity()
    diffusers.logging.set_verbosity(logging.CRITICAL)
    yield
    diffusers.logging.set_verbosity(before)


def compare(name: str, options: dict[str, Any], steps: int, start: int = 0, eta: float = 0.0, **call: Any) -> None:
    config = {**BASE, **options, "clip_sample": False, "skip_prk_steps": True}
    ours = numpy_scheduler(name, {**config, **call}, steps, eta)
    theirs = DiffusersTimetable(getattr(diffusers, name).from_config(config), steps, eta, **call)
    assert ours is not None
    assert ours.order == theirs.order
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps, rtol=0, atol=0 if ours.preserves_variance else 1e-3)
    start, stop = start * ours.order, len(ours.timesteps)
    schedule, expected = ours.schedule(start, stop), theirs.schedule(start, stop)
    assert isinstance(expected, LinearSchedule)
    assert np.isfinite(expected.weights).all()
    largest = np.abs(expected.weights).max()
    np.testing.assert_allclose(schedule.weights, expected.weights, rtol=0, atol=1e-5 * largest)
    for field in ("timesteps", "input_scales", "image_factors", "noise_factors", "init_noise_sigma"):
        np.testing.assert_allclose(getattr(schedule, field), getattr(expected, field), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("LMS")])  # diffusers' needs SciPy
@pytest.mark.filterwarnings("ignore")
def test_as_diffusers(name: str) -> None:
    for spacing, prediction, steps in itertools.product(
        ("linspace", "leading", "trailing"), ("epsilon", "v_prediction"), (1, 2, 5, 16)
    ):
        options = {"timestep_spacing": spacing, "prediction_type": prediction, "steps_offset": 1}
        for start in range(min(steps, 3)):
            compare(name, options, steps, start)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("LMS")])
@pytest.mark.filterwarnings("ignore")
def test_options(name: str, options: dict[str, Any]) -> None:
    words = [str(word) for pair in options.items() for word in pair]
    if set(words) & set(LEFT_TO_DIFFUSERS.get(name, [])):
        assert numpy_scheduler(name, {**BASE, **options, "skip_prk_steps": True}, 9) is None
        return
    if (
        name in ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
        and len(options) == 2
        and "squaredcos" in str(options)
    ):
        ours = numpy_scheduler(name, {**BASE, **options}, 9)  # diffusers' own steps fail: two timesteps are equal
        assert ours is not None
        assert np.isfinite(ours.schedule(0, 9).weights).all()
        return
    compare(name, options, 9)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver", ["midpoint", "heun"])
@pytest.mark.parametrize("algorithm", ["dpmsolver++", "sde-dpmsolver++"])
def test_dpm_solver(order: int, solver: str, algorithm: str) -> None:
    for lower, euler in itertools.product((True, False), repeat=2):
        options = {"solver_order": order, "solver_type": solver, "algorithm_type": algorithm,
                   "lower_order_final": lower, "euler_at_final": euler}  # fmt: skip
        if (order, algorithm) == (3, "sde-dpmsolver++"):
            assert numpy_scheduler("DPMSolverMultistepScheduler", {**BASE, **options}, 20) is None
        else:
            compare("DPMSolverMultistepScheduler", options, 9)
            compare("DPMSolverMultistepScheduler", options, 20)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc(order: int) -> None:
    compare("UniPCMultistepScheduler", {"solver_order": order}, 20)
    compare("UniPCMultistepScheduler", {"solver_order": order, "disable_corrector": [0, 2]}, 9)
    for solver in ("bh1", "bh2"):
        options = {"solver_order": order, "solver_type": solver, "final_sigmas_type": "sigma_min"}
        compare("UniPCMultistepScheduler", options, 9)
        compare("UniPCMultistepScheduler", {**options, "lower_order_final": False}, 9)


def test_eta() -> None:
    compare("DDIMScheduler", {}, 9, eta=0.7)


def test_schedules_of_the_caller() -> None:
    timesteps = [999, 845, 730, 587, 443, 310, 193, 116, 53, 13]
    sigmas = [14.6, 6.5, 3.9, 2.1, 1.2, 0.6, 0.03, 0.0]
    for options in ({}, {"timestep_spacing": "leading"}, {"prediction_type": "v_prediction"}):
        compare("DPMSolverMultistepScheduler", options, 50, timesteps=timesteps)
        compare("EulerDiscreteScheduler", options, 50, timesteps=timesteps)
        compare("EulerDiscreteScheduler", options, 50, timesteps=timesteps, start=2)
        compare("EulerDiscreteScheduler", {**options, "use_karras_sigmas": True}, 50, sigmas=sigmas)
    for name, call in (("DDIMScheduler", {"timesteps": timesteps}), ("DPMSolverMultistepScheduler", {"sigmas": sigmas}),
                       ("EulerDiscreteScheduler", {"timesteps": timesteps, "sigmas": sigmas}),
                       ("EulerDiscreteScheduler", {"timesteps": timesteps, "use_karras_sigmas": True})):  # fmt: skip
        assert numpy_scheduler(name, {**BASE, **call}, 50) is None


def test_lms_integrates_its_polynomials() -> None:
    """diffusers' needs SciPy. A constant derivative moves the latents by the whole difference of noise levels."""
    lms = numpy_scheduler("LMSDiscreteScheduler", {**BASE, "prediction_type": "sample"}, 9)
    assert lms is not None
    for i in range(9):
        latents = np.full(1, lms.sigma[i])
        moved = lms.step(i, np.zeros(1), latents, np.empty)  # type: ignore[arg-type]  # an image of zeros: derivative 1
        np.testing.assert_allclose(moved, lms.sigma[i + 1], atol=1e-6)
    assert lms.schedule(0, 9).coefficients.shape == (9, 4, 2)


@pytest.mark.parametrize(
    "config",
    [{"thresholding": True}, {"beta_schedule": "x"}, {"clip_sample": True}, {"beta_start": "x"}, {"trained_betas": []}],
)
def test_unsupported_schedulers_use_diffusers(config: dict[str, Any]) -> None:
    assert numpy_scheduler("DDIMScheduler", {**BASE, **config}, 5) is None


@pytest.mark.parametrize("steps", [0, 2000])
def test_step_counts_that_use_diffusers(steps: int) -> None:
    assert numpy_scheduler("EulerDiscreteScheduler", BASE, steps) is None


@pytest.mark.parametrize(
    "name", ["euler", "Euler_Ancestral", "ddim", "DPMSolver++", "unipc", "PNDMScheduler", "heun", "lcm", "ddpm"]
)
def test_names_mean_what_they_mean_among_all_of_diffusers(name: str) -> None:
    assert class_name(name) == scheduler_class(name).__name__


def test_a_name_of_another_scheduler() -> None:
    assert class_name("deis") is None
    assert scheduler_class("deis").__name__ == "DEISMultistepScheduler"


def test_all_of_diffusers_by_name() -> None:
    names = [name for name in dir(diffusers) if name.endswith("Scheduler")]
    assert [scheduler_class(name).__name__ for name in names] == names


def test_a_mistyped_name_does_not_import_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match="'DPM\\+\\+ 2M Karras' is no diffusers scheduler"):
        scheduler_class("DPM++ 2M Karras")
    assert "diffusers" not in sys.modules
