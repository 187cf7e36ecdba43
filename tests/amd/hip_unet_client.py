"""What test_hip_unet.py runs under scripts/amd/simulate: `python hip_unet_client.py LIBRARY MODEL INPUTS OUTPUTS`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from sd_ort.runtime.bound_run import NO_GRAPH_ID, GpuGraphModel
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import SessionOptions, create_session

if __name__ == "__main__":
    library, model, inputs, outputs = sys.argv[1:]
    session = create_session(Path(model), f"plugin:{library}", SessionOptions(capture=True, library=False))
    feed = dict(np.load(inputs))
    component = GpuGraphModel(session, provider_named(f"plugin:{library}").device)
    first = component(**feed)["out_sample"]
    replayed = component(**feed)["out_sample"]
    np.savez(
        outputs,
        first=first,
        replayed=replayed,
        captured=all(run.graph_id != NO_GRAPH_ID for run in component.runs.values()),
    )
