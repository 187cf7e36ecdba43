#!/usr/bin/env python3
"""examples/gradio_app.py with Gradio: four clients at once get the same image.

pip install gradio; python scripts/checks/gradio_app.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradio_client import Client

from scripts.checks.browser import free_port

APP = Path(__file__).parents[2] / "examples" / "gradio_app.py"
CLIENTS = 4


def main() -> None:
    address = f"http://127.0.0.1:{(port := free_port())}"
    environment = os.environ | {"GRADIO_SERVER_PORT": port, "GRADIO_ANALYTICS_ENABLED": "False"}
    with subprocess.Popen([sys.executable, str(APP)], env=environment, stdout=subprocess.PIPE, text=True) as app:
        try:
            assert app.stdout is not None
            while address not in app.stdout.readline():
                assert app.poll() is None, "the app ended"

            def generate(_: int) -> bytes:
                file = Client(address, verbose=False).predict("a red circle", 4, 1, api_name="/generate")
                return Path(file).read_bytes()

            with ThreadPoolExecutor(CLIENTS) as pool:
                images = list(pool.map(generate, range(CLIENTS)))
        finally:
            app.terminate()
    assert len(set(images)) == 1, "the images differ"
    print(f"{CLIENTS} clients, one image")


if __name__ == "__main__":
    main()
