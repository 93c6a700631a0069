"""What the ranks are asked to do: decode, together, what one process decodes alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goldens
from lopa import LLM, DecodeConfig
from lopa.distributed.branch_runner import BranchRunner
from lopa.distributed.mesh import Mesh
from lopa.distributed.rank_llm import RankLLM
from lopa.engine.prompts import Infill, Prompt
from lopa.models import checkpoint
from lopa.models.config import ModelConfig

DREAM = goldens.MODELS / "dream_0"


@dataclass(frozen=True)
class Request:
    model: str
    prompt: tuple[int, ...]
    config: DecodeConfig
    options: tuple[tuple[str, Any], ...] = ()
    gap: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # lengths, the tokens behind it

    @property
    def asked(self) -> Prompt:
        prompt = list(self.prompt)
        return prompt if self.gap is None else Infill(prompt, (self.gap,))


def golden(path: Path) -> tuple[Request, list[int]]:
    """A golden case and its tokens."""
    case = goldens.read(path)
    request = Request(
        str(goldens.MODELS / case["checkpoint"]),
        tuple(case["prompt_ids"]),
        goldens.parity_config(case),
        (("eos_token_id", case["eos_token_id"]), ("mask_token_id", case["mask_token_id"])),
    )
    return request, case["generated_ids"]


@functools.cache
def alone(request: Request) -> list[int]:
    llm = LLM(request.model, dtype="float32", device="cpu", **dict(request.options))
    return llm.generate(request.asked, request.config).token_ids


def decode(mesh: Mesh, requests: Sequence[Request]) -> list[list[int]]:
    """One after another."""
    answers = []
    for request in requests:
        llm = RankLLM(request.model, dtype="float32", mesh=mesh, **dict(request.options))
        answers.append(llm.generate(request.asked, request.config).token_ids)
    return answers


def decode_fused(mesh: Mesh, requests: Sequence[Request]) -> list[list[int]]:
    """All in flight at once on the first one's model, by the Triton backend in its interpreter."""
    import interpreted  # noqa: F401

    from lopa.engine import loader
    from lopa.kernels.triton import attention, routing
    from lopa.runner import graph_inputs
    from lopa.runner.backend_triton import TritonBackend

    # The interpreter runs programs one by one, so there are few.
    attention._SMS, routing._ROWS, routing._PAIRS = 1, 32, 128
    graph_inputs.PADDING = ((256, 8), *graph_inputs.PADDING[1:])
    loader.choose_backend = lambda *_: TritonBackend  # type: ignore[assignment]
    llm = RankLLM(requests[0].model, dtype="float32", mesh=mesh, **dict(requests[0].options))
    assert isinstance(llm.runner, BranchRunner)
    assert type(llm.runner.local.backend) is TritonBackend  # type: ignore[attr-defined]
    sessions = [llm.session(list(r.prompt), r.config) for r in requests]
    for _ in llm.engine().run(iter(sessions)):
        pass
    return [s.output.token_ids for s in sessions if s.output is not None]


def decode_together(mesh: Mesh, requests: Sequence[Request], budget: int) -> list[list[int]]:
    """All in flight at once, on one model, each with its own settings."""
    from lopa.engine.scheduler import Scheduler

    llm = RankLLM(requests[0].model, dtype="float32", mesh=mesh, **dict(requests[0].options))
    engine = Scheduler(llm.runner, token_budget=budget)
    sessions = [llm.session(list(r.prompt), r.config) for r in requests]
    for _ in engine.run(iter(sessions)):
        pass
    return [s.output.token_ids for s in sessions if s.output is not None]


def decode_auto(mesh: Mesh, requests: Sequence[Request]) -> tuple[Any, list[list[int]], list[int]]:
    """All at once by a cost that the ranks measure: the cost, tokens, and branches of the rounds.

    Ranks whose clocks said different things would plan different rounds, which they would notice.
    """
    from lopa.engine import cost_measurement

    cost_measurement.LEAST_TURNS = cost_measurement.MOST_TURNS = 2
    llm = RankLLM(requests[0].model, dtype="float32", mesh=mesh, **dict(requests[0].options))
    sessions = [llm.session(list(r.prompt), r.config) for r in requests]
    for _ in llm.engine().run(iter(sessions)):
        pass
    branches = [len(r.branches) - 1 for s in sessions for r in s.trace.rounds]
    tokens = [s.output.token_ids for s in sessions if s.output is not None]
    return llm.round_cost.settings(), tokens, branches


