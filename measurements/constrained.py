"""What it costs that an answer has to fit a schema of 20 keys.

    python measurements/constrained.py            # on a GPU: the kernels at Dream's vocabulary
    python measurements/constrained.py --cpu      # rounds of the built-in model

On a GPU: whether the kernels give what the plain lattice gives, how long compiling takes, the time
on the device that a round of 8 rows of 64 masks has more than without a schema, by its parts, and
the host's; and how long the parts take in other tiles. The vocabulary is made up: as many tokens as
Dream has, of words, punctuation and digits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch

from lopa import LLM, DecodeConfig
from lopa.grammar.compile import Compiler
from lopa.runner.class_scores import class_scores
from lopa.runner.constrained import constrained_statistics
from lopa.runner.transitions import transitions_of
from lopa.types import Constraint, Plan

VOCAB, EOS, MASK = 152_064, 151_643, 151_666  # as Dream's
ROWS, WINDOW, LIMIT = 8, 64, 512
KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
]
PROPERTIES = {f"key_{i}": KINDS[i % len(KINDS)] for i in range(20)}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}


class MadeUpVocabulary:
    """All bytes, numbers up to 999, runs of JSON's punctuation, and words."""

    def token_bytes(self) -> tuple[list[bytes | None], None]:
        rng = Random(0)
        found = dict.fromkeys(bytes([byte]) for byte in range(256))
        found |= dict.fromkeys(str(number).encode() for number in range(1000))
        signs = '{}[]",: \n'
        while len(found) < 4000:
            found[bytes(rng.choices(signs.encode(), k=rng.randint(2, 4)))] = None
        for key in PROPERTIES:
            found |= dict.fromkeys((key.encode(), f'"{key}'.encode(), f' "{key}":'.encode()))
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        while len(found) < 150_000:
            word = "".join(rng.choices(letters, weights=range(26, 0, -1), k=rng.randint(2, 9)))
            start = rng.choice(["", " ", " ", '"', "_"])
            found[f"{start}{rng.choice([word, word.capitalize()])}".encode()] = None
        tokens: list[bytes | None] = [*found]
        return tokens + [None] * (VOCAB - len(tokens)), None


