"""Tasks of lm-evaluation-harness as exercises: its questions, examples, filters and metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lopa.errors import ConfigError
from lopa.evaluation.benchmark import Exercise, Scores
from lopa.evaluation.extras import require
from lopa.evaluation.judge import check_isolation, code_of_prompt, judge
from lopa.evaluation.protocol import Protocol
from lopa.evaluation.rows import Row

_SEED = 1234  # the harness's own, for sampling examples


def harness_exercises(
    name: str,
    protocol: Protocol,
    rows: list[Row] | None,
    examples: list[Row] | None,
    shots: int,
    limit: int | None,
    chat: bool,
) -> tuple[list[Exercise], tuple[str, ...]]:
    """The exercises and the strings that end an answer."""
    if name == "humaneval":
        require("evalplus.sanitize", "evalplus", "looking for the code in an answer to humaneval")
    if name in ("humaneval", "mbpp"):
        check_isolation()
    tasks = _load(name, protocol, rows, examples, shots)
    until = tuple(tasks[0].config.generation_kwargs["until"])
    found: list[Exercise] = []
    for task in tasks:
        task.set_fewshot_seed(_SEED)
        for doc in islice(task.eval_docs, limit and limit - len(found)):
            prompt = task.fewshot_context(
                doc,
                shots,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                chat_template=_messages,
                gen_prefix=task.doc_to_prefix(doc),
            )
            if name == "humaneval":
                score = partial(_score_completion, task, doc, until)
            else:
                score = partial(_score, task, doc, protocol.score)
            found.append(Exercise(prompt, score))
    return found, until if protocol.cut else ()


def _messages(messages: list[dict[str, str]], add_generation_prompt: bool) -> Any:
    """The harness asks for a text; the engine applies the model's template itself."""
    return messages


def _load(
    name: str,
    protocol: Protocol,
    rows: list[Row] | None,
    examples: list[Row] | None,
    shots: int,
) -> list[Any]:
    where = require("lm_eval.tasks", "harness", name)
    require("lopa.evaluation.code_eval", "harness", name).install()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets = require("datasets", "harness", name)
    datasets.disable_progress_bars()
    changes: dict[str, Any] = {"num_fewshot": shots}
    names: Sequence[str] = protocol.tasks
    if rows is not None:
        splits = {"test": datasets.Dataset.from_list(rows)}
        if examples is not None:
            splits["train"] = datasets.Dataset.from_list(examples)
        elif protocol.samples_rows:
            changes["fewshot_split"] = "test"  # the harness leaves the row itself out
        changes["custom_dataset"] = lambda **_: splits
        names = names[:1]  # the tasks of a benchmark differ by their rows alone
    manager = where.TaskManager(
        include_defaults=False, include_path=Path(where.__file__).parent / protocol.folder
    )
    wanted = {"group": name, "task": [{"task": task, **changes} for task in names]}
    try:
        return list(manager.load(wanted)["tasks"].values())
    except ImportError as error:
        raise ConfigError(
            f"{name} needs a package that is not here ({error.name or error}): "
            "pip install 'lopa[harness]'"
        ) from error
    except Exception as error:  # the clients of the hub raise a dozen unrelated kinds
        if rows is not None:
            raise ConfigError(f"the rows of {name} cannot be used ({_line(error)})") from error
        raise ConfigError(
            f"the rows of {name} could not be fetched ({_line(error)}): give them with --data FILE"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _score(task: Any, doc: Row, counts: str, text: str) -> Scores:
    """By metric and filter, as the harness names them; `counts` first."""
    instance = task.construct_requests(doc=doc, ctx="", metadata=(task.task_name, 0, 1))
    instance.resps = [text]
    task._instances = [instance]
    task.apply_filters()
    found = {
        f"{metric},{name}": bool(value)
        for name, filtered in instance.filtered_resps.items()
        for metric, value in task.process_results(doc, [filtered]).items()
    }
    return {counts: found.pop(counts), **found}


def _score_completion(task: Any, doc: Row, until: Sequence[str], text: str) -> Scores:
    """HumanEval: what is code in the whole answer, and the answer up to the first stop string."""
    from lopa.evaluation.sanitize import sanitize

    body = text.partition("```python\n")[2] or text
    cut = text
    for stop in until:
        cut = cut.partition(stop)[0]
    prompt, entry_point, tests = doc["prompt"], doc["entry_point"], task.doc_to_target(doc)
    given = code_of_prompt(prompt)
    programs = {
        "pass@1,sanitized": sanitize(f"{prompt}\n{body.partition('```')[0]}", entry_point),
        "pass@1,create_test": prompt + cut,
    }
    return {
        name: judge(program, tests, given=given, entry_point=entry_point).passed
        for name, program in programs.items()
    }
