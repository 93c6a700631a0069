"""Kernels and fast linear layers: Triton for any NVIDIA GPU, CUDA for Hopper."""