def plan_of(automaton: Any, rows: int) -> Plan:
    """Rows of masks; the second half has a token more, as branches have."""
    tokens = np.full((rows, WINDOW), MASK)
    first = int(np.flatnonzero(automaton.class_of == automaton.class_of[ord("{")])[0])
    tokens[rows // 2 :, 0] = first
    constraint = Constraint(automaton, automaton.start, 0, WINDOW, LIMIT)
    ends = np.full(rows, WINDOW)
    return Plan(1, 0, 0, 0, tokens, ends, tokens == MASK, None, constraint)


def on_gpu() -> dict[str, Any]:
    from graph_time import microseconds
    from lopa.kernels.triton.confidence import RANKINGS, confidence
    from lopa.kernels.triton.lattice import LatticeWork, Tables, Tiling, fill_lattice
    from lopa.runner.device_automaton import lattice_rows, make_tables, tables_of

    def timed(work: Callable[[], object]) -> float:
        return round(microseconds(lambda _: work(), 4), 1)

    def spent(work: Callable[[], object]) -> float:
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            times.append(1e6 * (time.perf_counter() - began))
        return round(statistics.median(times), 1)

    tilings = [
        *(Tiling(lanes=lanes) for lanes in (64, 128, 256, 512, 1024)),
        *(Tiling(lanes=lanes, inputs=4) for lanes in (128, 256, 512)),
        *(Tiling(chunk=chunk, chunk_warps=1) for chunk in (256, 512, 1024)),
        *(Tiling(chunk=chunk, chunk_warps=2) for chunk in (512, 1024, 2048)),
        *(Tiling(states=n, statistics_warps=w) for n in (4, 8, 16) for w in (2, 4)),
    ]
    device = torch.device("cuda")
    compiler = Compiler(MadeUpVocabulary(), vocab_size=VOCAB, forbidden={MASK})
    began = time.perf_counter()
    automaton = compiler.compile_for(DecodeConfig(schema=SCHEMA), [EOS])
    assert automaton is not None
    found: dict[str, Any] = {"compile s": round(time.perf_counter() - began, 2)}
    found |= sizes(automaton)
    began = time.perf_counter()
    tables = tables_of(automaton, device)
    torch.cuda.synchronize()
    found["tables s"] = round(time.perf_counter() - began, 3)

    def inputs(plan: Plan, config: DecodeConfig, dtype: torch.dtype) -> tuple[Any, ...]:
        count = int(plan.wanted.sum())
        logits = (4 * torch.randn(count, VOCAB, device=device)).to(dtype)
        positions = torch.from_numpy(plan.wanted.nonzero()[1]).to(device)
        own = config.seed, 0, RANKINGS[config.ranking]
        settings = torch.stack([positions, *(torch.full_like(positions, n) for n in own)], 1)
        heat = torch.full((count,), config.temperature, device=device)
        return logits, settings, heat

    small = plan_of(automaton, 2)
    for temperature in (0.0, 1.0):
        config = DecodeConfig(temperature=temperature, seed=5)
        logits, settings, heat = inputs(small, config, torch.float32)
        scores = class_scores(logits.cpu(), settings[:, 0].cpu(), config, automaton)
        token, max_prob, ranking = constrained_statistics(small, scores, MASK, config)
        out = torch.zeros(3, len(logits), dtype=torch.int32, device=device)
        rows = lattice_rows([small], MASK, device)
        sampling = temperature > 0
        fill_lattice(logits, settings, heat, tables, rows, out, 0, sampling=sampling)
        ours = out.cpu()
        name = f"temperature {temperature:g}"
        found[f"{name}: tokens differing"] = float((ours[0].numpy() != token).mean())
        values = ours[1:].view(torch.float32).numpy()
        found[f"{name}: max_prob, largest difference"] = float(np.abs(values[0] - max_prob).max())
        found[f"{name}: ranking, largest difference"] = float(np.abs(values[1] - ranking).max())

    plan = plan_of(automaton, ROWS)
    rows = lattice_rows([plan], MASK, device)

    def parts_of(
        given: tuple[Any, ...], tables: Tables, out: torch.Tensor
    ) -> dict[str, Callable[[], None]]:
        work = LatticeWork(*given, tables, rows, sampling=False)
        parts = {
            "class scores": work.score_classes,
            "bundle weights": work.weigh_bundles,
            "passes": work.sum_paths,
            "walk": work.walk,
            "statistics": lambda: work.find_statistics(out, 0),
        }
        for part in parts.values():  # each reads what those before it have found
            part()
        return parts

    for ranking_name in ("max_prob", "neg_entropy"):
        config = DecodeConfig(ranking=ranking_name)  # type: ignore[arg-type]
        given = inputs(plan, config, torch.bfloat16)
        out = torch.zeros(3, len(given[0]), dtype=torch.int32, device=device)
        fill = partial(fill_lattice, *given, tables, rows, out, 0, sampling=False)
        plain = partial(confidence, *given, MASK, out, sampling=False)
        found[f"{ranking_name}: device µs"] = timed(fill)
        found[f"{ranking_name}: without a schema, device µs"] = timed(plain)
        for name, part in parts_of(given, tables, out).items():
            found[f"{ranking_name}: {name}, device µs"] = timed(part)
        # While the device runs the layers: it is waited for only where it is more than those take.
        found[f"{ranking_name}: host µs"] = spent(
            lambda f=fill: (lattice_rows([plan], MASK, device), f())
        )
        found[f"{ranking_name}: of these the rows, host µs"] = spent(
            lambda: lattice_rows([plan], MASK, device)
        )
        found[f"{ranking_name}: of these the memory, host µs"] = spent(
            lambda g=given: LatticeWork(*g, tables, rows, sampling=False)
        )
        if ranking_name == "max_prob":
            continue
        json.dump(found, sys.stderr, indent=2, ensure_ascii=False)  # before the long rest
        expected = out.clone()
        for tiling in tilings:
            changed = {k: v for k, v in tiling._asdict().items() if v != getattr(Tiling(), k)}
            name = ", ".join(f"{k} {v}" for k, v in changed.items()) or "as it is"
            parts = parts_of(given, make_tables(automaton, device, tiling), out)
            found[f"{name}: tokens differing"] = float((out[0] != expected[0]).float().mean())
            for which in ("class scores", "passes", "statistics"):
                found[f"{name}: {which}, device µs"] = timed(parts[which])
    return found


def on_cpu(rounds: int = 14) -> dict[str, Any]:
    """Processor time of a round, with and without, where both forward as many tokens."""
    torch.set_num_threads(1)
    llm = LLM("tiny", device="cpu", dtype="float32")
    automaton = llm.automaton(llm.decode_config(schema=SCHEMA, max_new_tokens=LIMIT))
    assert automaton is not None
    found: dict[str, Any] = sizes(automaton)
    for branches in (0, 3, 7):
        engines = {}
        for schema in (None, SCHEMA):
            config = llm.decode_config(
                branches=branches, max_new_tokens=LIMIT, schema=schema, threshold=1.0
            )
            engines[schema is not None] = engine = llm.engine()
            engine.add(llm.session_from_ids(list(range(5, 60)), config))
        spent: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for has_schema, engine in engines.items():  # in turn: the machine may be busy
                plan = engine.running[0].plan() if engine.running else None
                began = time.process_time()
                engine.step()
                tokens = 1 if plan is None else plan.rows.size
                spent[has_schema].append((time.process_time() - began) / tokens)
        for engine in engines.values():
            engine.close()
        with_schema, without = (statistics.median(spent[x][2:]) for x in (True, False))
        found[f"branches {branches}: round, times as long"] = round(with_schema / without, 3)
    return found


def sizes(automaton: Any) -> dict[str, int]:
    transitions = transitions_of(automaton)
    return {
        "states": transitions.states,
        "classes": transitions.classes,
        "edges": int((automaton.next >= 0).sum()),
        "transitions": len(transitions.by_source.source),
        "bundles": len(transitions.bundles),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="rounds of the built-in model")
    found = on_cpu() if parser.parse_args().cpu else on_gpu()
    json.dump(found, sys.stdout, indent=2, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
