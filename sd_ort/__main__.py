"""`python -m sd_ort` is `sd-ort`."""

from sd_ort.cli import main

main()
