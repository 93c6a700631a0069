"""With branch parallelism: what do the two phases of a commit take, against the forward?

*Pre-Write*: every rank keeps the keys and values of its own rows. Here they stay where the forward
makes them, so this phase is a part of the forward and takes no time of its own.
*Commit-Winner-Cache*: when the winner is known, its keys and values go from its rank to the others
and into their caches. Under block attention they are the same on every rank: nothing is sent, each
writes its own. Beside them: the all-gather of the statistics and the wait for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from lopa.bench.parallel import as_dict, measure_ranks
from lopa.config import AttentionName, DecodeConfig
from lopa.distributed.rank_llm import RankLLM
from lopa.engine.prompts import Prompt
from lopa.evaluation import plots
from lopa.studies.study import Findings, Table

BRANCHES = (1, 3, 7, 15)
PARTS = ("forward", "idle", "all-gather", "commit", "host")


def run(
    llm: RankLLM,
    prompts: Sequence[Prompt],
    config: Callable[..., DecodeConfig],  # of changes
    rounds: int,
) -> Findings:
    """On every rank alike."""
    points = []
    for attention in get_args(AttentionName):
        for k in BRANCHES:
            settings = config(branches=k, attention=attention)
            found = as_dict(measure_ranks(llm, prompts, settings, rounds))
            points.append({"attention": attention, "branches": k, **found})
    return {"points": points}


def table(findings: Findings) -> Table:
    heads = (
        "attention",
        "k",
        "rounds",
        *(f"{part} ms" for part in PARTS),
        "commits",
        "KB per commit",
        "commit / forward",
        "all-gather / forward",
    )
    rows = []
    for p in findings["points"]:
        means = _means(p)
        rows.append(
            (
                p["attention"],
                str(p["branches"]),
                str(p["rounds"]),
                *(f"{means[part]:.2f}" for part in PARTS),
                str(p["commits"]),
                f"{p['commit_bytes'] / 1024 / p['commits']:.0f}" if p["commits"] else "none",
                f"{means['commit'] / means['forward']:.2%}",
                f"{means['all-gather'] / means['forward']:.2%}",
            )
        )
    return heads, rows


def reading(findings: Findings) -> str:
    means = [_means(p) for p in findings["points"]]
    commit, gather = (
        max(m[part] / m["forward"] for m in means) for part in ("commit", "all-gather")
    )
    return (
        f"A commit takes at most {commit:.2%} of the forward's time, the all-gather of statistics "
        f"at most {gather:.2%}."
    )


def plot(findings: Findings) -> Any:
    figure, part = plots.require_plots().subplots(figsize=(7.5, 4))
    names = [f"{p['attention']}, k={p['branches']}" for p in findings["points"]]
    means = [_means(p) for p in findings["points"]]
    for index, piece in enumerate(("all-gather", "commit")):
        values = [100 * m[piece] / m["forward"] for m in means]
        places = [i + 0.4 * index for i in range(len(names))]
        part.bar(places, values, width=0.38, label=piece)
    part.set_xticks([i + 0.2 for i in range(len(names))], names, rotation=20, fontsize=8)
    part.set_ylabel("% of the forward's time")
    part.legend(**plots.LEGEND | {"loc": "upper right"})
    return figure


def _means(point: Findings) -> dict[str, float]:
    """Milliseconds of a round by part, over the ranks."""
    names = ("forward_ms", "idle_ms", "gather_ms", "commit_ms", "host_ms")
    ranks = point["ranks"]
    return {
        part: sum(rank[name] for rank in ranks) / len(ranks)
        for part, name in zip(PARTS, names, strict=True)
    }
