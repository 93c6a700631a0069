"""Packed weights: that nothing is lost, who has which part, that the kernel compiles, who uses it.

What the kernel does with a record is done again here in Python: there is no interpreter for it.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_support import bf16, check_compiled
from safetensors import safe_open
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import compressed_gemm as module
from lopa.kernels.hopper import nvrtc as cuda
from lopa.kernels.hopper.common import CHUNK, GROUP, arranged
from lopa.kernels.hopper.compressed_gemm import (
    PATCHES,
    RECORD,
    TOKENS,
    Packed,
    Plan,
    binary,
    laid_out,
    packed,
    packed_bytes,
    plan,
    records,
)

PROCESSORS = 132
SHARED = 227 * 1024  # bytes that a block may have


def unpacked(record: Tensor) -> Tensor:
    """[RECORD] bytes → [lane, slot] bits, as packed.cu does it."""
    low = record[:1024].view(2, 32, 16).transpose(0, 1).reshape(32, 32).int()
    high = record[1024:1536].contiguous().view(torch.int32).long().view(32, 4) & 0xFFFFFFFF
    words = record[1536:].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    base, patches = int(words[0]) & 0xFF, int(words[0]) >> 8
    turned = high >> 4 | (high & 15) << 28
    found = torch.zeros(32, 32, dtype=torch.int64)
    for step in range(4):
        for half, word in enumerate((high[:, step], turned[:, step])):
            upper = (word & 0x87878787) + base * 0x01010101
            for i in range(4):
                slot = 8 * step + 4 * half + i
                found[:, slot] = low[:, slot] | (upper >> 8 * i & 0xFF) << 8
    for word in words[1 : 1 + patches].tolist():
        found[word >> 24, word >> 16 & 31] = word & 0xFFFF
    return found


def fragments(chunk: Tensor) -> Tensor:
    """[16, 64] → [lane, slot]: the left factor of wgmma, as PTX describes a thread's registers."""
    found = torch.zeros(32, 32, dtype=chunk.dtype)
    for lane in range(32):
        for slot in range(32):
            step, register, second = slot // 8, slot // 2 % 4, slot % 2
            row = lane // 4 + 8 * (register % 2)
            column = 16 * step + 2 * (lane % 4) + 8 * (register // 2) + second
            found[lane, slot] = chunk[row, column]
    return found


def bits_of(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).long() & 0xFFFF


def normal(*shape: int, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def special(*shape: int) -> Tensor:
    """With values that no base reaches together with the others."""
    weight = normal(*shape)
    weight[3, 5], weight[4, 70], weight[9, 6], weight[0, 9] = 1e-30, 0.0, -0.0, -300.0
    weight[1, 8] = 1e-39  # less than the least normal value
    return weight


@pytest.mark.parametrize("kind", [normal, special])
def test_nothing_is_lost(kind: Any) -> None:
    groups = arranged(kind(64, 192), gated=False)
    found = records(groups)
    assert found is not None
    assert found.shape == (4, 3, RECORD)
    assert found.dtype is torch.uint8
    groups = groups.flatten(1, 2)
    for group in range(4):
        for chunk in range(3):
            expected = bits_of(groups[group, :, CHUNK * chunk : CHUNK * (chunk + 1)].contiguous())
            assert torch.equal(unpacked(found[group, chunk]), fragments(expected))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5e-38, 3e38, float("inf"), float("nan")])
def test_records_of_one_value(value: float) -> None:
    groups = torch.full((1, GROUP, CHUNK), value).bfloat16()
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[0, 0, 1537] == 0  # none is out of reach
    assert torch.equal(unpacked(found[0, 0]), fragments(bits_of(groups[0])))


def test_few_weights_are_out_of_reach() -> None:
    found = records(arranged(normal(512, 2048), gated=True))
    assert found is not None
    missed = found[..., 1537].sum()
    assert 0 < missed < 512 * 2048 / 5000


def test_as_many_as_there_is_room_for_and_no_more() -> None:
    groups = torch.ones(2, GROUP, CHUNK).bfloat16()
    groups[1, 2, :PATCHES] = 1e-20
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[:, 0, 1537].tolist() == [0, PATCHES]
    assert torch.equal(unpacked(found[1, 0]), fragments(bits_of(groups[1])))
    groups[1, 15, 63] = 1e20
    assert records(groups.unflatten(1, (2, 8))) is None


def test_of_large_and_small_weights_the_fewer_are_out_of_reach() -> None:
    groups = torch.full((1, GROUP, CHUNK), 0.01).bfloat16()
    groups[0, 0, :5] = 3000.0
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[0, 0, 1537] == 5


