"""ComfyUI's page in a browser with a workflow of ours, run from there: the image beside the nodes' README.

    python scripts/checks/comfyui_page.py --comfyui CHECKOUT --work WORK [--out sd_ort/integrations/comfyui/graph.png]

WORK is what `comfyui.py --work WORK` left: models and our nodes. Needs ComfyUI's requirements (its page is the package
comfyui-frontend-package), `pip install playwright` and a Chromium. ComfyUI's own server is started on a port of this
machine, the workflow is loaded and queued as a user would, and the page is taken once the image is generated. With
--without-browser the workflow is sent to its API, and no page is taken.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from scripts.checks.browser import free_port, opened
from scripts.checks.comfyui_host import as_prompt
from scripts.checks.stubs import stub_missing

HERE = Path(__file__).resolve().parents[2] / "sd_ort" / "integrations" / "comfyui"
LARGEST = 200_000  # bytes of an image in the repository


@contextmanager
def served(comfyui: Path, work: Path) -> Iterator[str]:
    """ComfyUI's address on this machine while its server runs."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", port, "--comfyui", str(comfyui), "--work", str(work)]
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            if process.poll() is not None:
                raise click.ClickException("ComfyUI's server did not start: see its log above.")
            try:
                urllib.request.urlopen(f"{address}/object_info/SdOrtLoadModel", timeout=5).read()
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def serve(comfyui: Path, work: Path, port: str) -> None:
    """Be ComfyUI's server, on the CPU."""
    stub_missing(("torchvision", "torchaudio"))
    os.chdir(comfyui)
    sys.path.insert(0, str(comfyui))
    sys.argv = ["main.py", "--cpu", "--listen", "127.0.0.1", "--port", port, "--base-directory", str(work),
                "--disable-auto-launch", "--disable-api-nodes"]  # fmt: skip
    runpy.run_path("main.py", run_name="__main__")


def prepared(work: Path) -> None:
    """Settings of a user who has seen the page before: no tutorial, no map over the graph."""
    settings = work / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}))


def wait_for_picture(address: str) -> None:
    """Return once the server has run what was queued. Raises ClickException when that failed."""
    for _ in range(300):
        ran = json.loads(urllib.request.urlopen(f"{address}/history").read()).values()
        if any(entry["status"]["status_str"] == "error" for entry in ran):
            raise click.ClickException("the workflow failed: see ComfyUI's log above.")
        if ran:
            return
        time.sleep(1)


def queue(address: str, workflow: dict[str, Any]) -> None:
    """Send a workflow to the server and return after its image is generated. Raises ClickException if it fails."""
    body = json.dumps({"prompt": as_prompt(workflow)}).encode()
    request = urllib.request.Request(f"{address}/prompt", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()
    wait_for_picture(address)


def photographed(address: str, workflow: dict[str, Any], out: Path) -> None:
    """The page once the workflow was loaded, queued and its image was there."""
    with opened(address, 1440, 800, 300) as page:
        page.wait_for_function("window.app && window.app.graph && window.app.extensionManager")
        page.wait_for_timeout(5000)  # the page loads a workflow of its own first
        page.evaluate("async workflow => { await window.app.loadGraphData(workflow) }", workflow)
        page.evaluate("async () => { await window.app.queuePrompt(0) }")
        wait_for_picture(address)
        page.mouse.click(700, 780)
        page.keyboard.press(".")  # the whole graph in view
        page.wait_for_timeout(8000)  # for the image to be shown
        page.screenshot(path=str(out))


@click.command()
@click.option("--comfyui", type=click.Path(path_type=Path, exists=True), required=True, help="A checkout of ComfyUI.")
@click.option("--work", type=click.Path(path_type=Path, exists=True), required=True, help="Of comfyui.py --work.")
@click.option("--workflow", default="text_to_image", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "graph.png", show_default=True)
@click.option("--without-browser", is_flag=True, help="Queue the workflow through ComfyUI's API, and take no page.")
@click.option("--serve", "port", hidden=True)
def main(comfyui: Path, work: Path, workflow: str, out: Path, without_browser: bool, port: str | None) -> None:
    """Run a workflow from ComfyUI's page and photograph it."""
    comfyui, work = comfyui.absolute(), work.absolute()
    if port:
        serve(comfyui, work, port)
        return
    prepared(work)
    content = json.loads((HERE / "workflows" / f"{workflow}.json").read_text())
    with served(comfyui, work) as address:
        if without_browser:
            queue(address, content)
            return
        photographed(address, content, out)
    if out.stat().st_size > LARGEST:
        raise click.ClickException(f"{out} has {out.stat().st_size} bytes: take a smaller page.")


if __name__ == "__main__":
    main()
