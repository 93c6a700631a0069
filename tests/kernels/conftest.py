"""Kernels run here on the CPU, in Triton's interpreter."""

import interpreted  # noqa: F401
