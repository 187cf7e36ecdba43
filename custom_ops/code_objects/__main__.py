"""See the package."""

import sys
from pathlib import Path

from custom_ops.code_objects import publish, write

write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
publish(Path(sys.argv[2]))
