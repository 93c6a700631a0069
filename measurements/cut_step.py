"""The fused step of a cut model against plain torch, by ranks that share one GPU over gloo.

    PYTHONPATH=src python measurements/cut_step.py --out cut.json

Two ranks (TP 2), then four (TP 2 × BP 2), decode the same requests with the fused kernels and with
plain torch; in fp32 the tokens have to be those of plain torch on the whole model. A line says `ok`
or `wrong` for each model. Rounds are timed too: not to be compared with those of a GPU per rank,
since every sum crosses the host. Then a sum over nccl is captured, and a rank of a supervised group
is killed in the midst of its rounds. The same in bf16 says how many tokens differ, which is not
judged. What of that does not fit into `--seconds` is left out. The exit status is 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lopa import LLM, DecodeConfig
from lopa.atomic_write import write_lines
from lopa.distributed.branch_runner import BranchRunner
from lopa.distributed.channel import die_with
from lopa.distributed.mesh import Mesh, make_store
from lopa.distributed.parallel_llm import ParallelLLM
from lopa.distributed.part_sum import PartSum
from lopa.distributed.placement import use_loopback
from lopa.distributed.rank_llm import RankLLM
from lopa.engine import loader
from lopa.models import checkpoint
from lopa.models.families import family_named
from lopa.runner.backend_torch import TorchBackend
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.graphs import GraphCache
from lopa.runner.paged import PagedRunner

CACHE_TOKENS = 16_384
RANK_TIMEOUT = 60.0  # seconds; ranks of a fresh machine compile kernels
ODD_VOCABULARY = 20_001  # the parts differ by one, and each has two chunks of the confidence kernel
# Small models: (family, what its tiny config is changed to)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dream": (
        "dream",
        {
            "vocab_size": ODD_VOCABULARY,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
        },
    ),
    "llada2": (
        "llada2",
        {
            "vocab_size": ODD_VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 64,
            "num_experts": 32,
            "num_shared_experts": 1,
            "max_position_embeddings": 4096,
        },
    ),
    "sdar-moe": ("sdar-moe", {"moe_intermediate_size": 64, "hidden_size": 128}),
}
MESHES = ((1, 2), (2, 2))  # branch × tensor
DTYPES = ("float32", "bfloat16")
BACKENDS = ("torch", "eager", "fused")  # eager: the fused kernels without graphs
CLASSES = {"torch": "TorchBackend", "eager": "TritonBackend", "fused": "TritonBackend"}
LEAST_SECONDS = 30.0  # that a supervised group is given, or it is left out


class OutOfTimeError(Exception):
    """The ranks have not answered in time."""


def requests(name: str) -> list[tuple[list[int], DecodeConfig]]:
    """With branches, sampled, ranked otherwise, and behind a prompt that goes layer by layer."""
    attention = "full" if name == "dream" else "block"
    plain = DecodeConfig(
        max_new_tokens=32, block_size=8, threshold=0.05, branches=3, attention=attention
    )  # type: ignore[arg-type]
    asked = [
        (list(range(3, 12)), plain),
        (list(range(40, 90)), plain.changed(branches=7, ranking="margin")),
        (list(range(9, 20)), plain.changed(temperature=0.7, top_p=0.9)),
    ]
    if name != "sdar-moe":  # its positions end before
        asked.append(([20 + i % 200 for i in range(2500)], plain.changed(ranking="neg_entropy")))
        asked.append((list(range(5, 30)), plain.changed(branches=1, temperature=0.8, seed=3)))
    return asked


def decode(llm: Any, name: str) -> list[list[int]]:
    """All at once."""
    sessions = [llm.session(prompt, config) for prompt, config in requests(name)]
    for _ in llm.engine().run(iter(sessions)):
        pass
    return [session.output.token_ids for session in sessions]


def round_ms(llm: Any) -> float:
    """The median of rounds of 8 rows, of a second answer: the first has captured the graphs."""
    config = DecodeConfig(max_new_tokens=64, block_size=32, branches=7, attention="block")
    config = config.changed(early_stop=False, threshold=0.9)
    for _ in range(2):
        seconds = [event.round.seconds for event in llm.stream(list(range(3, 67)), config)]
    return 1e3 * statistics.median(seconds[2:])


def pieces(backend: TorchBackend) -> dict[str, int]:
    """Of the last graphs."""
    graphs = backend._lanes[0].graphs  # type: ignore[attr-defined]
    layers, head = list(graphs.layers.values())[-1], list(graphs.heads.values())[-1]
    return {"layers": len(layers.graph), "head": len(head.graph)}


def on_rank(mesh: Mesh, folder: str, name: str, dtype: str) -> dict[str, Any]:
    """By backend: tokens and the time of a round; of rank 0 also the tokens of the whole model."""
    options = {"dtype": dtype, "cache_tokens": CACHE_TOKENS}
    found: dict[str, Any] = {"tokens": {}, "round_ms": {}, "backend": {}}
    for label in BACKENDS:
        llm: Any = load_part(folder, mesh, label, **options)
        assert isinstance(llm.runner, BranchRunner)
        assert isinstance(llm.runner.local, PagedRunner)
        found["tokens"][label] = decode(llm, name)
        found["round_ms"][label] = round_ms(llm)
        found["backend"][label] = type(llm.runner.local.backend).__name__
        if label == "fused":
            found["pieces"] = pieces(llm.runner.local.backend)
        free(llm)
        if mesh.rank == 0:
            same = found["tokens"][label] == found["tokens"]["torch"]
            told = f"{mesh.world} ranks, {name}, {dtype}, {label}: as by torch: {same}"
            print(told, file=sys.stderr, flush=True)
    if mesh.rank == 0:
        llm = LLM(folder, device=str(mesh.device), backend="sdpa", **options)
        found["tokens"]["whole"] = decode(llm, name)
        free(llm)
    mesh.barrier()
    return found


def load_part(folder: str, mesh: Mesh, label: str, **options: Any) -> RankLLM:
    if label == "torch":
        return RankLLM(folder, mesh=mesh, backend="sdpa", **options)
    if label == "fused":
        return RankLLM(folder, mesh=mesh, backend="triton", **options)
    without_graphs = partial(TritonBackend, graphs=False)
    with patch.object(loader, "choose_backend", lambda *_: without_graphs):
        return RankLLM(folder, mesh=mesh, **options)


def free(llm: Any) -> None:
    llm.runner = llm.model = llm._local = None
    gc.collect()
    torch.cuda.empty_cache()


def serve(rank: int, parent: int, pipe: Connection) -> None:
    """A process that is a rank of one mesh after another."""
    die_with(parent)
    use_loopback()
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    while True:
        branches, tensors, port, jobs = pipe.recv()
        mesh = Mesh.join(
            rank,
            branches * tensors,
            branch_parallel=branches,
            tensor_parallel=tensors,
            device=device,
            backend="gloo",
            timeout=RANK_TIMEOUT,
            store=make_store("127.0.0.1", port, is_master=False),
        )
        try:
            for job in jobs:
                pipe.send((True, on_rank(mesh, *job)))
                if not mesh.broadcast_object(pipe.recv() if rank == 0 else None):
                    break
        except Exception:
            pipe.send((False, traceback.format_exc()))
            raise
        finally:
            mesh.close()


class Ranks:
    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, os.getpid(), there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(
        self, branches: int, tensors: int, jobs: list[tuple[str, str, str]], end: float
    ) -> Iterator[list[dict[str, Any]]]:
        """What the ranks found, job by job, until the jobs or the time end."""
        store = make_store("127.0.0.1", 0, is_master=True)
        pipes = self.pipes[: branches * tensors]
        for pipe in pipes:
            pipe.send((branches, tensors, store.port, jobs))
        longest = 0.0
        for index in range(len(jobs)):
            began = time.monotonic()
            yield [self._answer(pipe, end) for pipe in pipes]
            longest = max(longest, time.monotonic() - began)
            more = index + 1 < len(jobs) and time.monotonic() + longest < end
            pipes[0].send(more)
            if not more:
                return

    def _answer(self, pipe: Connection, end: float) -> dict[str, Any]:
        if not wait([pipe], max(1.0, end - time.monotonic())):
            raise OutOfTimeError
        good, answer = pipe.recv()
        if not good:
            raise RuntimeError(answer)
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def sum_in_a_graph(parent: int, pipe: Connection) -> None:
    """In a process of its own: a sum over nccl captured and replayed, in a group of one rank.

    nccl takes no two ranks of one GPU: this shows that a graph may have the sum, not what it is.
    """
    die_with(parent)
    device = torch.device("cuda:0")
    store = make_store("127.0.0.1", 0, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    mesh = Mesh(0, 1, 2, device, "nccl", within=dist.group.WORLD)
    x, out, graphs = torch.ones(64, device=device), torch.zeros(64, device=device), []
    cache = GraphCache(device)
    for _ in range(2):
        graphs.append(cache._capture(lambda: out.copy_(PartSum(mesh)(x * 2))))
    for graph in graphs:
        x.add_(1)
        graph.replay()
    pipe.send([len(graph) for graph in graphs] == [1, 1] and bool((out == 6).all()))
    graphs.clear()  # nccl waits for them
    dist.destroy_process_group()


def nccl_is_captured() -> bool:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sum_in_a_graph, args=(os.getpid(), there), daemon=True)
    process.start()
    there.close()
    try:
        return bool(wait([here], 40.0)) and bool(here.recv())
    except EOFError:  # it has said why
        return False
    finally:
        process.kill()
        process.join()


def judged(answers: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """What is said of a model on a mesh."""
    first = answers[0]
    tokens = first["tokens"]
    same = all(answer["tokens"][label] == tokens[label] for answer in answers for label in BACKENDS)
    backends = [answer["backend"] for answer in answers]
    is_fused = all(b == CLASSES for b in backends)
    by_request = {
        label: [
            sum(a != b for a, b in zip_longest(mine, theirs))
            for mine, theirs in zip(tokens[label], tokens["whole"], strict=True)
        ]
        for label in BACKENDS
    }
    differ = {label: sum(counts) for label, counts in by_request.items()}
    good = same and is_fused and (dtype != "float32" or not any(differ.values()))
    return {
        "ok": good,
        "ranks_agree": same,
        "fused": is_fused,
        "tokens": sum(map(len, tokens["whole"])),
        "differ": differ,
        "differ_by_request": by_request,
        "pieces": first["pieces"],
        "round_ms": {
            label: round(max(answer["round_ms"][label] for answer in answers), 3)
            for label in BACKENDS
        },
    }


def killed(folder: str, name: str) -> dict[str, Any]:
    """A supervised group that loses a rank in a round: the tokens of an undisturbed one."""
    options: dict[str, Any] = {"dtype": "float32", "cache_tokens": CACHE_TOKENS}
    whole = LLM(folder, device="cuda", backend="sdpa", **options)
    expected = decode(whole, name)
    free(whole)
    faults: list[str] = []
    with ParallelLLM(
        folder,
        tensor_parallel=2,
        device="cuda",
        rank_timeout=20.0,
        report=faults.append,
        backend="triton",
        **options,
    ) as llm:
        sessions = [llm.session(prompt, config) for prompt, config in requests(name)]
        rounds = 0
        for _ in llm.engine().run(iter(sessions)):
            pass
        undisturbed = [session.output.token_ids for session in sessions if session.output]
        sessions = [llm.session(prompt, config) for prompt, config in requests(name)]
        engine = llm.engine()
        for session in sessions:
            engine.add(session)
        while engine.busy:
            engine.step()
            rounds += 1
            if rounds == 5:
                os.kill(llm.supervisor.pids[1], signal.SIGKILL)
        found = [session.output.token_ids for session in sessions if session.output]
    return {
        "ok": found == undisturbed == expected and len(faults) > 0,
        "undisturbed": undisturbed == expected,
        "after_a_kill": found == expected,
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes, as JSON")
    parser.add_argument("--seconds", type=float, default=110.0, help="for everything")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    began = time.monotonic()
    end = began + options.seconds
    if not torch.cuda.is_available():
        sys.exit("cut_step: needs a CUDA device")
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    names = options.models.split(",")
    lines: list[dict[str, Any]] = []
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            family, changes = family_named(MODELS[name][0]), MODELS[name][1]
            checkpoint.write_tiny(
                replace(family, tiny={**family.tiny, **changes}), Path(folder, name)
            )
        ranks = Ranks(max(b * t for b, t in MESHES))
        try:
            for dtype in DTYPES:
                for branches, tensors in MESHES:
                    mesh = f"TP {tensors}" + (f" × BP {branches}" if branches > 1 else "")
                    jobs = [(str(Path(folder, name)), name, dtype) for name in names]
                    all_answers = ranks.run(branches, tensors, jobs, end)
                    for name, answers in zip_longest(names, all_answers):
                        if answers is None:
                            good &= dtype != "float32"
                            print(f"left out: {mesh}, {name}, {dtype}", flush=True)
                            continue
                        line = {"mesh": mesh, "model": name, "dtype": dtype}
                        line |= judged(answers, dtype)
                        lines.append(line)
                        good &= line["ok"]
                        print(said(line), flush=True)
                if dtype == "float32":
                    record["nccl"] = nccl_is_captured()
                    good &= record["nccl"]
                    is_good = "ok" if record["nccl"] else "wrong"
                    print(f"{is_good}: a graph has a sum over nccl, of one rank", flush=True)
                if dtype == "float32" and end - time.monotonic() < LEAST_SECONDS:
                    print("left out: a rank is killed", flush=True)
                elif dtype == "float32":
                    found = record["killed"] = killed(str(Path(folder, names[0])), names[0])
                    good &= found["ok"]
                    said_of = f"a rank is killed, {names[0]}, {dtype}: {found['faults']}"
                    print(f"{'ok' if found['ok'] else 'wrong'}: {said_of}", flush=True)
        except OutOfTimeError:
            good &= dtype != "float32"
            print(f"left out: what is left of {dtype}", flush=True)
        except Exception as error:
            good = False
            print(f"wrong: {error}", flush=True)
            print(f"cut_step: {error}", file=sys.stderr)
        finally:
            ranks.close()
    record |= {"seconds": round(time.monotonic() - began, 1), "ok": good, "lines": lines}
    write_lines(options.out, [json.dumps(record, indent=1)])
    print(f"{'ok' if good else 'wrong'} in {record['seconds']} s", flush=True)
    return 0 if good else 1


def said(line: dict[str, Any]) -> str:
    differ, took = line["differ"], line["round_ms"]
    return (
        f"{'ok' if line['ok'] else 'wrong'}: {line['mesh']}, {line['model']}, {line['dtype']}: "
        f"of {line['tokens']} tokens {differ['fused']} differ fused, {differ['eager']} without "
        f"graphs and {differ['torch']} by torch from the whole model; a round of 8 rows takes "
        f"{took['fused']}, {took['eager']} and {took['torch']} ms; "
        f"{line['pieces']['layers']} + {line['pieces']['head']} pieces of graph"
    )


if __name__ == "__main__":
    sys.exit(main())
