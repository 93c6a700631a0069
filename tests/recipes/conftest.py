"""Makes the recipes and this folder's stand-in task importable, here and in data workers."""

import sys
from pathlib import Path

for folder in (Path(__file__).parents[2], Path(__file__).parent):
    sys.path.insert(0, str(folder))
