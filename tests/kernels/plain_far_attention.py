"""cuDNN's attention to the far part of a prefix as its equation, with chunks of a few pages."""

from __future__ import annotations

import pytest
from torch import Tensor

from lopa.kernels import PAGE, prefix_attention


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ keys.mT * q.shape[-1] ** -0.5
    mixed = scores.softmax(-1) @ values
    return mixed.to(q.dtype), scores.logsumexp(-1, keepdim=True)


def small_chunks(monkeypatch: pytest.MonkeyPatch, pages: int = 2) -> None:
    monkeypatch.setattr(prefix_attention, "_with_lse", with_lse)
    monkeypatch.setattr(prefix_attention, "CHUNK", pages * PAGE)
    monkeypatch.setattr(prefix_attention, "_SHORTEST_PREFIX", pages * PAGE)
    monkeypatch.setattr(prefix_attention, "_FEWEST_TOKENS", 1)
