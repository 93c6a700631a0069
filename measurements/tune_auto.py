"""Other constants of `branches="auto"`, by simulation: of decoding/branch_budget.py, row_budget.py
and engine/branch_choice.py.

    python measurements/tune_auto.py --task words --cost FILE … [--try '{"PRIOR_TOKENS": 3.0}' …]
        [--at-once 1,8,32] [--seed 3] [--limit 240] [--device cuda] [--dtype bfloat16]

A line for every cost and number of requests at once: tokens per second of auto over the best fixed
number's, with today's constants and with every `--try`, which replaces some of them. Nothing is
timed: several of these may run side by side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from lopa import LLM
from lopa.config import AUTO_BRANCHES
from lopa.decoding import branch_budget, row_budget
from lopa.decoding.round_cost import RoundCost
from lopa.engine import branch_choice
from lopa.evaluation import evaluate
from lopa.evaluation.sample import SampleFile
from lopa.studies import load, recorded_cost
from lopa.studies.study import Setting, Study
from markdown_sections import table

Constants = dict[tuple[ModuleType, str], Any]
USUAL: Constants = {
    (module, name): value
    for module in (branch_budget, row_budget, branch_choice)
    for name, value in vars(module).items()
    if name.isupper() and not name.startswith(("_", "NO_", "AUTO_", "MAX_", "TOKEN_"))
}
NAMES = {name for _, name in USUAL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--cost", type=Path, action="append", required=True)
    parser.add_argument("--try", dest="trials", type=json.loads, action="append", default=[])
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--limit", type=int, default=240)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    unknown = {name for trial in options.trials for name in trial} - NAMES
    if unknown:
        parser.error(f"no constant {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    costs = recorded_cost.read_costs(options.cost)
    llm = LLM("tiny", device=options.device, dtype=options.dtype)
    problems = evaluate.problems(options.task, "eval", options.limit, options.seed)
    prompts = [problem.prompt for problem in problems]
    settings = llm.decode_config(max_new_tokens=160).settings()
    fixed = [Setting(f"k = {k}", {"branches": k}) for k in AUTO_BRANCHES]
    trials = [{}, *options.trials]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        file = SampleFile(Path(folder) / "samples.jsonl", {})
        study = Study(llm, problems, settings, options.seed, file, options.batch_size)
        decoded = study.decode(fixed)
        config = study.config(branches="auto")
        for name, given in costs.items():
            cost = RoundCost.of(given)
            for at_once in map(int, options.at_once.split(",")):
                best = max(_speed(load.replay(decoded[s.name], cost, at_once)) for s in fixed)
                line = [name, str(at_once)]
                print(*line, end=" ", flush=True)
                for trial in trials:
                    _set(trial)
                    speed = _speed(load.simulate(llm, prompts, config, at_once, cost))
                    line.append(f"{speed / best:.3f}")
                    print(line[-1], end=" ", flush=True)
                print()
                lines.append(line)
    named = [json.dumps(trial) if trial else "as it is" for trial in trials]
    print(table(("round cost of", "at once", *named), lines))


def _speed(samples: Any) -> float:
    return sum(s.tokens for s in samples) / sum(s.elapsed for s in samples)


def _set(trial: dict[str, Any]) -> None:
    for (module, name), usual in USUAL.items():
        value = _tuple(trial.get(name, usual))
        if isinstance(value, dict):  # by the way branches are accepted: the others stay
            value = {**usual, **{key: _tuple(part) for key, part in value.items()}}
        setattr(module, name, value)
    branch_budget.prior_expectations.cache_clear()


def _tuple(value: Any) -> Any:
    """Lists of JSON as the tuples that the constants are."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
