"""Which attention is left to cuDNN, and what is asked of it."""

from __future__ import annotations

import pytest
import torch
from plain_far_attention import small_chunks, with_lse

from lopa.kernels import PAGE, compilation, prefix_attention
from lopa.kernels.prefix_attention import attend_far, is_faster

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "faster"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((9, 0), torch.float16, 64, True),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 256, False),
        ((8, 9), torch.bfloat16, 128, False),  # not measured there
    ],
)
def test_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    faster: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert is_faster(CUDA, dtype, dim) == faster
    assert not is_faster(torch.device("cpu"), dtype, dim)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert not is_faster(CUDA, dtype, dim)


def test_each_chunk_is_attended_to_by_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    q, *cache = (torch.randn(n, h, 16, generator=generator) for n, h in ((5, 6), *[(960, 2)] * 2))
    pages = torch.randperm(15, generator=generator)[:6].int()
    found = attend_far(q, *cache, pages)
    assert found.pages == 6
    for chunk, own in enumerate(pages.view(3, 2).tolist()):
        where = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in own])
        given = (x.transpose(0, 1)[None] for x in (q, *(x[where] for x in cache)))
        mixed, lse = with_lse(*given)
        torch.testing.assert_close(found.mixed[chunk], mixed[0].transpose(0, 1))
        torch.testing.assert_close(found.lse[chunk], lse[0, :, :, 0])


def test_what_is_returned_is_laid_out_as_by_cudnn() -> None:
    """By torch's own account of it, without a device: then nothing is copied."""
    meta = torch.device("meta")
    qkv = torch.empty(512, 36 * 128, dtype=torch.bfloat16, device=meta)
    q = qkv.view(512, 36, 128)[:, :28].transpose(0, 1).expand(8, -1, -1, -1)
    k = torch.empty(8, 4096, 4, 128, dtype=torch.bfloat16, device=meta).transpose(1, 2)
    mixed, lse = prefix_attention._with_lse(q, k, k)
    assert mixed.transpose(1, 2).is_contiguous()
    assert mixed.shape == (8, 28, 512, 128)
    assert lse.shape == (8, 28, 512, 1)
    assert lse.is_contiguous()


def test_nothing_runs_where_kernels_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "_with_lse", lambda *given: pytest.fail("it ran"))
    q, cache = torch.zeros(5, 4, 16), torch.zeros(PAGE, 2, 16)
    with compilation.noted():
        found = attend_far(q, cache, cache, torch.zeros(128, dtype=torch.int32))
    assert found.mixed.shape == (2, 5, 4, 16)
    assert found.lse.shape == (2, 4, 5)
