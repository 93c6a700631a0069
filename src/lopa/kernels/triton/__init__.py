"""Kernels in Triton. They also run in its interpreter, on a CPU."""