def traffic(mesh: Mesh, request: Request) -> list[dict[str, Any]]:
    """By round: what went over the wire, and what was committed."""
    llm = RankLLM(request.model, dtype="float32", mesh=mesh, **dict(request.options))
    assert isinstance(llm.runner, BranchRunner)
    found = []
    for event in llm.stream(list(request.prompt), request.config):
        spent = llm.runner.spent
        found.append(
            {
                "rows": len(event.round.branches),
                "window": max(b.end for b in event.round.branches) - event.round.start,
                "committed": event.round.committed,
                "statistics": spent.statistics_bytes,
                "commit": spent.commit_bytes,
                "commits": spent.commits,
            }
        )
    return found


def statistics_of_parts(mesh: Mesh, seed: int) -> list[str]:
    """Where the statistics of a cut vocabulary differ from those of the whole, in words."""
    import torch

    from lopa.distributed.tensor_parallel import part_of
    from lopa.distributed.vocab_statistics import VocabularyStatistics
    from lopa.runner.statistics import statistics

    generator = torch.Generator().manual_seed(seed)
    vocab, count, mask_id = 101, 40, 7
    logits = torch.randn(count, vocab, generator=generator) * 4
    logits[0] = 0.0  # all the same
    logits[1, mask_id] = 40.0  # nothing but the mask token is likely
    logits[2, 90] = logits[2, 3] = 30.0  # two that tie, in different parts
    logits[3] = logits[3].round()  # many that tie
    positions = torch.arange(count) + 11
    held = part_of(mesh).held(vocab)
    find = VocabularyStatistics(mesh, held.start)
    wrong = []
    for ranking in ("max_prob", "margin", "neg_entropy"):
        for draw in (
            {},
            {"temperature": 0.7},
            {"temperature": 1.0, "top_p": 0.8},
            {"temperature": 1.0, "top_p": 0.05},
            {"temperature": 1.3, "top_k": 5},
            {"temperature": 1.0, "top_k": 1000},
            {"temperature": 0.9, "top_p": 0.9, "top_k": 3},
            {"temperature": 1.0, "top_k": 1},
            {"temperature": 0.7, "early_stop": False},
            {"temperature": 0.7, "top_p": 0.8, "early_stop": False},
            {"temperature": 1.3, "top_k": 5, "early_stop": False},
        ):
            for decoder in ("lopa", "fast-dllm"):
                config = DecodeConfig(decoder=decoder, ranking=ranking, seed=seed, **draw)  # type: ignore[arg-type]
                whole = statistics(logits, positions, mask_id, config)
                part = logits[:, held.start : held.stop]
                parts = find(part, positions, mask_id, config)
                same = torch.equal(whole[0], parts[0]) and whole[1].dtype == parts[1].dtype
                close = all(
                    torch.allclose(a, b, atol=1e-5, rtol=1e-5)
                    for a, b in zip(whole[1:], parts[1:], strict=True)
                )
                if not (same and close):
                    wrong.append(f"{decoder} {ranking} {draw}: {whole} {parts}")
    return wrong


def class_scores_of_parts(mesh: Mesh, seed: int) -> list[str]:
    """Where the scores of classes differ from those of the whole vocabulary, in words."""
    import torch
    from small_automata import automaton_of

    from lopa.distributed.tensor_parallel import part_of
    from lopa.distributed.vocab_statistics import VocabularyStatistics
    from lopa.runner.class_scores import class_scores

    vocab, count = 101, 20
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 4
    logits[3] = logits[3].round()  # many that tie
    positions = torch.arange(count) + 11
    first = {**dict.fromkeys(range(10), 0), **dict.fromkeys(range(8, 60), 1), 90: 1}
    automaton = automaton_of([first, {**dict.fromkeys(range(40, 80), 0), 3: 1}], [1], vocab, [100])
    held = part_of(mesh).held(vocab)
    find = VocabularyStatistics(mesh, held.start)
    wrong = []
    for draw in ({}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8, "top_k": 30}):
        for decoder in ("lopa", "fast-dllm"):
            config = DecodeConfig(decoder=decoder, seed=seed, **draw)  # type: ignore[arg-type]
            part = logits[:, held.start : held.stop]
            whole = class_scores(logits, positions, config, automaton)
            parts = find.class_scores(part, positions, config, automaton)
            for name, a, b in zip(whole._fields, whole, parts, strict=True):
                same = a is b is None or torch.allclose(a[1:].double(), b[1:].double(), atol=1e-5)
                if not same:
                    wrong.append(f"{decoder} {draw} {name}: {a} {b}")
    return wrong


