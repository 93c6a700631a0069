"""Kernels and fast linear layers: Triton for any NVIDIA GPU, CUDA for Hopper.

`quantize` and `scaled` are plain torch, and `compilation` imports Triton only when it is used:
these are for everybody. The rest needs the package triton or a GPU: `runner.backend_triton`, with
its `fused_layers` and `fused_head`, imports `fast_linear`, `fast_mixture` and `triton`,
`runner.backend` imports `compressed_linear` for it. `hopper` and `cublaslt` are imported inside
this package, and by the command line where it says what is used. In turn it imports the modules of
`models.transformer`.
"""

PAGE = 64  # tokens of a page of the KV cache: what a tile of the attention kernel reads at once