def test_rows_of_a_group() -> None:
    weight = torch.arange(64)[:, None].expand(64, 2)
    plain, gated = (arranged(weight, gated=gated)[..., 0] for gated in (False, True))
    assert plain[1].tolist() == [[16 + 2 * q for q in range(8)], [17 + 2 * q for q in range(8)]]
    assert gated[1].tolist() == [[8 + q for q in range(8)], [40 + q for q in range(8)]]


DREAM = {
    "gate_up": ((37888, 3584, True), Plan(18, 132, 1, True)),
    "down": ((3584, 18944, False), Plan(14, 16, 8, False)),
    "head": ((152064, 3584, False), Plan(18, 528, 1, False)),
    "qkv": ((4608, 3584, False), None),  # so small that the library is as fast
    "out": ((3584, 3584, False), None),
}


@pytest.mark.parametrize("name", DREAM)
def test_plans_of_dream(name: str) -> None:
    (rows, inner, gated), expected = DREAM[name]
    assert plan(rows, inner, PROCESSORS, gated=gated) == expected


@pytest.mark.parametrize(
    ("rows", "inner"),
    [(37888 + 16, 3584), (37888, 3584 + 32), (16384, 2047 * 2), (160, 64 * 4000)],
)
def test_what_is_left_to_the_library(rows: int, inner: int) -> None:
    assert plan(rows, inner, PROCESSORS, gated=False) is None


