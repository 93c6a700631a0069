"""An engine whose rounds happen in other processes; `make test-faults` kills those by the dozen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
import torch
from fitting import check_answer
from small_automata import balanced

import goldens
from lopa import DecodeConfig
from lopa.distributed.channel import Channel
from lopa.distributed.mesh import backend_for
from lopa.distributed.parallel_llm import ParallelLLM
from lopa.distributed.placement import placements
from lopa.distributed.rank_group import LostRankError, RankGroup, RankHandle
from lopa.errors import ConfigError, DeviceError
from lopa.runner.device import choose_device

CASE = goldens.FOLDER / "cases" / "01_lopa_k4_b8.json"


@pytest.fixture(scope="module")
def llm() -> Iterator[ParallelLLM]:
    request, _ = cases.golden(CASE)
    loaded: list[tuple[int, int]] = []
    with ParallelLLM(
        request.model,
        branch_parallel=2,
        rank_timeout=3.0,
        progress=lambda *tensors: loaded.append(tensors),
        device="cpu",
        dtype="float32",
        **dict(request.options),
    ) as found:
        done, total = loaded[-1]  # once, although there are two ranks
        assert done == total > 0
        assert loaded == sorted(set(loaded))
        yield found
    assert not alive(found.supervisor.pids)


def shared_memory() -> set[str]:
    """What torch and its backends would leave; other programs have theirs."""
    kinds = ("torch", "gloo", "nccl", "lopa")
    return {name for name in os.listdir("/dev/shm") if name.startswith(kinds)}


def alive(pids: list[int]) -> list[int]:
    """Those that still run; what has ended but was not waited for does not."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        running += [pid] if state != "Z" else []
    return running


def test_requests_outlive_the_ranks(llm: ParallelLLM) -> None:
    """Generate, stream, run together, abort; lose a rank to SIGKILL and one to SIGSTOP."""
    request, expected = cases.golden(CASE)
    prompt = list(request.prompt)
    assert llm.generate(prompt, request.config).token_ids == expected
    for rank, how in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
        faults = len(llm.supervisor.faults)
        stream = llm.stream(prompt, request.config)
        for _ in range(4):
            next(stream)
        os.kill(llm.supervisor.pids[rank], how)
        *_, last = stream
        assert last.output is not None
        assert last.output.token_ids == expected
        # The ranks may have been done before the signal came: then the next request finds out.
        assert llm.generate(prompt, request.config).token_ids == expected
        (fault,) = llm.supervisor.faults[faults:]
        assert fault.rank == rank
        # One that is gone is noticed at once, one that hangs by its silence.
        assert ("silent" in fault.reason) == (how == signal.SIGSTOP)

    other = DecodeConfig(
        branches=3, attention="block", threshold=0.05, max_new_tokens=24, block_size=8
    )
    asked = [(prompt, request.config), (list(range(3, 20)), other), (prompt, other)]
    alone = [
        cases.alone(cases.Request(request.model, tuple(p), c, request.options)) for p, c in asked
    ]
    engine = llm.engine(max_running=2, token_budget=100)
    sessions = [llm.session(p, c) for p, c in asked]
    dropped = llm.session(prompt, request.config)
    for session in (dropped, *sessions):
        engine.add(session)
    engine.step()
    engine.abort(dropped)
    assert len(engine.running) + len(engine.waiting) == 3
    killed = False
    while engine.busy:
        engine.step()
        if not killed and engine.running:
            os.kill(llm.supervisor.pids[0], signal.SIGKILL)
            killed = True
    assert [s.output.token_ids for s in sessions if s.output] == alone
    assert dropped.output is None

    # The supervisor is there for more than one batch.
    llm.generate(prompt, request.config)  # which finds out about the last kill, if nobody did
    pids = llm.supervisor.pids
    found = dict(llm.generate_as_completed([prompt, prompt[:5]], request.config, max_running=2))
    assert found[0].token_ids == expected
    assert llm.supervisor.pids == pids


