"""Other constants of `branches="auto"` (decoding/branch_budget.py), by `lopa study simulation`.

    python measurements/tune_auto.py --task words --cost FILE … [--try '{"PRIOR_TOKENS": 3.0}' …]
                                   [--seed 3] [--limit 240] [--device cuda] [--batch-size 64]

The first table is of today's constants, and one follows for every `--try`, which replaces some of
them. Nothing is timed: several of these may run side by side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from lopa import LLM
from lopa.decoding import branch_budget as budget
from lopa.evaluation import evaluate
from lopa.evaluation.sample import SampleFile
from lopa.studies import simulation
from lopa.studies.study import Study
from markdown_sections import table

USUAL = {name: value for name, value in vars(budget).items() if name.isupper()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--cost", type=Path, action="append", required=True)
    parser.add_argument("--try", dest="trials", type=json.loads, action="append", default=[])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--limit", type=int, default=240)
    parser.add_argument("--device")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    unknown = {name for trial in options.trials for name in trial} - {*USUAL}
    if unknown:
        parser.error(f"no constant {', '.join(sorted(unknown))}: there are {', '.join(USUAL)}")
    llm = LLM("tiny", device=options.device)
    problems = evaluate.problems(options.task, "eval", options.limit, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = SampleFile(Path(folder) / "samples.jsonl", {})
        study = Study(
            llm,
            problems,
            llm.decode_config(max_new_tokens=160).settings(),
            options.seed,
            file,
            options.batch_size,
            costs=simulation.read_costs(options.cost),
        )
        for trial in [{}, *options.trials]:
            for name, value in (USUAL | trial).items():
                setattr(budget, name, _tuple(value))
            budget._cost_table.cache_clear()
            # What others have chosen is not kept; the fixed numbers are decoded once.
            file.samples = {key: s for key, s in file.samples.items() if "auto" not in key[0]}
            print(json.dumps(trial) if trial else "as it is")
            print(table(*simulation.table(simulation.run(study))), flush=True)


def _tuple(value: object) -> object:
    """Lists of JSON as the tuples that the constants are."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
