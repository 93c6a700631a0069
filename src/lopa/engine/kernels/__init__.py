"""Triton kernels, and what they need: a CUDA device, or Triton's interpreter on a CPU (tests)."""
