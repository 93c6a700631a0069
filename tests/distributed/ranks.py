"""Processes that act as the ranks of a group, started once and used for many cases."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from lopa.distributed.mesh import Mesh

SECONDS = 100  # that a case may take before it counts as a hang


class Ranks:
    """`run` calls a function of a mesh on every rank and returns what each answered."""

    def __init__(self, world: int) -> None:
        self.world = world
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(
        self, work: Callable[..., Any], *arguments: Any, branches: int, tensors: int = 1
    ) -> list[Any]:
        world = branches * tensors
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes[:world]:
            pipe.send((work, arguments, world, branches, tensors, store.port))
        answers: dict[int, Any] = {}
        while len(answers) < world:
            left = [self._pipes[rank] for rank in range(world) if rank not in answers]
            ready = wait(left, SECONDS)
            assert ready, f"ranks hang: only {sorted(answers)} answered"
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                good, answers[rank] = pipe.recv()  # type: ignore[union-attr]
                assert good, f"rank {rank}: {answers[rank]}"
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()  # they have answered, and hold nothing
            process.join()
            pipe.close()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with suppress(EOFError):
        while (job := pipe.recv()) is not None:
            work, arguments, world, branches, tensors, port = job
            mesh = None
            try:
                mesh = Mesh.join(
                    rank,
                    world,
                    branch_parallel=branches,
                    tensor_parallel=tensors,
                    device=torch.device("cpu"),
                    backend="gloo",
                    timeout=60.0,
                    store=dist.TCPStore("127.0.0.1", port, is_master=False),
                )
                pipe.send((True, work(mesh, *arguments)))
            except Exception as error:
                import traceback

                pipe.send((False, f"{error!r}\n{traceback.format_exc()}"))
            finally:
                if mesh is not None:
                    mesh.close()
