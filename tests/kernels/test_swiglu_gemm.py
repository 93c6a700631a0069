"""The SwiGLU GEMM: its tilings cover a result, the kernel compiles, and where it is supported.

There is no interpreter for CUDA: what the kernel does with a tile is done again here in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cuda_support import Launches, bf16, check_compiled
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper import swiglu_gemm as module
from lopa.kernels.hopper.common import CHUNK, arrange_rows
from lopa.kernels.hopper.swiglu_gemm import (
    PAIR,
    ROWS,
    GemmTiling,
    binary,
    choose_tiling,
    supports,
    swiglu_gemm,
)

DREAM = 2 * 18944, 3584
LLADA = 2 * 12288, 4096
HEAD = 152064, 3584
SMS = 132
SHARED = 227 * 1024  # bytes of a block


def tiles_of(tiling: GemmTiling, tokens: int, rows: int, sms: int) -> Iterator[tuple[int, int]]:
    """Where tiles begin, token and row, as swiglu_gemm.cu counts them: by block, then by unit."""
    grid = tiling.blocks(tokens, rows, sms)
    deep = -(-tokens // (PAIR * tiling.tokens))
    count = deep * -(-rows // ROWS)
    for block in range(grid):
        first, rank = block // PAIR, block % PAIR
        assert first < count  # else it would read outside the weight
        for unit in range(first, count, grid // PAIR):
            yield tiling.tokens * (unit % deep * PAIR + rank), ROWS * (unit // deep)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, None),
        (128, None),
        (191, None),
        (192, GemmTiling(96, True)),
        (256, GemmTiling(128, True)),
        (257, None),  # more than a tenth would be padding
        (272, GemmTiling(144, True)),
        (320, GemmTiling(160, True)),
        (512, GemmTiling(256, True)),
        (640, GemmTiling(160, True)),
        (1024, GemmTiling(256, True)),
    ],
)
def test_tilings_of_dream(tokens: int, expected: GemmTiling | None) -> None:
    assert choose_tiling(tokens, *DREAM, SMS, gated=True) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(256, None), (336, None), (352, GemmTiling(176, False)), (512, GemmTiling(256, False))],
)
def test_tilings_of_the_head(tokens: int, expected: GemmTiling | None) -> None:
    assert choose_tiling(tokens, *HEAD, SMS, gated=False) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "inner", "sms"),
    [
        (0, *DREAM, SMS),
        (256, 37888 + 8, 3584, SMS),
        (256, 37888, 3584 + 32, SMS),
        (256, 37888, 3 * CHUNK, SMS),  # fewer chunks than stages
        (256, 2 * 4864, 896, SMS),  # a small model leaves the device idle
        (256, *DREAM, 118),  # the fourth wave would have few tiles
    ],
)
def test_what_is_left_to_cublaslt(tokens: int, rows: int, inner: int, sms: int) -> None:
    assert choose_tiling(tokens, rows, inner, sms, gated=True) is None


def test_registers() -> None:
    groups = [module._PRODUCER_REGISTERS, *[module._CONSUMER_REGISTERS] * (ROWS // 64)]
    assert (
        128 * sum(groups) <= module._THREADS * hopper.registers_per_thread(module._THREADS) <= 65536
    )


@pytest.mark.parametrize(
    ("rows", "inner", "gated"), [(*DREAM, True), (*LLADA, True), (*HEAD, False)]
)
@pytest.mark.parametrize("sms", [114, SMS])
def test_tilings_hold_to_the_rules(rows: int, inner: int, gated: bool, sms: int) -> None:
    found_one = Counter[bool]()
    for tokens in [*range(1, 1281, 5), *range(1290, 6000, 117)]:
        tiling = choose_tiling(tokens, rows, inner, sms, gated=gated)
        found_one[tiling is not None] += 1
        if tiling is None:
            continue
        assert tiling.tokens % (8 * tiling.parts) == 0
        assert tiling.tokens // tiling.parts <= 192
        assert tiling.shared + 2 * 8 * tiling.stages <= SHARED
        assert tiling.stages >= 4
        assert (
            tiling.tokens // 2 + 24 <= module._CONSUMER_REGISTERS
        )  # the sums, and what else there is
        grid = tiling.blocks(tokens, rows, sms)
        assert grid <= sms
        assert grid % PAIR == 0
        found = Counter(tiles_of(tiling, tokens, rows, sms))
        busiest = -(-found.total() // grid) * tiling.tokens * ROWS
        assert tiling.time(tokens, rows, sms) == busiest
        assert tokens * rows >= 0.9 * busiest * sms
        assert found == Counter(
            (token, row)
            for token in range(0, tokens, tiling.tokens)
            for row in range(0, rows, ROWS)
        )
    assert found_one[True] > 50
    assert found_one[False] > 20


def replay(x: Tensor, weight: Tensor, tiling: GemmTiling, sms: int) -> tuple[Tensor, Tensor]:
    """The result, and how often each value was written."""
    tokens, rows = len(x), len(weight)
    columns = rows // 2 if tiling.gated else rows
    out, written = torch.zeros(2, tokens, columns, dtype=x.dtype)

    def put(token: Tensor, column: Tensor, value: Tensor) -> None:
        token, column = torch.broadcast_tensors(token, column)
        inside = (token < tokens) & (column < columns)
        place = token[inside], column[inside]
        out[place] = value[inside]
        written.index_put_(place, torch.ones((), dtype=x.dtype), accumulate=True)

    seen = arrange_rows(weight, gated=tiling.gated).reshape(weight.shape)  # in the order of the map
    weights = F.pad(seen, (0, 0, 0, ROWS))  # zeros outside
    inputs = F.pad(x, (0, 0, 0, 2 * tiling.tokens))
    lane = torch.arange(32)
    high, low = lane // 4, lane % 4
    # Axes: warp, eight tokens, lane.
    warp = torch.arange(ROWS // 16)[:, None, None]
    eight = torch.arange(0, tiling.tokens, 8)[None, :, None]
    for token, row in tiles_of(tiling, tokens, rows, sms):
        sums = weights[row : row + ROWS] @ inputs[token : token + tiling.tokens].T
        # A thread's sums of wgmma: two tokens, of a row and of the eighth after it.
        v = [
            sums[16 * warp + high + 8 * below, eight + 2 * low + one]
            for below in range(2)
            for one in range(2)
        ]
        if tiling.gated:
            transposed = torch.zeros(*v[0].shape[:2], 8, 8, dtype=x.dtype)  # …, token, column
            transposed[..., 2 * low, high] = F.silu(v[0]) * v[2]
            transposed[..., 2 * low + 1, high] = F.silu(v[1]) * v[3]
            for one in range(2):
                at = row // 2 + 8 * warp + 2 * low + one
                put(token + eight + high, at, transposed[..., high, 2 * low + one])
        else:
            at = row + 16 * warp + 2 * high
            for one in range(2):
                put(token + eight + 2 * low + one, at, v[one])
                put(token + eight + 2 * low + one, at + 1, v[2 + one])
    return out, written


@pytest.mark.parametrize(
    ("tokens", "rows", "sms", "expected"),
    [
        (250, 2 * 376, 8, GemmTiling(128, True)),
        (380, 2 * 560, 4, GemmTiling(192, True)),
        (560, 2 * 184, 8, GemmTiling(144, True)),
        (380, 560, 6, GemmTiling(192, False)),
        (500, 752, 8, GemmTiling(256, False)),
        (420, 560, 6, GemmTiling(224, False)),
    ],
)
def test_every_value_is_written_once(
    tokens: int, rows: int, sms: int, expected: GemmTiling
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 384, dtype=torch.float64)
    weight = torch.randn(rows, 384, dtype=torch.float64)
    tiling = choose_tiling(tokens, rows, 384, sms, gated=expected.gated)
    assert tiling == expected
    out, written = replay(x, weight, tiling, sms)
    assert torch.equal(written, torch.ones_like(written))
    product = x @ weight.T
    if tiling.gated:
        gate, up = product.chunk(2, dim=1)
        product = F.silu(gate) * up
    torch.testing.assert_close(out, product)


@pytest.mark.parametrize(
    "tiling",
    [
        *(
            GemmTiling(256, True),
            GemmTiling(192, True),
            GemmTiling(160, True),
            GemmTiling(96, True),
        ),
        *(GemmTiling(240, False), GemmTiling(176, False)),
    ],
)
def test_compiles_without_spills(tiling: GemmTiling) -> None:
    built = binary(tiling)
    check_compiled(built, module._THREADS)
    assert f"{16 * tiling.stages} bytes smem" in built.log


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    assert not supports(x, weight, gated=True)
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "sm_count", lambda device: SMS)
    loaded: list[GemmTiling] = []

    def kernel(device: torch.device, tiling: GemmTiling) -> str:
        loaded.append(tiling)
        return "a kernel"

    monkeypatch.setattr(module, "_kernel", kernel)
    assert supports(x, weight, gated=True)
    assert loaded == [GemmTiling(128, True)]
    assert not supports(bf16(128, 3584), weight, gated=True)
    assert not supports(x, weight, gated=False)  # too few for it
    assert not supports(x.float(), weight, gated=True)
    assert not supports(x, weight.half(), gated=True)
    assert not supports(bf16(3584, 256).t(), weight, gated=True)
    assert not supports(x, bf16(3584, 2 * 18944).t(), gated=True)
    assert len(loaded) == 1
    with pytest.raises(ValueError, match=r"no kernel for \[128, 3584\] by \[37888, 3584\]"):
        swiglu_gemm(bf16(128, 3584), weight, gated=True)


def test_without_a_kernel_cublaslt_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **more: object) -> None:
        raise RuntimeError("cuModuleLoadData failed with status 209")

    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "sm_count", lambda device: SMS)
    monkeypatch.setattr(nvrtc, "Kernel", refused)
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    module._kernel.cache_clear()
    with pytest.warns(UserWarning, match="go by cuBLASLt.*cuModuleLoadData failed"):
        assert not supports(x, weight, gated=True)
    assert not supports(x, weight, gated=True)  # warns once
    with pytest.raises(ValueError, match="no kernel"):
        swiglu_gemm(x, weight, gated=True)
    module._kernel.cache_clear()


def test_available_on_hopper_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    available = hopper.available.__wrapped__
    assert available(torch.device("cuda"))
    assert not available(torch.device("cpu"))
    capability = (10, 0)
    assert not available(torch.device("cuda"))
    capability = (9, 0)
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    assert not available(torch.device("cuda"))


@pytest.mark.parametrize(("gated", "columns"), [(True, 18944), (False, 37888)])
def test_arguments(monkeypatch: pytest.MonkeyPatch, gated: bool, columns: int) -> None:
    kernel = Launches("swiglu_gemm", monkeypatch)
    monkeypatch.setattr(hopper, "sm_count", lambda device: SMS)
    monkeypatch.setattr(module, "_kernel", lambda device, tiling: kernel)
    for tokens in (352, 500, 1024):
        out = swiglu_gemm(bf16(tokens, 3584), bf16(37888, 3584), gated=gated)
        assert out.shape == (tokens, columns)
    assert kernel.count == 3
