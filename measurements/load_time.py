"""Where a round's time goes with many requests at once: the host, its records, the device.

    python measurements/load_time.py [--task words,functions] [--at-once 1,8,32] [--limit 128]
        [--seed 31] [--json FILE]

Microseconds of a round, by session. "Host" is what the device waits for, "records" what the host
does while the device works, "wait" is what the host waits for the device, "cost" what the round
cost predicts of the round; "row" is tokens. The settings take turns of a moment, as in `lopa study
load`. From host and records come HOST_GROWTH and RECORDS_GROWTH of the measured cost
(host_growth.py), and from "round" over "cost" HOST_OF_ANSWERS (engine/cost_measurement.py).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from lopa import LLM
from lopa.config import AUTO_BRANCHES
from lopa.decoding.round_cost import RoundCost
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.output import Event
from lopa.engine.session import Session
from lopa.evaluation import evaluate
from lopa.studies import load
from lopa.tasks import ROOM
from markdown_sections import table

SETTINGS = (*map(str, AUTO_BRANCHES), "auto")


class Run(load.Run):
    """Adds up where the time of its rounds went."""

    host = records = predicted = 0.0  # seconds
    rounds = branches = tokens_of_rows = 0  # of all sessions
    costs: RoundCost

    def step(self) -> list[tuple[Session, Event]]:
        events = super().step()
        self.rounds += len(events)
        for session, event in events:
            rows, start = event.round.branches, max(event.round.start, session.decoder.prompt)
            self.branches += len(rows) - 1
            self.tokens_of_rows += sum(row.end - start for row in rows)
        if events:
            self.predicted += load.predicted_seconds(self.costs, events)
        self.host += self.engine.host_seconds
        self.records += self.engine.record_seconds
        return events

    @property
    def figures(self) -> dict[str, float]:
        each = 1e6 / self.rounds
        return {
            "tokens/s": self.tokens / self.clock,
            "TPF": self.tokens / self.rounds,
            "branches": self.branches / self.rounds,
            "row": self.tokens_of_rows / (self.branches + self.rounds),  # tokens
            "round": each * self.clock,
            "host": each * self.host,
            "records": each * self.records,
            "wait": each * (self.clock - self.host - self.records),
            "cost": each * self.predicted,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="words")
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--limit", type=int, default=128)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures")
    options = parser.parse_args()
    llm = LLM("tiny", device=options.device, dtype=options.dtype)
    Run.costs = llm.round_cost
    if llm.runner.is_async:
        llm.capture_graphs(TOKEN_BUDGET)
    found: list[dict[str, Any]] = []
    for task in options.task.split(","):
        problems = evaluate.problems(task, "eval", options.limit, options.seed)
        prompts = [problem.prompt for problem in problems]
        for at_once in map(int, options.at_once.split(",")):
            runs = {}
            for setting in SETTINGS:
                branches = "auto" if setting == "auto" else int(setting)
                config = llm.decode_config(max_new_tokens=ROOM, branches=branches)
                engine = llm.engine(max_running=min(at_once, MAX_RUNNING))
                runs[setting] = Run(llm, engine, config, prompts)
            load.take_turns(runs)
            figures = {setting: run.figures for setting, run in runs.items()}
            best = max(own["tokens/s"] for setting, own in figures.items() if setting != "auto")
            for setting, own in figures.items():
                ratio = own["tokens/s"] / best
                case = {"task": task, "at once": at_once, "k": setting}
                found.append({**case, **own, "/ best fixed": ratio})
    if options.json is not None:
        command = shlex.join(["python", "measurements/load_time.py", *sys.argv[1:]])
        described = {"command": command, "cost": Run.costs.settings(), "figures": found}
        options.json.write_text(json.dumps(described, indent=1))
    print(json.dumps(Run.costs.settings()))
    print(table(list(found[0]), [[_short(value) for value in case.values()] for case in found]))


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 2 else f"{value:.2f}" if value < 20 else f"{value:.0f}"


if __name__ == "__main__":
    main()
