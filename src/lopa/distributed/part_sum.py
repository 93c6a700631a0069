"""The sum over the ranks that hold the parts of a replica, as a step of the model.

nccl sums on the device, inside a CUDA graph too. gloo sums on the host: where ranks share a GPU,
the device copies to a pinned buffer, the host sums it when the device has got there, and the device
copies it back. A CUDA graph has both copies, in two pieces between which the host sums.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lopa.distributed.mesh import Mesh
from lopa.kernels import compilation
from lopa.runner.graph_pieces import on_host


class PartSum:
    """A `SumParts`. All ranks of the replica call it in the same order, with the same shapes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._crosses_host = mesh.backend == "gloo" and mesh.device.type == "cuda"
        # Pinned, by size. Never freed: graphs hold the addresses. All share them, which a stream
        # runs one after the other.
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, values: Tensor) -> Tensor:
        if compilation.is_noting():
            return values
        if not self._crosses_host:
            return self.mesh.sum_over_parts(values)
        buffer = self._buffer(values)
        buffer.copy_(values, non_blocking=True)
        on_host(partial(self._sum, buffer))
        return values.copy_(buffer, non_blocking=True)

    def _sum(self, buffer: Tensor) -> None:
        torch.cuda.current_stream(self.mesh.device).synchronize()
        self.mesh.sum_over_parts(buffer)

    @torch.inference_mode(False)  # it is written in and out of inference mode
    def _buffer(self, values: Tensor) -> Tensor:
        """Of the same shape and dtype."""
        size = values.numel() * values.element_size()
        rounded = 1 << (size - 1).bit_length()  # few buffers, of at most four times the largest
        if rounded not in self._buffers:
            self._buffers[rounded] = torch.empty(rounded, dtype=torch.uint8, pin_memory=True)
        return self._buffers[rounded][:size].view(values.dtype).view(values.shape)
