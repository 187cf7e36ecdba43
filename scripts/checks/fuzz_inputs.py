"""Fuzz what commands read: graphs, configs, manifests and tuning files, changed at random by Hypothesis.

    python scripts/checks/fuzz_inputs.py --seconds 60 --folder raw

Each example damages a small pipeline folder in up to four places and runs `optimize` and `explain` on it, or reads a
damaged tuning file. What is raised must be an SdOrtError. A failure is printed as small as Hypothesis can make it: keep
it as a case of tests/hostile. Exits with 1 when one was found.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sd_ort.core.errors import SdOrtError
from sd_ort.inspect.explain import explain
from sd_ort.runtime import tuning
from sd_ort.runtime.machine import commit, machine, versions
from sd_ort.stages import optimize

ODD = st.sampled_from([0, 1, -1, 2, 7, 99, 1 << 31, (1 << 63) - 1, -(1 << 63)])
TEXTS = st.sampled_from(["", "x", "sample", "moved", "../../secret", "/dev/zero", "Sigmoid", "Loop", "com.microsoft"])
VALUES = st.recursive(
    st.none() | st.booleans() | ODD | TEXTS | st.sampled_from([1e308, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROUND = 10  # examples of one seed
JSON_FILES = ("model_index.json", "sd_ort.json", "unet/config.json", "scheduler/scheduler_config.json")


def parts(message: Message) -> list[Message]:
    """A message and all below it."""
    found = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            repeated = field.is_repeated
            found += [part for inner in (value if repeated else [value]) for part in parts(inner)]
    return found


def change(draw: st.DataObject, model: onnx.ModelProto) -> None:
    """Change one field of one message anywhere in `model`: clear it, set it, or repeat or drop an element."""
    message = draw.draw(st.sampled_from(parts(model)))
    field = draw.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        if len(value) and draw.draw(st.booleans()):
            del value[draw.draw(st.integers(0, len(value) - 1))]
        elif len(value):
            again = value[draw.draw(st.integers(0, len(value) - 1))]
            value.extend([again])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        message.ClearField(field.name)
    else:
        kind = {"str": TEXTS, "bytes": st.binary(max_size=9)}.get(type(value).__name__, ODD)
        try:
            setattr(message, field.name, draw.draw(kind))
        except (ValueError, TypeError):  # out of the field's range
            message.ClearField(field.name)


def folders(draw: st.DataObject, pristine: Path) -> None:
    """One example: a damaged pipeline through `optimize` and `explain`."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(shutil.copytree(pristine, Path(work) / "in"))
        path = source / draw.draw(st.sampled_from(["unet", "vae_decoder", "text_encoder"])) / "model.onnx"
        model = onnx.load(path, load_external_data=False)
        for _ in range(draw.draw(st.integers(0, 3))):
            change(draw, model)
        path.write_bytes(model.SerializeToString())
        if draw.draw(st.booleans()):
            file = source / draw.draw(st.sampled_from(JSON_FILES))
            known = json.loads(file.read_text()) if file.is_file() else {"format": 1, "stage": "export"}
            keys = st.sampled_from([*known, "source", "files", "components", "options"])
            file.write_text(json.dumps(known | {draw.draw(keys): draw.draw(VALUES)}))
        for call in (lambda: optimize(source, Path(work) / "out", target="portable"), lambda: explain(source)):
            with suppress(SdOrtError):
                call()


def tuning_files(draw: st.DataObject) -> None:
    """One example: a damaged tuning file, read and shown."""
    record = {
        "format": 1,
        "validators": {"arch": "gfx942", "driver": "", "library": "", "onnxruntime": ""},
        "operators": {"GroupNorm": {"1": {"candidate": "a", "microseconds": 1.0, "default_microseconds": 2.0}}},
        "onnxruntime": [],
    }
    place: Any = record
    while isinstance(place, dict) and place and draw.draw(st.booleans()):
        key = draw.draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and draw.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = draw.draw(VALUES)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "results.json"
        path.write_text(json.dumps(record))
        with suppress(SdOrtError):
            tuning.table(tuning.read(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--folder", type=Path, required=True, help="A small pipeline folder to damage copies of.")
    options = parser.parse_args()
    print(f"{machine()}\n{versions()}, commit {commit()}", flush=True)
    end = time.monotonic() + options.seconds
    rounds = 0
    while time.monotonic() < end:  # a round is always whole: Hypothesis replays what it draws

        @seed(rounds)
        @settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),  # explaining takes minutes
        )
        @given(st.data())
        def fuzz(draw: st.DataObject) -> None:
            if draw.draw(st.booleans()):
                folders(draw, options.folder)
            else:
                tuning_files(draw)

        fuzz()
        rounds += 1
    print(f"{rounds * ROUND} examples, nothing found.")


if __name__ == "__main__":
    main()
