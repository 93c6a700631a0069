"""The choice of experts and the grouping of tokens against plain torch, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa.kernels.triton import routing
from lopa.kernels.triton.routing import Tiles, group, route, tile_size
from lopa.models import llada2, sdar_moe
from lopa.models.config import MixtureConfig
from lopa.models.feed_forward import Where
from lopa.models.mixture import Router

LLADA2 = llada2.FAMILY.read_config(llada2.FAMILY.tiny).mixture
SDAR = sdar_moe.FAMILY.read_config(sdar_moe.FAMILY.tiny).mixture
assert LLADA2 is not None
assert SDAR is not None
CONFIGS = {
    "llada2": LLADA2,
    "llada2.1": replace(LLADA2, experts=24, groups=6, top_groups=3, shared=16),
    "sdar-moe": SDAR,
    "mini": llada2.FAMILY.shapes["llada2-mini"].mixture,
    "one": replace(LLADA2, groups=2, top_groups=1, per_token=1, bias=False, shared=0),
    "three of seven": replace(SDAR, experts=7, per_token=3, renormalise=False, scale=0.5),
    "all": replace(SDAR, experts=3, per_token=3),
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one by one."""
    monkeypatch.setattr(routing, "_ROWS", 16)
    monkeypatch.setattr(routing, "_PAIRS", 256)


def a_router(config: MixtureConfig, hidden: int, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = Router(config, hidden, Where()).requires_grad_(False)
    router.weight.normal_(0.0, hidden**-0.5)
    if router.bias is not None:
        router.bias.normal_(0.0, 0.1)
    return router


def routed(router: Router, x: Tensor, used: int | None = None, **options: Any) -> Any:
    config = router.config
    count = torch.tensor([len(x) if used is None else used], dtype=torch.int32)
    return route(x, router.weight, router.bias, config, count, nowhere=99, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (37, 300)])
def test_choices_and_weights(name: str, tokens: int, hidden: int) -> None:
    config = CONFIGS[name]
    assert config is not None
    router = a_router(config, hidden)
    x = torch.randn(tokens, hidden)
    chosen, weights = router(x)
    ours, own = routed(router, x)
    k = config.per_token
    assert torch.equal(ours[:, :k], chosen.int())
    torch.testing.assert_close(own[:, :k], weights, rtol=1e-5, atol=1e-6)
    assert ours.shape[1] == k + (config.shared > 0)
    assert (ours[:, k:] == config.experts).all()
    assert (own[:, k:] == 1).all()


@pytest.mark.parametrize("name", ["llada2", "llada2.1", "sdar-moe", "three of seven"])
def test_of_equal_scores_the_lower_expert_is_chosen(name: str) -> None:
    """Levels are whole numbers and saturate: most scores and most groups are equal."""
    config = CONFIGS[name]
    assert config is not None
    router = a_router(config, 8)
    router.weight.copy_(torch.randint(-1, 2, router.weight.shape))
    if router.bias is not None:
        router.bias.zero_()
    x = 10 * torch.randint(-1, 2, (50, 8)).float()
    chosen, _ = router(x)
    assert torch.equal(routed(router, x)[0][:, : config.per_token], chosen.int())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_goes_nowhere() -> None:
    router = a_router(CONFIGS["llada2"], 64)  # type: ignore[arg-type]
    x = torch.randn(9, 64)
    x[5:] = torch.nan
    chosen, weights = routed(router, x, used=5)
    assert (chosen[5:] == 99).all()
    assert not weights[5:].any()
    assert torch.equal(chosen[:5], routed(router, x[:5])[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("level", [torch.nan, torch.inf, -torch.inf])
def test_any_number_gives_experts_that_exist(level: float) -> None:
    config = CONFIGS["llada2.1"]
    assert config is not None
    chosen, _ = routed(a_router(config, 64), torch.full((3, 64), level))
    for row in chosen[:, : config.per_token].tolist():
        assert len(set(row)) == config.per_token
        assert all(0 <= expert < config.experts for expert in row)


def test_a_token_is_routed_alike_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one program adds up what several do for fewer tokens."""
    router = a_router(CONFIGS["llada2"], 600)  # type: ignore[arg-type]
    x = torch.randn(40, 600)
    chosen, weights = routed(router, x)
    for few in (x[:1], x[:17]):
        alone = routed(router, few)
        assert torch.equal(alone[0], chosen[: len(few)])
        torch.testing.assert_close(alone[1], weights[: len(few)], rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(routing, "_MOST_APART", 8)
    together = routed(router, x)
    assert torch.equal(together[0], chosen)
    torch.testing.assert_close(together[1], weights, rtol=1e-6, atol=1e-6)


def check(tiles: Tiles, chosen: Tensor, experts: int) -> None:
    """Every pair is in one tile of its expert, in order."""
    found: dict[int, list[int]] = {}
    columns = zip(tiles.expert.tolist(), tiles.begin.tolist(), tiles.end.tolist(), strict=True)
    for expert, begin, end in columns:
        if expert >= 0:
            places = tiles.order[begin : min(begin + tiles.size, end)].tolist()
            assert places
            found.setdefault(expert, []).extend(places)
    flat = chosen.view(-1)
    expected = {
        e: (flat == e).nonzero()[:, 0].tolist() for e in range(experts) if (flat == e).any()
    }
    assert found == expected
    assert tiles.counts.tolist() == [len(expected.get(e, [])) for e in range(experts)]


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(1, 1, 1), (1, 4, 12), (33, 4, 24), (90, 8, 9)]
)
def test_groups(tokens: int, choices: int, experts: int, size: int) -> None:
    torch.manual_seed(tokens)
    chosen = torch.rand(tokens, experts).argsort(1)[:, :choices].int()
    check(group(chosen, experts, size), chosen, experts)
    chosen[tokens // 2 :] = experts  # padding
    check(group(chosen, experts, size), chosen, experts)
    chosen[:] = experts
    check(group(chosen, experts, size), chosen, experts)


@pytest.mark.parametrize("expert", [0, 5, 23])
def test_all_tokens_to_one_expert(expert: int) -> None:
    chosen = torch.full((70, 1), expert, dtype=torch.int32)
    check(group(chosen, 24, 16), chosen, 24)


def test_many_pairs_take_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_PAIRS", 32)
    torch.manual_seed(0)
    chosen = torch.randint(0, 5, (90, 3), dtype=torch.int32)
    check(group(chosen, 4, 16), chosen, 4)


@pytest.mark.parametrize(
    ("tokens", "size"), [(32, 16), (256, 16), (512, 32), (1024, 64), (32768, 128)]
)
def test_tiles_of_eight_of_256(tokens: int, size: int) -> None:
    assert tile_size(8 * tokens, 256) == size
