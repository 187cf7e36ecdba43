"""ComfyUI without its server: started headless from a checkout, a workflow run by its own check and executor."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

from scripts.checks.stubs import stub_missing


class Server:
    """Replacement of ComfyUI's server that drops messages."""

    client_id = None
    last_node_id = None
    last_prompt_id = None
    sockets_metadata: dict[str, Any] = {}  # noqa: RUF012 (ComfyUI reads it)

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        """Nobody listens."""


def make_importable(checkout: Path, may_be_missing: Sequence[str], cpu: bool = True) -> Any:
    """Put a checkout on the path, stub modules that are not installed, and return ComfyUI's arguments.

    `cpu`: it is to see no GPU.
    """
    if not (checkout / "execution.py").is_file():
        raise click.ClickException(f"{checkout} is no checkout of ComfyUI: it has no execution.py.")
    if stubbed := stub_missing(may_be_missing):
        click.echo(f"stubbed: {', '.join(stubbed)}")
    sys.path.insert(0, str(checkout))
    sys.argv = sys.argv[:1]
    arguments = importlib.import_module("comfy.cli_args").args
    arguments.cpu = cpu
    return arguments


def start(checkout: Path, base: Path, cpu: bool = True) -> Any:
    """ComfyUI's module `execution`, imported from its checkout, with models, custom nodes and images below `base`.

    `cpu`: as of `make_importable`.
    """
    make_importable(checkout, ("torchvision", "torchaudio", "av"), cpu).base_directory = str(base)
    try:
        nodes, execution = importlib.import_module("nodes"), importlib.import_module("execution")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"ComfyUI needs {error.name}: pip install -r {checkout}/requirements.txt."
        ) from error
    asyncio.run(nodes.load_custom_node(str(base / "custom_nodes" / "sd_ort_nodes")))
    if "SdOrtLoadModel" not in nodes.NODE_CLASS_MAPPINGS:
        raise click.ClickException("ComfyUI did not load our nodes: see its log above.")
    return execution


def with_model(prompt: dict[str, Any], **inputs: str) -> dict[str, Any]:
    """The same workflow with other `inputs` of our loaders."""
    copy_of_prompt: dict[str, Any] = json.loads(json.dumps(prompt))
    for node in copy_of_prompt.values():
        if node["class_type"].startswith("SdOrtLoad"):
            node["inputs"] |= inputs
    return copy_of_prompt


def as_prompt(workflow: dict[str, Any]) -> dict[str, Any]:
    """A workflow of the editor as what its server is sent: node -> class and inputs."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        values, inputs = iter(node["widgets_values"]), {}
        for slot in node["inputs"]:
            if "widget" in slot:
                inputs[slot["name"]] = next(values)
                if slot["name"] == "seed":
                    next(values)  # what happens to it after a run
            elif slot["link"] is not None:
                inputs[slot["name"]] = links[slot["link"]]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def run(execution: Any, prompt: dict[str, Any], output: Path) -> np.ndarray:
    """The image (H, W, 3), uint8, that a prompt saves, by ComfyUI's own check and executor."""
    before = set(output.rglob("*.png"))
    name, server = str(uuid.uuid4()), Server()
    valid, error, outputs, why = asyncio.run(execution.validate_prompt(name, prompt, None))
    if not valid:
        raise click.ClickException(f"ComfyUI refuses the workflow: {error} {why}")
    arguments = {"lru": 0, "ram": 0, "ram_inactive": 0}
    executor = execution.PromptExecutor(server, cache_type=execution.CacheType.CLASSIC, cache_args=arguments)
    executor.execute(prompt, name, {}, outputs)
    if not executor.success:
        failed = [data for event, data in executor.status_messages if event == "execution_error"]
        reasons = "; ".join(f"{data['node_type']}: {data['exception_message'].strip()}" for data in failed)
        raise click.ClickException(f"ComfyUI's executor failed: {reasons}")
    (image,) = set(output.rglob("*.png")) - before
    return np.asarray(Image.open(image).convert("RGB"))
