"""Kernels run here on the CPU, in Triton's interpreter. It is chosen before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
