"""How images a second grow with GPUs: a model of four measured times, and nothing fitted on more than one GPU.

Replicas share nothing but the process in front of them, which hands out batches and makes the answers. A replica asks
it for a batch, waits until it is served, draws, and asks again: a closed queue with one server (the machine repairman),
whose mean values are computed exactly, one replica after another (Reiser and Lavenberg, 1980).

One image on two GPUs is simpler: both compute a row of guidance at every step, and exchange it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    """Seconds measured with one replica. `draw`: from a batch being handed to a replica until its files are here;
    `hand_over`: from there to the next batch being handed over. Of the process in front, for one image: `dispatch`, its
    processor's time to queue an image and hand it out; `answer`, to make the HTTP answer of it. `batch`: images."""

    draw: float
    hand_over: float
    dispatch: float
    answer: float
    batch: int = 1

    def images_a_second(self, replicas: int, *, hosts: int = 1, http: bool = True) -> float:
        """With so many replicas on each of `hosts`, every host with a process in front of its own; without `http`
        nobody makes answers."""
        served = self.batch * (self.dispatch + (self.answer if http else 0.0))
        elsewhere = self.draw + max(0.0, self.hand_over - self.batch * self.dispatch)
        rate = waiting = 0.0
        for count in range(1, replicas + 1):
            here = served * (1 + waiting)
            rate = count / (here + elsewhere)
            waiting = rate * here
        return hosts * self.batch * rate

    def limit(self) -> float:
        """Images a second of one host with as many replicas as one likes: what the process in front can do."""
        return 1 / (self.dispatch + self.answer)


def split_step(rows: Sequence[float], exchange: float) -> float:
    """A step whose rows of guidance are computed on a device each: the slower one's, then the exchange, in seconds."""
    return max(rows) + exchange


def split_image(image: float, step: float, steps: int, split: float) -> float:
    """An image in split steps: what is not steps stays as it is on one device. All in seconds."""
    return image - steps * (step - split)


# --- Results --------------------------------------------------------------------------------------------------------


def times_of(row: dict[str, Any]) -> Times:
    """What the model takes from the row of one replica in a result of scripts/measure/scale_gpus.py.
    Times that older files lack count as none."""
    batches = [row["batch"] / images_s for images_s in row["images_s"]["values"]]  # seconds from one to the next
    return Times(
        draw=row["batch_s"]["mean"],
        hand_over=max(0.0, sum(batches) / len(batches) - row["batch_s"]["mean"]),
        dispatch=row.get("dispatch_s", 0.0),
        answer=row.get("front_s", 0.0),
        batch=row["batch"],
    )


def checked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each row of several replicas: images a second as measured, and as the model says from one's times."""
    made = []
    for one in (row for row in rows if row["replicas"] == 1):
        for row in (row for row in rows if row["replicas"] > 1 and row["batch"] == one["batch"]):
            images_s, model = row["images_s"]["mean"], times_of(one).images_a_second(row["replicas"], http=False)
            made.append({"replicas": row["replicas"], "batch": row["batch"], "measured_images_s": images_s,
                         "model_images_s": model, "error_percent": 100 * (model / images_s - 1)})  # fmt: skip
    return made


def checked_split(found: Mapping[str, Any], steps: int) -> dict[str, tuple[float, float]]:
    """Of a preset in two_gpus.json: what -> seconds as measured on two GPUs, and as the model says."""
    one, two = (found["step_ms"][name] / 1e3 for name in ("one", "two"))
    rows = [found["unet_ms"][row] / 1e3 for row in ("negative row", "positive row")]
    step = split_step(rows, found["exchange_us"] / 1e6)
    image = split_image(found["image_s"]["one"], one, steps, step)
    return {"a step": (two, step), f"an image of {steps} steps": (found["image_s"]["two"], image)}