def test_plans_hold_to_the_rules() -> None:
    shapes = [
        (rows, inner) for rows in range(2048, 60000, 1952) for inner in range(512, 20000, 832)
    ]
    shapes += [(24576, 4096), (4096, 12288), (126464, 4096)]
    found = [(s, plan(*s, p, gated=False), p) for s in shapes for p in (78, 114, 131, PROCESSORS)]
    made = [(shape, one, processors) for shape, one, processors in found if one is not None]
    assert len(made) > 300
    for (rows, inner), one, processors in made:
        groups = rows // GROUP
        assert (one.units - 1) * one.groups < groups <= one.units * one.groups
        assert 12 <= one.groups <= 20
        assert inner // CHUNK // one.split >= one.stages >= 5
        assert one.shared + 16 * one.stages + 16 <= SHARED
        assert one.threads == 128 * (1 + -(-one.groups // 4)) <= 768
        # No more than a processor has, and than the block is launched with.
        assert one.launched * one.threads <= 65536
        given = 128 * 40 + (one.threads - 128) * one.multiplying
        assert one.launched < one.multiplying
        assert given <= one.launched * one.threads
        if one.split > 1:
            assert one.blocks(processors) == one.units * one.split <= processors
            assert one.parts == one.units * one.split * one.groups * GROUP * TOKENS * 4
        else:
            assert one.blocks(processors) == min(one.units, processors)
            assert one.parts == 0


def replay(x: Tensor, data: Tensor, made: Plan, columns: int) -> tuple[Tensor, Tensor]:
    """The product as packed.cu makes it, and how often each value is written."""
    tokens, inner = x.shape
    out, written = torch.zeros(2, tokens, columns, dtype=x.dtype)
    chunks = inner // CHUNK
    back = fragments(torch.arange(GROUP * CHUNK).view(GROUP, CHUNK)).flatten().argsort()
    for unit in range(made.units):
        for group in range(made.groups):
            sums = torch.zeros(GROUP, tokens, dtype=x.dtype)
            for part in range(made.split):
                for chunk in range(chunks * part // made.split, chunks * (part + 1) // made.split):
                    bits = unpacked(data[unit, chunk, group]).flatten()[back].view(GROUP, CHUNK)
                    weight = bits.to(torch.int16).view(torch.bfloat16).to(x.dtype)
                    sums += weight @ x[:, CHUNK * chunk : CHUNK * (chunk + 1)].T
            at = unit * made.groups + group
            for q in range(8):
                top, bottom = sums[q], sums[q + 8]
                if made.gated:
                    values = {8 * at + q: F.silu(top) * bottom}
                else:
                    values = {16 * at + 2 * q: top, 16 * at + 2 * q + 1: bottom}
                for column, value in values.items():
                    if column < columns:
                        out[:, column] = value
                        written[:, column] += 1
    return out, written


@pytest.mark.parametrize(
    "made", [Plan(3, 2, 1, True), Plan(2, 3, 3, False), Plan(5, 1, 1, False), Plan(2, 3, 2, True)]
)
def test_every_value_is_written_once(made: Plan) -> None:
    weight = special(80, 320)
    data = laid_out(weight, made)
    assert data is not None
    assert data.shape == (made.units, 5, made.groups, RECORD)
    assert 0 <= data.numel() - packed_bytes(weight) <= made.groups * 5 * RECORD
    x = torch.randn(7, 320, dtype=torch.float64)
    plain = x @ weight.double().T
    if made.gated:
        gate, up = plain.chunk(2, dim=1)
        plain = F.silu(gate) * up
    out, written = replay(x, data, made, plain.shape[1])
    assert torch.equal(written, torch.ones_like(written))
    torch.testing.assert_close(out, plain)


def test_laid_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, made = special(320, 128), Plan(3, 7, 1, False)
    whole = laid_out(weight, made)
    monkeypatch.setattr(module, "_AT_ONCE", 2 * 3 * GROUP * 128)
    pieces = laid_out(weight, made)
    assert whole is not None
    assert pieces is not None
    assert torch.equal(whole, pieces)
    weight[200] = 0
    assert laid_out(weight, made) is None


# Beside Dream's: LLaDA's, and what has the most of everything.
COMPILED = [one for _, one in DREAM.values() if one is not None]
COMPILED += [Plan(12, 128, 1, True), Plan(12, 22, 6, False)]
COMPILED += [Plan(20, 16, 8, True), Plan(20, 16, 8, False), Plan(16, 16, 8, True)]


@pytest.mark.parametrize("made", COMPILED)
def test_compiles_without_loss(made: Plan) -> None:
    check_compiled(binary(made), made.threads)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS)


def test_small_weights_and_other_precisions_are_left_alone(on_hopper: None) -> None:
    assert packed(bf16(4608, 3584), gated=False) is None
    assert packed(bf16(37888, 3584).float(), gated=True) is None


def test_not_without_the_device() -> None:
    assert packed(bf16(37888, 3584), gated=True) is None


def test_where_it_cannot_be_made_the_library_does_it(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "binary", lambda made: cuda.Binary(b"", ""))
    few = SimpleNamespace(registers=72)
    monkeypatch.setattr(cuda, "Kernel", lambda *given, **more: few)
    module._kernel.cache_clear()
    with pytest.warns(UserWarning, match="not packed.*72 registers, not 80"):
        assert packed(bf16(37888, 3584), gated=True) is None
    assert packed(bf16(37888, 3584), gated=True) is None  # told once
    few.registers = 96
    monkeypatch.setattr(module, "laid_out", lambda weight, made: None)  # too much out of reach
    assert packed(bf16(3584, 18944), gated=False) is None
    module._kernel.cache_clear()


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_what_is_launched(name: str, on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    kernel = SimpleNamespace(launch=lambda *given: launched.append(given))
    monkeypatch.setattr(module, "_kernel", lambda device, made: kernel)
    monkeypatch.setattr(cuda, "TensorMap", lambda view, box: (tuple(view.shape), box))
    (rows, inner, gated), made = DREAM[name]
    assert made is not None
    data = torch.empty(0, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(module, "laid_out", lambda weight, made: data)
    one = packed(bf16(rows, inner), gated=gated)
    assert one is not None
    columns = rows // 2 if gated else rows
    out = one(bf16(50, inner))
    assert out.shape == (50, columns)
    [(grid, x_map, weight, to, *sizes, parts, arrived)] = launched
    assert grid == (made.units * made.split,)
    assert x_map == ((50, inner), (TOKENS, CHUNK))
    assert weight is data
    assert to is out
    assert sizes == [50, columns, inner, made.units]
    assert parts.nbytes == made.parts
    assert arrived.shape == ((16, 9) if made.split > 1 else (0, 2))
    for x in (bf16(65, inner), bf16(50, inner).half(), bf16(inner, 50).t()):
        assert not one.suits(x)
        with pytest.raises(ValueError, match=r"no kernel for \["):
            one(x)


def test_counts_begin_at_nothing() -> None:
    one = Packed(Plan(14, 16, 8, False), torch.empty(0, dtype=torch.uint8), 3584, 18944)
    assert not one._arrived.any()
    assert one._arrived.dtype is torch.int32


def test_trained_weights_can_be_told() -> None:
    """Of the built-in model, whose weights have outliers that random ones do not."""
    found = files("lopa.tiny").joinpath("model.safetensors")
    with as_file(found) as path, safe_open(path, framework="pt") as weights:
        names = [
            f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 7) for part in ("up", "down")
        ]
        for name in [*names, "model.embed_tokens.weight"]:
            groups = arranged(weights.get_tensor(name).bfloat16(), gated=False)
            told = records(groups)
            assert told is not None
            assert told[..., 1537].float().mean() < 0.3  # of 1024 out of reach
