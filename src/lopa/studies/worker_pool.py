"""Processes that decode for a study, each with a model of its own on the same device.

One process cannot keep a fast device busy with a small model: the host's part of a round is too
long for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from lopa.engine.llm import LLM
from lopa.evaluation.sample import Sample
from lopa.studies.study import Job

_llm: LLM  # of a worker process


class Workers:
    """Decodes jobs in `count` processes; models are loaded with `options` of LLM."""

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _load, (dict(options),))

    def __call__(self, jobs: Sequence[Job]) -> Iterator[list[Sample]]:
        """The samples of each job, the first that is done first."""
        for future in as_completed([self._pool.submit(_run, job) for job in jobs]):
            yield future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _load(options: dict[str, Any]) -> None:
    global _llm
    import torch

    torch.set_num_threads(1)
    _llm = LLM(**options)


def _run(job: Job) -> list[Sample]:
    return list(job.run(_llm))