def decode_fitting(mesh: Mesh, settings: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Answers that have to fit, all at once, with a look at the anchor after every round."""
    from fitting import run
    from small_automata import automaton_of, balanced

    llm = RankLLM("dummy:dream-tiny", dtype="float32", mesh=mesh)
    vocab, eos = llm.config.vocab_size, llm.config.eos_ids
    pairs = automaton_of(
        [{30: 1}, {31: 2}, dict.fromkeys(range(100, 150), 2) | {33: 3}, {34: 0, 35: 4}, {}],
        [4],
        vocab,
        eos,
    )
    patterns = [pairs, balanced(40, 41, range(50, 120), 2, vocab, eos)]
    sessions = [
        llm.session_from_ids(
            [5, 8, 11, 14], llm.decode_config(max_new_tokens=21, **some), automaton=pattern
        )
        for some in settings
        for pattern in patterns
    ]
    return [output.token_ids for output in run(llm.engine(), sessions)]


def astray(mesh: Mesh, request: Request) -> str:
    """Rank 1's decoder is given a token that nobody chose: what every rank says about it."""
    from lopa.errors import LopaError

    llm = RankLLM(request.model, dtype="float32", mesh=mesh, **dict(request.options))
    session = llm.session(list(request.prompt), request.config)
    events = llm.engine().stream(session)
    next(events)
    if mesh.rank == 1:
        session.decoder.plan()
        masks = session.decoder._plan.rows == session.decoder.mask_id  # type: ignore[union-attr]
        session.decoder._plan.rows[masks.nonzero()[0][0], masks.nonzero()[1][0]] = 5  # type: ignore[union-attr]
    try:
        next(events)
    except LopaError as error:
        return str(error)
    return ""


def mixtures() -> list[Request]:
    """Of a tiny mixture of each family, and of one that edits."""
    requests = []
    for name, edit in (("llada2_a", None), ("llada2_a", 0.3), ("sdarmoe_a", None)):
        case = goldens.read(goldens.MODELS / name / "case.json")
        options = tuple((key, case[key]) for key in ("mask_token_id", "eos_token_id"))
        for branches, run in zip((3, 0, 7), case["runs"], strict=False):
            config = DecodeConfig(
                branches=branches,
                max_new_tokens=24,
                block_size=8,
                threshold=0.7,
                attention="block",
                edit_threshold=edit,
                append_at=0.5,
            )
            prompt = tuple(run["prompt_ids"])
            requests.append(Request(str(goldens.MODELS / name), prompt, config, options))
    return requests


def alone_config(request: Request) -> ModelConfig:
    return checkpoint.model_config(request.model)


def quantised(mesh: Mesh, model: str) -> tuple[float, float]:
    """Mean error of int8 probabilities in a first round: of the whole model, and of the cut one."""
    plain = LLM(model, dtype="float32", device="cpu")
    whole = LLM(model, dtype="float32", device="cpu", quantize="int8")
    parts = RankLLM(model, dtype="float32", mesh=mesh, quantize="int8")
    config = DecodeConfig(branches=2, max_new_tokens=32, block_size=16)
    found = []
    for llm in (plain, whole, parts):
        session = llm.session(list(range(3, 40)), config)
        slot = llm.runner.open(config, session.capacity)
        plan = session.plan()
        assert slot is not None
        assert plan is not None
        (stats,) = llm.runner.forward([(slot, plan)])
        assert stats is not None
        found.append(stats.max_prob)
        llm.runner.close(slot)
    errors = [float(abs(found[0] - other).mean()) for other in found[1:]]
    return errors[0], errors[1]