def test_an_answer_that_has_to_fit_outlives_a_rank(llm: ParallelLLM) -> None:
    vocab, eos = llm.config.vocab_size, llm.config.eos_ids
    pattern = balanced(40, 41, range(50, 120), 2, vocab, eos)
    config = llm.decode_config(max_new_tokens=24, block_size=8, branches=3, threshold=0.999)
    answers = []
    for dies in (False, True):
        session = llm.session_from_ids([5, 8, 11], config, automaton=pattern)
        stream = llm.engine().stream(session)
        for _ in range(2):
            next(stream)
        if dies:
            os.kill(llm.supervisor.pids[1], signal.SIGKILL)
        *_, last = stream
        assert last.output is not None
        check_answer(last.output, session.decoder)
        answers.append(last.output.token_ids)
    assert answers[0] == answers[1]
    llm.generate([5, 8, 11], config)  # which finds out about the kill, if nobody did


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel 3 cannot cut this model"):
        ParallelLLM(cases.DREAM, tensor_parallel=3, device="cpu")
    with pytest.raises(ConfigError, match="rank-timeout must be above 0"):
        ParallelLLM(cases.DREAM, branch_parallel=2, rank_timeout=0, device="cpu")


def test_an_open_stream_goes_on_beside_other_engines(llm: ParallelLLM) -> None:
    """Engines share the ranks: another one neither stops a stream nor loses its sessions."""
    request, expected = cases.golden(CASE)
    prompt = list(request.prompt)
    stream = llm.stream(prompt, request.config)
    next(stream)
    other = llm.engine(max_running=2, token_budget=100)
    assert not other.busy
    prompts = [prompt, prompt[:5], prompt]
    alone = [llm.generate(p, request.config).token_ids for p in prompts[:2]]
    beside = dict(llm.generate_as_completed(prompts, request.config, max_running=2))
    assert [beside[i].token_ids for i in range(3)] == [*alone, alone[0]]
    *_, last = stream
    assert last.output is not None
    assert last.output.token_ids == expected
    assert not llm.supervisor._sessions


def test_branches_auto_by_a_cost_that_the_ranks_measure(llm: ParallelLLM) -> None:
    request, expected = cases.golden(CASE)
    prompt = list(request.prompt)
    stream = llm.stream(prompt, request.config)  # the ranks go on with it beside the measure
    next(stream)
    assert not llm.knows_round_cost
    os.kill(llm.supervisor.pids[1], signal.SIGKILL)  # the next group is asked again
    cost = llm.round_cost
    assert len(cost.points) >= 3
    assert llm.round_cost is cost
    *_, last = stream
    assert last.output is not None
    assert last.output.token_ids == expected
    config = DecodeConfig(branches="auto", max_new_tokens=16, block_size=8)
    outputs = llm.generate([prompt, prompt[:5]], config)
    assert [o.trace.settings["round_cost"] for o in outputs] == [cost.settings()] * 2
    assert all(o.finish in ("length", "eos") for o in outputs)


def test_who_counts_as_too_slow() -> None:
    """By what a rank says it is at: waiting for another is not its fault."""
    group = object.__new__(RankGroup)
    group.timeout, group._finished_a_round = 10.0, True
    end, _other = socket.socketpair()
    handle = RankHandle(3, 0, -1, Channel(end))
    with end, _other:
        group.handle_message(handle, ("heartbeat", "forward", 7.9))
        group.handle_message(handle, ("heartbeat", "waiting", 9.9))
        with pytest.raises(LostRankError, match=r"it has been at forward for 9.0 s") as found:
            group.handle_message(handle, ("heartbeat", "forward", 9.0))
        assert found.value.rank == 3
        group._finished_a_round = False  # a first forward may compile kernels
        group.handle_message(handle, ("heartbeat", "forward", 9.0))


def test_devices_and_backends_by_name() -> None:
    with pytest.raises(DeviceError, match="no device 'npu' here"):
        choose_device("npu")
    assert backend_for(torch.device("cpu"), 2) == "gloo"
    assert [place.device for place in placements("cpu", 3)] == ["cpu"] * 3


@pytest.mark.parametrize("given", ["1", "1,2"])
def test_ranks_take_no_more_threads_than_they_may(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [place.threads for place in placements("cpu", 2)] == [4, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert [place.threads for place in placements("cpu", 2)] == [1, 1]


@pytest.mark.faults
def test_no_rank_outlives_its_parent(tmp_path: Path) -> None:
    """The parent is killed without warning while one of its ranks is stopped."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from lopa.distributed.parallel_llm import ParallelLLM\n"
        f"llm = ParallelLLM({str(cases.DREAM)!r}, branch_parallel=2, device='cpu')\n"
        "os.kill(llm.supervisor.pids[1], signal.SIGSTOP)\n"
        "print(*llm.supervisor.pids, llm.supervisor._fork_server.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    shared = shared_memory()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(alive(pids)) == 3
        parent.kill()
    until = time.monotonic() + 30
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pids)
    assert shared_memory() <= shared
