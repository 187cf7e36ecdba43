"""What test_vae_memory.py runs under scripts/amd/simulate: `python vae_memory_client.py LIBRARY FOLDER [whole]`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.pipelines.vae import Vae
from sd_ort.pipelines.vae_memory import Layout
from sd_ort.runtime.components import Components

if __name__ == "__main__":
    library, folder, *options = sys.argv[1:]
    logging.basicConfig(format="%(message)s")
    models = Components(Path(folder), f"plugin:{library}")
    config: dict[str, Any] = json.loads((Path(folder) / "vae_decoder/config.json").read_text())
    vae = Vae(models, config)
    if options:
        vae._layout = lambda *_: Layout()  # type: ignore[method-assign]
    print(vae.to_pixels(np.zeros((1, 4, 64, 64), np.float32)).shape, vae.fits((1, 4, 16, 16)))
