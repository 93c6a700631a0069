"""Compressed weights: the format is lossless, the tilings cover a weight, the kernel compiles.

There is no interpreter for CUDA: what the kernel does with a record is done again here in Python.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_support import Launches, bf16, check_compiled
from safetensors import safe_open
from torch import Tensor

from lopa.kernels.hopper import common as hopper
from lopa.kernels.hopper import compressed_gemm as module
from lopa.kernels.hopper import nvrtc
from lopa.kernels.hopper.common import CHUNK, GROUP, arrange_rows
from lopa.kernels.hopper.compressed_gemm import (
    MAX_OUTLIERS,
    MAX_TOKENS,
    RECORD,
    CompressedTiling,
    CompressedWeight,
    binary,
    choose_tiling,
    compress,
    compressed_bytes,
    encode,
    records,
)

SMS = 132
SHARED = 227 * 1024  # bytes of a block


def decode(record: Tensor) -> Tensor:
    """[RECORD] bytes → [lane, index] bits, as compressed_gemm.cu unpacks them."""
    low = record[:1024].view(2, 32, 16).transpose(0, 1).reshape(32, 32).int()
    high = record[1024:1536].contiguous().view(torch.int32).long().view(32, 4) & 0xFFFFFFFF
    words = record[1536:].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    base, outliers = int(words[0]) & 0xFF, int(words[0]) >> 8
    rotated = high >> 4 | (high & 15) << 28
    found = torch.zeros(32, 32, dtype=torch.int64)
    for step in range(4):
        for half, word in enumerate((high[:, step], rotated[:, step])):
            upper = (word & 0x87878787) + base * 0x01010101
            for i in range(4):
                index = 8 * step + 4 * half + i
                found[:, index] = low[:, index] | (upper >> 8 * i & 0xFF) << 8
    for word in words[1 : 1 + outliers].tolist():
        found[word >> 24, word >> 16 & 31] = word & 0xFFFF
    return found


def fragments(chunk: Tensor) -> Tensor:
    """[16, 64] → [lane, index]: the left operand of wgmma by lanes, as in the PTX manual."""
    found = torch.zeros(32, 32, dtype=chunk.dtype)
    for lane in range(32):
        for index in range(32):
            step, register, second = index // 8, index // 2 % 4, index % 2
            row = lane // 4 + 8 * (register % 2)
            column = 16 * step + 2 * (lane % 4) + 8 * (register // 2) + second
            found[lane, index] = chunk[row, column]
    return found


def bits_of(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).long() & 0xFFFF


def normal(*shape: int, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def special(*shape: int) -> Tensor:
    """With outliers of several kinds."""
    weight = normal(*shape)
    weight[3, 5], weight[4, 70], weight[9, 6], weight[0, 9] = 1e-30, 0.0, -0.0, -300.0
    weight[1, 8] = 1e-39  # subnormal
    return weight


@pytest.mark.parametrize("kind", [normal, special])
def test_lossless(kind: Any) -> None:
    groups = arrange_rows(kind(64, 192), gated=False)
    found = records(groups)
    assert found is not None
    assert found.shape == (4, 3, RECORD)
    assert found.dtype is torch.uint8
    groups = groups.flatten(1, 2)
    for group in range(4):
        for chunk in range(3):
            expected = bits_of(groups[group, :, CHUNK * chunk : CHUNK * (chunk + 1)].contiguous())
            assert torch.equal(decode(found[group, chunk]), fragments(expected))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5e-38, 3e38, float("inf"), float("nan")])
def test_records_of_one_value(value: float) -> None:
    groups = torch.full((1, GROUP, CHUNK), value).bfloat16()
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[0, 0, 1537] == 0  # no outlier
    assert torch.equal(decode(found[0, 0]), fragments(bits_of(groups[0])))


def test_few_weights_are_outliers() -> None:
    found = records(arrange_rows(normal(512, 2048), gated=True))
    assert found is not None
    outliers = found[..., 1537].sum()
    assert 0 < outliers < 512 * 2048 / 5000


def test_as_many_outliers_as_a_record_holds_and_no_more() -> None:
    groups = torch.ones(2, GROUP, CHUNK).bfloat16()
    groups[1, 2, :MAX_OUTLIERS] = 1e-20
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[:, 0, 1537].tolist() == [0, MAX_OUTLIERS]
    assert torch.equal(decode(found[1, 0]), fragments(bits_of(groups[1])))
    groups[1, 15, 63] = 1e20
    assert records(groups.unflatten(1, (2, 8))) is None


def test_of_large_and_small_weights_the_fewer_are_outliers() -> None:
    groups = torch.full((1, GROUP, CHUNK), 0.01).bfloat16()
    groups[0, 0, :5] = 3000.0
    found = records(groups.unflatten(1, (2, 8)))
    assert found is not None
    assert found[0, 0, 1537] == 5


def test_rows_of_a_group() -> None:
    weight = torch.arange(64)[:, None].expand(64, 2)
    plain, gated = (arrange_rows(weight, gated=gated)[..., 0] for gated in (False, True))
    assert plain[1].tolist() == [[16 + 2 * q for q in range(8)], [17 + 2 * q for q in range(8)]]
    assert gated[1].tolist() == [[8 + q for q in range(8)], [40 + q for q in range(8)]]


DREAM = {
    "gate_up": ((37888, 3584, True), CompressedTiling(18, 132, 1, True)),
    "down": ((3584, 18944, False), CompressedTiling(14, 16, 8, False)),
    "head": ((152064, 3584, False), CompressedTiling(18, 528, 1, False)),
    "qkv": ((4608, 3584, False), None),  # so small that cuBLASLt is as fast
    "out": ((3584, 3584, False), None),
}


@pytest.mark.parametrize("name", DREAM)
def test_tilings_of_dream(name: str) -> None:
    (rows, inner, gated), expected = DREAM[name]
    assert choose_tiling(rows, inner, SMS, gated=gated) == expected


@pytest.mark.parametrize(
    ("rows", "inner"),
    [(37888 + 16, 3584), (37888, 3584 + 32), (16384, 2047 * 2), (160, 64 * 4000)],
)
def test_what_is_left_to_cublaslt(rows: int, inner: int) -> None:
    assert choose_tiling(rows, inner, SMS, gated=False) is None


def test_tilings_hold_to_the_rules() -> None:
    shapes = [
        (rows, inner) for rows in range(2048, 60000, 1952) for inner in range(512, 20000, 832)
    ]
    shapes += [(24576, 4096), (4096, 12288), (126464, 4096)]
    found = [(s, choose_tiling(*s, n, gated=False), n) for s in shapes for n in (78, 114, 131, SMS)]
    tilings = [(shape, one, sms) for shape, one, sms in found if one is not None]
    assert len(tilings) > 300
    for (rows, inner), one, sms in tilings:
        groups = rows // GROUP
        assert (one.units - 1) * one.groups < groups <= one.units * one.groups
        assert 12 <= one.groups <= 20
        assert inner // CHUNK // one.split >= one.stages >= 5
        assert one.shared + 16 * one.stages + 16 <= SHARED
        assert one.threads == 128 * (1 + -(-one.groups // 4)) <= 768
        # No more than a multiprocessor has, and than the block is launched with.
        assert one.launch_registers * one.threads <= 65536
        moved = 128 * 40 + (one.threads - 128) * one.consumer_registers
        assert one.launch_registers < one.consumer_registers
        assert moved <= one.launch_registers * one.threads
        if one.split > 1:
            assert one.blocks(sms) == one.units * one.split <= sms
            assert one.partial_bytes == one.units * one.split * one.groups * GROUP * MAX_TOKENS * 4
        else:
            assert one.blocks(sms) == min(one.units, sms)
            assert one.partial_bytes == 0


def replay(
    x: Tensor, data: Tensor, tiling: CompressedTiling, columns: int
) -> tuple[Tensor, Tensor]:
    """The product as compressed_gemm.cu computes it, and how often each value is written."""
    tokens, inner = x.shape
    out, written = torch.zeros(2, tokens, columns, dtype=x.dtype)
    chunks = inner // CHUNK
    back = fragments(torch.arange(GROUP * CHUNK).view(GROUP, CHUNK)).flatten().argsort()
    for unit in range(tiling.units):
        for group in range(tiling.groups):
            sums = torch.zeros(GROUP, tokens, dtype=x.dtype)
            for part in range(tiling.split):
                for chunk in range(
                    chunks * part // tiling.split, chunks * (part + 1) // tiling.split
                ):
                    bits = decode(data[unit, chunk, group]).flatten()[back].view(GROUP, CHUNK)
                    weight = bits.to(torch.int16).view(torch.bfloat16).to(x.dtype)
                    sums += weight @ x[:, CHUNK * chunk : CHUNK * (chunk + 1)].T
            at = unit * tiling.groups + group
            for q in range(8):
                top, bottom = sums[q], sums[q + 8]
                if tiling.gated:
                    values = {8 * at + q: F.silu(top) * bottom}
                else:
                    values = {16 * at + 2 * q: top, 16 * at + 2 * q + 1: bottom}
                for column, value in values.items():
                    if column < columns:
                        out[:, column] = value
                        written[:, column] += 1
    return out, written


@pytest.mark.parametrize(
    "tiling",
    [
        CompressedTiling(3, 2, 1, True),
        CompressedTiling(2, 3, 3, False),
        CompressedTiling(5, 1, 1, False),
        CompressedTiling(2, 3, 2, True),
    ],
)
def test_every_value_is_written_once(tiling: CompressedTiling) -> None:
    weight = special(80, 320)
    data = encode(weight, tiling)
    assert data is not None
    assert data.shape == (tiling.units, 5, tiling.groups, RECORD)
    assert 0 <= data.numel() - compressed_bytes(weight) <= tiling.groups * 5 * RECORD
    x = torch.randn(7, 320, dtype=torch.float64)
    plain = x @ weight.double().T
    if tiling.gated:
        gate, up = plain.chunk(2, dim=1)
        plain = F.silu(gate) * up
    out, written = replay(x, data, tiling, plain.shape[1])
    assert torch.equal(written, torch.ones_like(written))
    torch.testing.assert_close(out, plain)


def test_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, tiling = special(320, 128), CompressedTiling(3, 7, 1, False)
    whole = encode(weight, tiling)
    monkeypatch.setattr(module, "_AT_ONCE", 2 * 3 * GROUP * 128)
    pieces = encode(weight, tiling)
    assert whole is not None
    assert pieces is not None
    assert torch.equal(whole, pieces)
    weight[200] = 0
    assert encode(weight, tiling) is None


# Besides Dream's: LLaDA's, and the largest of everything.
COMPILED = [one for _, one in DREAM.values() if one is not None]
COMPILED += [CompressedTiling(12, 128, 1, True), CompressedTiling(12, 22, 6, False)]
COMPILED += [
    CompressedTiling(20, 16, 8, True),
    CompressedTiling(20, 16, 8, False),
    CompressedTiling(16, 16, 8, True),
]


@pytest.mark.parametrize("tiling", COMPILED)
def test_compiles_without_spills(tiling: CompressedTiling) -> None:
    check_compiled(binary(tiling), tiling.threads)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "sm_count", lambda device: SMS)


def test_small_weights_and_other_precisions_are_left_alone(on_hopper: None) -> None:
    assert compress(bf16(4608, 3584), gated=False) is None
    assert compress(bf16(37888, 3584).float(), gated=True) is None


def test_other_devices_have_none() -> None:
    assert compress(bf16(37888, 3584), gated=True) is None


def test_without_a_kernel_nothing_is_compressed(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "binary", lambda tiling: nvrtc.Binary(b"", ""))
    few = SimpleNamespace(registers=72)
    monkeypatch.setattr(nvrtc, "Kernel", lambda *given, **more: few)
    module._kernel.cache_clear()
    with pytest.warns(UserWarning, match="not compressed.*72 registers, not 80"):
        assert compress(bf16(37888, 3584), gated=True) is None
    assert compress(bf16(37888, 3584), gated=True) is None  # warns once
    few.registers = 96
    monkeypatch.setattr(module, "encode", lambda weight, tiling: None)  # too many outliers
    assert compress(bf16(3584, 18944), gated=False) is None
    module._kernel.cache_clear()


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_arguments(name: str, on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Launches("compressed_gemm", monkeypatch)
    monkeypatch.setattr(module, "_kernel", lambda device, tiling: kernel)
    data = torch.empty(0, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(module, "encode", lambda weight, tiling: data)
    (rows, inner, gated), _ = DREAM[name]
    weight = compress(bf16(rows, inner), gated=gated)
    assert weight is not None
    for tokens in (1, 50, 64):
        assert weight(bf16(tokens, inner)).shape == (tokens, rows // 2 if gated else rows)
    assert kernel.count == 3


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernel", lambda device, tiling: "a kernel")
    data = torch.empty(0, dtype=torch.uint8)
    weight = CompressedWeight(CompressedTiling(14, 16, 8, False), data, 3584, 18944)
    assert weight.supports(bf16(64, 18944))
    for x in (bf16(65, 18944), bf16(50, 18944).half(), bf16(18944, 50).t()):
        assert not weight.supports(x)
        with pytest.raises(ValueError, match=r"no kernel for \["):
            weight(x)


def test_trained_weights_are_compressible() -> None:
    """Of the built-in model, whose weights have outliers that random ones do not."""
    found = files("lopa.tiny").joinpath("model.safetensors")
    with as_file(found) as path, safe_open(path, framework="pt") as weights:
        names = [
            f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 7) for part in ("up", "down")
        ]
        for name in [*names, "model.embed_tokens.weight"]:
            groups = arrange_rows(weights.get_tensor(name).bfloat16(), gated=False)
            found = records(groups)
            assert found is not None
            assert found[..., 1537].float().mean() < 0.3  # outliers of 1024
