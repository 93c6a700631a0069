"""What a round reads and computes, against figures counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa.bench.ceilings import Ceilings
from lopa.bench.round_work import RoundWork
from lopa.models.checkpoint import model_config

BF16 = torch.bfloat16
MINI = model_config("dummy:llada2-mini")


def test_a_mixture_reads_the_experts_that_are_touched() -> None:
    shape = {"rows": 1, "window": 32, "prefix": 768}
    expert = 3 * 2048 * 512
    few, many = (RoundWork.of(MINI, BF16, **shape, touched=n) for n in (100.0, 163.0))
    assert many.bytes - few.bytes == 19 * 63 * expert * 2
    assert many.flops == few.flops
    # Attention and shared experts of 20 layers, a dense one, routers, the head, 800 tokens' keys.
    attention = 2048 * 3072 + 2048 * 2048 + 2 * 2048 + 2 * 128
    dense = 20 * attention + 19 * (expert + 256 * 2049) + 3 * 2048 * 5120
    cached = 800 * 20 * 2 * 4 * 128 * 2
    head = 157184 * 2048
    assert few.bytes == pytest.approx(2 * (dense + head + 19 * 100 * expert) + cached)
    used = dense + head + 19 * 8 * expert
    assert few.flops == pytest.approx(64 * used + 4 * 32 * 800 * 16 * 128 * 20)


def test_by_even_routing_32_tokens_touch_163_of_256() -> None:
    shape = {"rows": 1, "window": 32, "prefix": 768}
    even = RoundWork.of(MINI, BF16, **shape)
    known = RoundWork.of(MINI, BF16, **shape, touched=163.2)
    assert even.bytes == pytest.approx(known.bytes, rel=1e-3)


def test_quantised_weights_are_a_byte_each() -> None:
    dense = replace(model_config("dummy:dream-7b"))
    shape = {"rows": 8, "window": 64, "prefix": 0}
    plain, quantised = (RoundWork.of(dense, BF16, **shape, is_quantised=q) for q in (False, True))
    layers = sum(map(dense.layer_parameters, range(dense.layers)))
    assert plain.bytes - quantised.bytes == layers
    assert plain.flops == quantised.flops + quantised.quantised_flops


def test_a_long_prefix_is_in_the_floor() -> None:
    ceilings = Ceilings(4.3e12, 790e12)
    dense = model_config("dummy:dream-7b")
    near, far = (
        ceilings.floor(RoundWork.of(dense, BF16, rows=8, window=64, prefix=prefix))
        for prefix in (768, 32768)
    )
    more = 4 * 512 * 32000 * dense.heads * dense.head_dim * dense.layers / 790e12
    assert far - near == pytest.approx(more)
