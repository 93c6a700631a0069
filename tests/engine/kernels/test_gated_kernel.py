"""The gated product: its plans, that they cover a result, that the kernel compiles, who uses it.

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
from torch import Tensor

from lopa.engine import cuda, fused
from lopa.engine.kernels import gated as module
from lopa.engine.kernels import hopper
from lopa.engine.kernels.gated import (
    PAIR,
    STAGES,
    TOKENS,
    Plan,
    binary,
    gated,
    plan,
    suits,
    turned,
)
from lopa.engine.quantize import QuantizedLinear

DREAM = 18944, 3584
LLADA = 12288, 4096
PROCESSORS = 132
SHARED = 227 * 1024  # bytes that a block may have


def tiles_of(made: Plan, tokens: int, columns: int, processors: int) -> Iterator[tuple[int, int]]:
    """Where tiles begin, as gated.cu counts them: block by block, unit by unit."""
    grid = made.blocks(tokens, columns, processors)
    rows, across = -(-tokens // TOKENS), -(-columns // made.columns)
    deep = rows // 2 if made.share == 1 else rows
    count = deep * (across // 2 if made.share == 2 else across)
    for block in range(grid):
        first, rank = block // PAIR, block % PAIR
        assert first < count  # or it would fetch what is not there
        for unit in range(first, count, grid // PAIR):
            row, column = unit % deep, unit // deep
            row = 2 * row + rank if made.share == 1 else row
            column = 2 * column + rank if made.share == 2 else column
            yield row * TOKENS, column * made.columns


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, None),
        (128, None),  # one tile to a column
        (192, None),
        (223, None),
        (224, Plan(144, 1)),
        (256, Plan(144, 1)),
        (384, Plan(144, 2)),
        (512, Plan(144, 1)),
        (640, Plan(144, 2)),
    ],
)
def test_plans_of_dream(tokens: int, expected: Plan | None) -> None:
    assert plan(tokens, *DREAM, PROCESSORS) == expected


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "processors"),
    [
        (0, *DREAM, PROCESSORS),
        (256, 18944 + 8, 3584, PROCESSORS),
        (256, 18944, 3584 + 32, PROCESSORS),
        (256, 18944, 3 * 64, PROCESSORS),  # fewer chunks than stages
        (256, 4864, 896, PROCESSORS),  # a small model leaves the device idle
        (256, *DREAM, 128),  # the third wave would have few tiles
    ],
)
def test_what_is_left_to_the_library(
    tokens: int, columns: int, inner: int, processors: int
) -> None:
    assert plan(tokens, columns, inner, processors) is None


@pytest.mark.parametrize(("columns", "inner"), [DREAM, LLADA])
@pytest.mark.parametrize("processors", [131, PROCESSORS])
def test_plans_hold_to_the_rules(columns: int, inner: int, processors: int) -> None:
    planned = Counter[bool]()
    for tokens in range(1, 1025):
        made = plan(tokens, columns, inner, processors)
        planned[made is not None] += 1
        if made is None:
            continue
        assert made.columns % 16 == 0
        assert made.shared + 2 * 8 * STAGES <= SHARED
        rows = -(-tokens // TOKENS)
        assert rows >= 2
        assert tokens >= 0.875 * TOKENS * rows
        grid = made.blocks(tokens, columns, processors)
        assert grid <= processors
        assert grid % PAIR == 0
        waves = made.waves(tokens, columns, processors)
        assert columns * rows >= 0.9 * waves * processors * made.columns
        found = Counter(tiles_of(made, tokens, columns, processors))
        assert found == Counter(
            (token, column)
            for token in range(0, tokens, TOKENS)
            for column in range(0, columns, made.columns)
        )
    assert planned[True] > 200
    assert planned[False] > 200


def replay(x: Tensor, weight: Tensor, made: Plan, processors: int) -> tuple[Tensor, Tensor]:
    """The result, and how often each value was written."""
    tokens, columns = len(x), len(weight) // 2
    out, written = torch.zeros(2, tokens, columns, dtype=x.dtype)
    seen = turned(weight).reshape(weight.shape)  # in the order of the map
    more = F.pad(seen, (0, 0, 0, made.columns))  # zeros outside
    lane = torch.arange(32)
    for token, column in tiles_of(made, tokens, columns, processors):
        tile = F.pad(x, (0, 0, 0, TOKENS))[token : token + TOKENS]
        gate = tile @ more[column : column + made.columns].T
        up = tile @ more[column + columns : column + columns + made.columns].T
        value = F.silu(gate) * up
        for top in range(0, TOKENS, 8):  # a thread has a value of every eight rows
            row = top + lane // 4
            for block in range(0, made.columns // 8, 2):
                for pair in range(2):
                    for one in range(2):
                        sums = value[row, 8 * (block + pair) + 2 * (lane % 4) + one]
                        at = column + 8 * block + 4 * (lane % 4) + 2 * pair + one
                        inside = (at < columns) & (token + row < tokens)
                        place = token + row[inside], at[inside]
                        out[place] = sums[inside]
                        written[place] += 1
    return out, written


@pytest.mark.parametrize(
    ("tokens", "columns", "processors", "expected"),
    [
        (250, 368, 4, Plan(96, 1)),
        (380, 560, 4, Plan(144, 2)),
        (500, 288, 4, Plan(144, 1)),
    ],
)
def test_every_value_is_written_once(
    tokens: int, columns: int, processors: int, expected: Plan
) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 320, dtype=torch.float64)
    weight = torch.randn(2 * columns, 320, dtype=torch.float64)
    made = plan(tokens, columns, 320, processors)
    assert made == expected
    out, written = replay(x, weight, made, processors)
    assert torch.equal(written, torch.ones_like(written))
    gate, up = (x @ weight.T).chunk(2, dim=1)
    torch.testing.assert_close(out, F.silu(gate) * up)


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("columns", [144, 128, 96])
def test_compiles_without_loss(columns: int, share: int) -> None:
    code, log = binary(Plan(columns, share))
    assert code.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log  # as where products are made one after the other
    assert "warning" not in log
    assert f"{16 * STAGES} bytes smem" in log


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_what_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    assert not suits(x, weight)
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    made: list[Plan] = []
    monkeypatch.setattr(module, "_kernel", lambda device, plan: made.append(plan) or plan)
    assert suits(x, weight)
    assert made == [Plan(144, 1)]
    assert not suits(bf16(192, 3584), weight)
    assert not suits(x.float(), weight)
    assert not suits(x, weight.half())
    assert not suits(bf16(3584, 256).t(), weight)
    assert not suits(x, bf16(3584, 2 * 18944).t())
    assert len(made) == 1
    with pytest.raises(ValueError, match=r"no kernel for \[192, 3584\] by \[37888, 3584\]"):
        gated(bf16(192, 3584), weight)


def test_where_it_cannot_be_made_the_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **more: object) -> None:
        raise RuntimeError("cuModuleLoadData failed with status 209")

    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(cuda, "Kernel", refused)
    x, weight = bf16(256, 3584), bf16(2 * 18944, 3584)
    module._kernel.cache_clear()
    with pytest.warns(UserWarning, match="go by the library.*cuModuleLoadData failed"):
        assert not suits(x, weight)
    assert not suits(x, weight)  # told once
    with pytest.raises(ValueError, match="no kernel"):
        gated(x, weight)
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


@pytest.mark.parametrize(
    ("tokens", "x_box"),
    [(384, (64, 64)), (250, (128, 64))],  # half of x for each of a pair, and all of it
)
def test_what_is_launched(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    x_box: tuple[int, ...],
) -> None:
    launched: list[Any] = []
    kernel = SimpleNamespace(launch=lambda *given: launched.append(given))
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(module, "_kernel", lambda device, made: kernel)
    monkeypatch.setattr(cuda, "TensorMap", lambda view, box: (tuple(view.shape), box))
    out = gated(bf16(tokens, 3584), bf16(37888, 3584))
    assert out.shape == (tokens, 18944)
    [(grid, x_map, weight_map, to, *sizes)] = launched
    assert grid == (132,)
    assert x_map == ((tokens, 3584), x_box)
    assert weight_map == ((2368, 2, 4, 2, 3584), (9, 2, 4, 2, 64))
    assert to is out
    assert sizes == [tokens, 18944, 3584]


def test_a_step_uses_it_where_nothing_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        asked.append(weight)
        return torch.zeros(len(x), len(weight) // 2)

    monkeypatch.setattr(fused, "gated", noted)
    torch.manual_seed(0)
    h = torch.randn(3, 16)
    gate_up, down = torch.nn.Linear(16, 48, bias=False), torch.nn.Linear(24, 16, bias=False)
    step: Any = SimpleNamespace(_product=lambda linear, x: linear(x).detach())
    plain: Any = SimpleNamespace(gate_up=gate_up, down=down)
    gate, up = gate_up(h).detach().chunk(2, dim=1)
    active: Any = fused.FusedStep._activated(step, plain, h)
    torch.testing.assert_close(active, F.silu(gate) * up)  # the device is not one of those

    monkeypatch.setattr(fused, "suits", lambda x, weight: True)
    assert not fused.FusedStep._activated(step, plain, h).any()  # type: ignore[union-attr]
    assert asked[0] is gate_up.weight
    quantised = SimpleNamespace(gate_up=gate_up, down=QuantizedLinear(down, torch.int8))
    assert fused.FusedStep._activated(step, quantised, h).values.any()  # type: ignore
    assert len(asked) == 1
