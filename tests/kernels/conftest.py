"""Kernels run here on the CPU, in Triton's interpreter. It must be chosen before they are made."""

import os

os.environ["TRITON_INTERPRET"] = "1"
