"""Makes the tests' own helper modules importable and keeps every test on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

for folder in (".", "decoding", "models", "parallel"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
torch.set_num_threads(1)
