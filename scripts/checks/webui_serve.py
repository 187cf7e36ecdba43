"""Be a WebUI: its own webui.py, with stubs for what of its needs is not installed. Runs in the WebUI's own Python.

python scripts/checks/webui_serve.py CHECKOUT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys

from stubs import stub_missing

STUBBED = ("torchvision", "torchaudio", "clip")

if __name__ == "__main__":
    print("stubbed:", ", ".join(stub_missing(STUBBED)) or "nothing", flush=True)
    os.chdir(sys.argv[1])
    sys.path.insert(0, sys.argv[1])
    sys.argv = ["webui.py", *sys.argv[2:]]
    runpy.run_path("webui.py", run_name="__main__")
