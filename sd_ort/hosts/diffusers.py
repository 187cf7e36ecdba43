"""Former name of `sd_ort.integrations.diffusers`, which model_index.json files name as a library."""

from sd_ort.integrations.diffusers import *  # noqa: F403
