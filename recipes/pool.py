"""Clean rows for training: made by worker processes, kept on the training device.

Workers generate problems, tokenise them and send chunks of packed rows through a queue; `Pool`
copies them into one ring on the device, from which batches are sampled. The processor is thus never
in the way of a step: noise is sampled on the device and rows are sampled again until newer ones
overwrite them.

A packed row is int16 [length + 3]: prompt, answer, end-of-text filler, then the lengths of prompt
and answer and the number of the task.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from lopa.errors import LopaError
from recipes.noise import LARGE
from recipes.settings import Data
from recipes.tokenizer import EOS_ID

EXTRA = 3  # columns behind the tokens


def pack(
    built: tokenizers.Tokenizer,
    texts: Sequence[tuple[str, str, int]],  # prompt, answer, task number
    length: int,
) -> tuple[np.ndarray, int]:
    """Packed rows of the texts that fit, and how many did not."""
    prompts = built.encode_batch([prompt for prompt, _, _ in texts])
    answers = built.encode_batch([answer for _, answer, _ in texts])
    packed = np.full((len(texts), length + EXTRA), EOS_ID, np.int16)
    kept = 0
    for prompt, answer, (_, _, task) in zip(prompts, answers, texts, strict=True):
        first, second = len(prompt.ids), len(answer.ids)
        blocks = (second + LARGE) // LARGE  # whole blocks, with room for the end of text
        if not first or first + blocks * LARGE > length:
            continue
        row = packed[kept]
        row[:first] = prompt.ids
        row[first : first + second] = answer.ids
        row[length:] = first, second, task
        kept += 1
    return packed[:kept], len(texts) - kept


def generated(data: Data, chunk: int) -> list[tuple[str, str, int]]:
    """The texts of one numbered chunk: the same ones in every process."""
    source = importlib.import_module(data.source)
    names = list(data.tasks)
    shares = np.array(list(data.tasks.values()))
    choice = np.random.default_rng(chunk).choice(len(names), data.chunk, p=shares / shares.sum())
    texts = []
    for row, task in enumerate(choice.tolist()):
        problem = source.generate(names[task], chunk * data.chunk + row, "train")
        texts.append((problem.prompt, problem.answer, task))
    return texts


def _work(data: Data, tokenizer: str, chunks: Iterable[int], out: Any, parent: int) -> None:
    """A worker: chunk after chunk until its parent is gone or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are workers enough
    try:
        built = tokenizers.Tokenizer.from_file(tokenizer)
        for chunk in chunks:
            packed, dropped = pack(built, generated(data, chunk), data.length)
            while os.getppid() == parent:
                try:
                    out.put((chunk, packed, dropped), timeout=5)
                    break
                except queue.Full:
                    continue
            else:
                out.cancel_join_thread()  # nobody is left to read what is still in the pipe
                return
    except Exception:
        out.put((-1, traceback.format_exc(), 0), timeout=30)


class Pool:
    """A ring of packed rows on `device`, filled by `workers` processes from `first_chunk` on."""

    def __init__(
        self, data: Data, tokenizer: Path, device: torch.device, first_chunk: int = 0
    ) -> None:
        self.data = data
        self.rows = torch.zeros(
            data.capacity, data.length + EXTRA, dtype=torch.int16, device=device
        )
        self.received = 0  # rows so far
        self.dropped = 0  # rows too long, so far
        self.next_chunk = first_chunk
        self._failure = ""
        self._closed = False
        # Fresh interpreters: forking a process that has used CUDA or threads is not safe.
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue(maxsize=2 * data.workers)
        self._workers = [
            context.Process(
                target=_work,
                args=(
                    data,
                    str(tokenizer),
                    range(first_chunk + index, 2**31, data.workers),
                    self._queue,
                    os.getpid(),
                ),
                daemon=True,
            )
            for index in range(data.workers)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def filled(self) -> int:
        return min(self.received, self.data.capacity)

    def wait(self) -> None:
        """Until there is enough to begin with, or patience ends with at least something."""
        deadline = time.monotonic() + self.data.patience
        while self.filled < min(self.data.ready, self.data.capacity):
            alive = any(worker.is_alive() for worker in self._workers)
            if time.monotonic() > deadline or not alive:
                self.refill(limit=1000)
                if not self.filled:
                    reason = self._failure.strip().splitlines()[-1:] or ["no rows in time"]
                    raise LopaError(f"the data workers produced nothing: {reason[0]}")
                print(f"beginning with {self.filled} rows only", flush=True)
                return
            self.refill(limit=4)
            time.sleep(0.05)

    def refill(self, limit: int = 1) -> None:
        """Take at most `limit` waiting chunks in; never blocks."""
        for _ in range(limit):
            if not self.data.renew and self.received >= self.data.capacity:
                self.close()
            if self._closed:
                return
            try:
                chunk, packed, dropped = self._queue.get_nowait()
            except queue.Empty:
                return
            if chunk < 0:
                self._failure = packed
                print(f"a data worker failed:\n{packed}", flush=True)
                continue
            self.next_chunk = max(self.next_chunk, chunk + 1)
            self.dropped += dropped
            self._store(torch.from_numpy(packed))

    def _store(self, packed: Tensor) -> None:
        start = self.received % self.data.capacity
        head = packed[: self.data.capacity - start]
        self.rows[start : start + len(head)] = head.to(self.rows.device)
        tail = packed[len(head) :][: self.data.capacity]
        if len(tail):
            self.rows[: len(tail)] = tail.to(self.rows.device)
        self.received += len(packed)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, length + EXTRA] random rows."""
        return sample(self.rows[: self.filled], count, generator)

    def close(self) -> None:
        """End the workers; the rows stay. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(timeout=5)
        self._queue.close()
        self._queue.cancel_join_thread()


def sample(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    index = torch.randint(len(rows), (count,), device=rows.device, generator=generator)
    return rows[index]


def unpack(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [N, length], prompt [N], answer [N], task [N], all int64."""
    wide = rows.long()
    return wide[:, :-EXTRA], wide[:, -3], wide[:, -2], wide[:, -1]
