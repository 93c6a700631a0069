"""Products by pairs: their plans, that they cover a result, that the kernel compiles, who uses it.

What the kernel does with a tile is done again here in torch: there is no interpreter for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_support import bf16, check_compiled
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import nvrtc as cuda
from lopa.kernels.hopper import swiglu_gemm as module
from lopa.kernels.hopper.common import CHUNK, arranged
from lopa.kernels.hopper.swiglu_gemm import PAIR, ROWS, Plan, binary, paired, plan, suits
from lopa.kernels.quantize import QuantizedLinear
from lopa.runner import backend_triton as fused

DREAM = 2 * 18944, 3584
LLADA = 2 * 12288, 4096
HEAD = 152064, 3584
PROCESSORS = 132
SHARED = 227 * 1024  # bytes that a block may have


def tiles_of(made: Plan, tokens: int, rows: int, processors: int) -> Iterator[tuple[int, int]]:
    """Where tiles begin, token and row, as paired.cu counts them: block by block, unit by unit."""
    grid = made.blocks(tokens, rows, processors)
    deep = -(-tokens // (PAIR * made.tokens))
    count = deep * -(-rows // ROWS)
    for block in range(grid):
        first, rank = block // PAIR, block % PAIR
        assert first < count  # or it would fetch what is not there
        for unit in range(first, count, grid // PAIR):
            yield made.tokens * (unit % deep * PAIR + rank), ROWS * (unit // deep)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, None),
        (128, None),
        (191, None),
        (192, Plan(96, True)),
        (256, Plan(128, True)),
        (257, None),  # more than a tenth would be padding
        (272, Plan(144, True)),
        (320, Plan(160, True)),
        (512, Plan(256, True)),
        (640, Plan(160, True)),
        (1024, Plan(256, True)),
    ],
)
def test_plans_of_dream(tokens: int, expected: Plan | None) -> None:
    assert plan(tokens, *DREAM, PROCESSORS, gated=True) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(256, None), (336, None), (352, Plan(176, False)), (512, Plan(256, False))],
)
def test_plans_of_the_head(tokens: int, expected: Plan | None) -> None:
    assert plan(tokens, *HEAD, PROCESSORS, gated=False) == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "inner", "processors"),
    [
        (0, *DREAM, PROCESSORS),
        (256, 37888 + 8, 3584, PROCESSORS),
        (256, 37888, 3584 + 32, PROCESSORS),
        (256, 37888, 3 * CHUNK, PROCESSORS),  # fewer chunks than stages
        (256, 2 * 4864, 896, PROCESSORS),  # a small model leaves the device idle
        (256, *DREAM, 118),  # the fourth wave would have few tiles
    ],
)
def test_what_is_left_to_the_library(tokens: int, rows: int, inner: int, processors: int) -> None:
    assert plan(tokens, rows, inner, processors, gated=True) is None


def test_registers() -> None:
    groups = [module._COPYING, *[module._MULTIPLYING] * (ROWS // 64)]
    assert 128 * sum(groups) <= module._THREADS * hopper.registers(module._THREADS) <= 65536


@pytest.mark.parametrize(
    ("rows", "inner", "gated"), [(*DREAM, True), (*LLADA, True), (*HEAD, False)]
)
@pytest.mark.parametrize("processors", [114, PROCESSORS])
def test_plans_hold_to_the_rules(rows: int, inner: int, gated: bool, processors: int) -> None:
    planned = Counter[bool]()
    for tokens in [*range(1, 1281, 5), *range(1290, 6000, 117)]:
        made = plan(tokens, rows, inner, processors, gated=gated)
        planned[made is not None] += 1
        if made is None:
            continue
        assert made.tokens % (8 * made.parts) == 0
        assert made.tokens // made.parts <= 192
        assert made.shared + 2 * 8 * made.stages <= SHARED
        assert made.stages >= 4
        assert made.tokens // 2 + 24 <= module._MULTIPLYING  # the sums, and what else there is
        grid = made.blocks(tokens, rows, processors)
        assert grid <= processors
        assert grid % PAIR == 0
        found = Counter(tiles_of(made, tokens, rows, processors))
        busiest = -(-found.total() // grid) * made.tokens * ROWS
        assert made.time(tokens, rows, processors) == busiest
        assert tokens * rows >= 0.9 * busiest * processors
        assert found == Counter(
            (token, row) for token in range(0, tokens, made.tokens) for row in range(0, rows, ROWS)
        )
    assert planned[True] > 50
    assert planned[False] > 20


def replay(x: Tensor, weight: Tensor, made: Plan, processors: int) -> tuple[Tensor, Tensor]:
    """The result, and how often each value was written."""
    tokens, rows = len(x), len(weight)
    columns = rows // 2 if made.gated else rows
    out, written = torch.zeros(2, tokens, columns, dtype=x.dtype)

    def put(token: Tensor, column: Tensor, value: Tensor) -> None:
        inside = (token < tokens) & (column < columns)
        place = token[inside], column[inside]
        out[place] = value[inside]
        written[place] += 1

    seen = arranged(weight, gated=made.gated).reshape(weight.shape)  # in the order of the map
    more = F.pad(seen, (0, 0, 0, ROWS))  # zeros outside
    far = F.pad(x, (0, 0, 0, 2 * made.tokens))
    lane = torch.arange(32)
    high, low = lane // 4, lane % 4
    for token, row in tiles_of(made, tokens, rows, processors):
        sums = more[row : row + ROWS] @ far[token : token + made.tokens].T
        for warp in range(ROWS // 16):
            for eight in range(0, made.tokens, 8):
                # What a thread has of wgmma: two tokens, of a row and of the eighth after it.
                v = [
                    sums[16 * warp + high + 8 * below, eight + 2 * low + one]
                    for below in range(2)
                    for one in range(2)
                ]
                if made.gated:
                    turned = torch.zeros(8, 8, dtype=x.dtype)  # token, column
                    turned[2 * low, high] = F.silu(v[0]) * v[2]
                    turned[2 * low + 1, high] = F.silu(v[1]) * v[3]
                    for one in range(2):
                        at = row // 2 + 8 * warp + 2 * low + one
                        put(token + eight + high, at, turned[high, 2 * low + one])
                else:
                    at = row + 16 * warp + 2 * high
                    for one in range(2):
                        put(token + eight + 2 * low + one, at, v[one])
                        put(token + eight + 2 * low + one, at + 1, v[2 + one])
    return out, written


@pytest.mark.parametrize(
    ("tokens", "rows", "processors", "expected"),
    [
        (250, 2 * 376, 8, Plan(128, True)),
        (380, 2 * 560, 4, Plan(192, True)),
        (560, 2 * 184, 8, Plan(144, True)),
        (380, 560, 6, Plan(192, False)),
        (500, 752, 8, Plan(256, False)),
        (420, 560, 6, Plan(224, False)),
    ],
)
def test_every_value_is_written_once(
    tokens: int, rows: int, processors: int, expected: Plan
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 384, dtype=torch.float64)
    weight = torch.randn(rows, 384, dtype=torch.float64)
    made = plan(tokens, rows, 384, processors, gated=expected.gated)
    assert made == expected
    out, written = replay(x, weight, made, processors)
    assert torch.equal(written, torch.ones_like(written))
    product = x @ weight.T
    if made.gated:
        gate, up = product.chunk(2, dim=1)
        product = F.silu(gate) * up
    torch.testing.assert_close(out, product)


@pytest.mark.parametrize(
    "made",
    [
        *(Plan(256, True), Plan(192, True), Plan(160, True), Plan(96, True)),
        *(Plan(240, False), Plan(176, False)),
    ],
)
def test_compiles_without_loss(made: Plan) -> None:
    built = binary(made)
    check_compiled(built, module._THREADS)
    assert f"{16 * made.stages} bytes smem" in built.log


def test_what_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    assert not suits(x, weight, gated=True)
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    made: list[Plan] = []
    monkeypatch.setattr(module, "_kernel", lambda device, plan: made.append(plan) or plan)
    assert suits(x, weight, gated=True)
    assert made == [Plan(128, True)]
    assert not suits(bf16(128, 3584), weight, gated=True)
    assert not suits(x, weight, gated=False)  # too few for it
    assert not suits(x.float(), weight, gated=True)
    assert not suits(x, weight.half(), gated=True)
    assert not suits(bf16(3584, 256).t(), weight, gated=True)
    assert not suits(x, bf16(3584, 2 * 18944).t(), gated=True)
    assert len(made) == 1
    with pytest.raises(ValueError, match=r"no kernel for \[128, 3584\] by \[37888, 3584\]"):
        paired(bf16(128, 3584), weight, gated=True)


def test_where_it_cannot_be_made_the_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **more: object) -> None:
        raise RuntimeError("cuModuleLoadData failed with status 209")

    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(cuda, "Kernel", refused)
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    module._kernel.cache_clear()
    with pytest.warns(UserWarning, match="go by the library.*cuModuleLoadData failed"):
        assert not suits(x, weight, gated=True)
    assert not suits(x, weight, gated=True)  # told once
    with pytest.raises(ValueError, match="no kernel"):
        paired(x, weight, gated=True)
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
    monkeypatch.setattr(cuda, "compiler", lambda: None)
    assert not available(torch.device("cuda"))


@pytest.mark.parametrize(("gated", "columns"), [(True, 18944), (False, 37888)])
def test_what_is_launched(monkeypatch: pytest.MonkeyPatch, gated: bool, columns: int) -> None:
    launched: list[Any] = []
    kernel = SimpleNamespace(launch=lambda *given: launched.append(given))
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(module, "_kernel", lambda device, made: kernel)
    monkeypatch.setattr(cuda, "TensorMap", lambda view, box: (tuple(view.shape), box))
    out = paired(bf16(500, 3584), bf16(37888, 3584), gated=gated)
    assert out.shape == (500, columns)
    [(grid, x_map, weight_map, to, *sizes)] = launched
    assert grid == (132,)
    assert x_map == ((500, 3584), (256, 64))
    assert weight_map == ((2368, 2, 8, 3584), (6, 2, 8, 64))
    assert to is out
    assert sizes == [500, columns, 3584]


def test_a_step_uses_it_where_nothing_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def noted(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
        asked.append(weight)
        return torch.zeros(len(x), len(weight) // (2 if gated else 1))

    monkeypatch.setattr(fused, "paired", noted)
    torch.manual_seed(0)
    h = torch.randn(3, 16)
    gate_up, down = torch.nn.Linear(16, 48, bias=False), torch.nn.Linear(24, 16, bias=False)
    step: Any = SimpleNamespace(_product=lambda linear, x: linear(x).detach())
    plain: Any = SimpleNamespace(gate_up=gate_up, down=down)
    gate, up = gate_up(h).detach().chunk(2, dim=1)
    active: Any = fused.FusedStep._activated(step, plain, h)
    torch.testing.assert_close(active, F.silu(gate) * up)  # the device is not one of those

    monkeypatch.setattr(fused, "suits", lambda x, weight, gated: True)
    assert not fused.FusedStep._activated(step, plain, h).any()  # type: ignore[union-attr]
    assert asked[0] is gate_up.weight
    quantised = SimpleNamespace(gate_up=gate_up, down=QuantizedLinear(down, torch.int8))
    assert fused.FusedStep._activated(step, quantised, h).values.any()  # type: ignore
    assert len(asked) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_logits_go_by_it_where_they_suit(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 16), torch.randn(40, 16)
    model = SimpleNamespace(head_weight=weight, config=SimpleNamespace(tied_head=tied), head="head")
    step: Any = SimpleNamespace(
        model=model,
        _product=lambda linear, x: (linear, x),
        _products=lambda x, weight: (weight, x),
    )
    taken: Any = fused.FusedStep._logits(step, hidden)
    assert taken[0] is (weight if tied else "head")
    monkeypatch.setattr(fused, "suits", lambda x, weight, gated: not gated)
    monkeypatch.setattr(fused, "paired", lambda x, weight, gated: (x, weight, gated))
    assert fused.FusedStep._logits(step, hidden) == (hidden, weight, False)  # type: ignore[comparison-overlap]
