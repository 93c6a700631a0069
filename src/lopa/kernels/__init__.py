"""Kernels and fast linear layers: Triton for any NVIDIA GPU, CUDA for Hopper.

`quantize` and `scaled` are plain torch, for everybody. The rest needs the package triton or a GPU:
`runner.backend_triton` imports `fast_linear`, `fast_mixture` and `triton`, `runner.backend` imports
`compressed_linear` for it. `hopper` and `cublaslt` are imported inside this package only. In turn
it imports the modules of `models.transformer`.
"""

PAGE = 64  # tokens of a page of the KV cache: what a tile of the attention kernel reads at once
