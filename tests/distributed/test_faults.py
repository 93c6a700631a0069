"""Ranks die, hang and come back, and every request gets its tokens: `make test-faults`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cases
import pytest
from test_supervisor import alive, shared_memory

from lopa import LLM, DecodeConfig
from lopa.distributed.parallel_llm import ParallelLLM
from lopa.tasks import generate

pytestmark = pytest.mark.faults

TIMEOUT = 2.0
Asked = list[tuple[list[int], DecodeConfig, list[int]]]  # prompt, settings, the right tokens


@contextmanager
def group(model: str, tmp_path: Path, **options: object) -> Iterator[ParallelLLM]:
    """A group that leaves nothing behind: no process, no shared memory, no file."""
    shared = shared_memory()
    pids: set[int] = set()
    with ParallelLLM(
        model,
        device="cpu",
        dtype="float32",
        **{"rank_timeout": TIMEOUT, **options},  # type: ignore[arg-type]
    ) as llm:
        supervisor = llm.supervisor
        start: Callable[[], None] = supervisor._start

        def noted() -> None:
            start()
            pids.update(supervisor.pids)

        pids.update(supervisor.pids)
        supervisor._start = noted  # type: ignore[method-assign]
        yield llm
        assert supervisor._fork_server is not None
        pids.add(supervisor._fork_server.process.pid)
    assert not alive(list(pids))
    assert shared_memory() <= shared
    assert not list(tmp_path.iterdir())


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def asked(model: str, options: tuple[tuple[str, object], ...], count: int) -> Asked:
    """Requests of all kinds, over and over."""
    configs = [
        DecodeConfig(
            decoder="lopa",
            branches=k,
            attention=attention,  # type: ignore[arg-type]
            threshold=0.05,
            max_new_tokens=32,
            block_size=8,
            temperature=temperature,
        )
        for k, attention, temperature in (
            (4, "full", 0.0),
            (3, "block", 0.0),
            (2, "full", 1.0),
            (0, "full", 0.0),
        )
    ]
    configs.append(DecodeConfig(decoder="fast-dllm", max_new_tokens=32))
    found: Asked = []
    for index in range(count):
        prompt, config = list(range(3, 12 + index % 7)), configs[index % len(configs)]
        request = cases.Request(model, tuple(prompt), config, options)
        found.append((prompt, config, cases.alone(request)))
    return found


def kill_at_random(llm: ParallelLLM, requests: Asked, kills: int, apart: int = 12) -> None:
    """Each rank in turn, dead and hung in turn, at random rounds; every token must be right."""
    draw = random.Random(0)
    engine, done, longest = llm.engine(max_running=3), 0, 0.0
    ranks = len(llm.supervisor.pids)
    turn = 0
    while done < kills:
        sessions = [(llm.session(prompt, config), right) for prompt, config, right in requests]
        for session, _ in sessions:
            engine.add(session)
        until = draw.randint(1, apart)
        while engine.busy:
            began = time.monotonic()
            engine.step()
            longest = max(longest, time.monotonic() - began)
            until -= 1
            if until == 0 and done < kills:
                how = (signal.SIGKILL, signal.SIGSTOP)[turn // ranks % 2]
                os.kill(llm.supervisor.pids[turn % ranks], how)
                turn, done = turn + 1, done + 1
                until = draw.randint(2, apart)
        for session, right in sessions:
            assert session.output is not None
            assert session.output.token_ids == right
    faults = llm.supervisor.faults
    # One that was killed in the last round of all is noticed by the next request.
    assert kills - 1 <= len(faults)
    print(
        f"{kills} kills, {len(faults)} faults; noticed after at most "
        f"{max(f.noticed for f in faults):.2f} s, rebuilt in "
        f"{sorted(f.rebuilt for f in faults)[len(faults) // 2]:.2f} s (median), "
        f"longest step {longest:.2f} s"
    )


def test_killing_two_replicas(tmp_path: Path) -> None:
    with group(str(cases.DREAM), tmp_path, branch_parallel=2) as llm:
        kill_at_random(llm, asked(str(cases.DREAM), (), 10), 26)


def test_killing_replicas_in_two_parts(tmp_path: Path) -> None:
    with group(str(cases.DREAM), tmp_path, branch_parallel=2, tensor_parallel=2) as llm:
        kill_at_random(llm, asked(str(cases.DREAM), (), 10), 20)


def test_killing_ranks_of_the_built_in_model(tmp_path: Path) -> None:
    """Caches of a trained model, written anew under both kinds of attention."""
    alone = LLM("tiny", device="cpu", dtype="float32")
    requests: Asked = []
    for seed, attention in ((0, "full"), (1, "block")):
        config = DecodeConfig(branches=1, attention=attention, max_new_tokens=48, block_size=16)  # type: ignore[arg-type]
        prompt = alone.encode(generate("words", seed=seed, split="eval").prompt)
        requests.append((prompt, config, alone.generate(prompt, config).token_ids))
    with group("tiny", tmp_path, branch_parallel=2) as llm:
        kill_at_random(llm, requests, 4, apart=4)


def test_chaos(tmp_path: Path) -> None:
    """Ranks are killed by the clock, also while a group is being built, and the fork server too."""
    draw = random.Random(1)
    requests = asked(str(cases.DREAM), (), 10)
    with group(str(cases.DREAM), tmp_path, branch_parallel=2) as llm:
        over = threading.Event()

        def kill() -> None:
            for index in range(24):
                if over.wait(draw.uniform(0.02, 0.7)):
                    return
                group = llm.supervisor.group
                fork_server = llm.supervisor._fork_server
                victims = [] if group is None else list(group.pids)
                if index == 12 and fork_server is not None:
                    victims = [fork_server.process.pid]
                if victims:
                    with suppress(ProcessLookupError):  # gone already
                        os.kill(draw.choice(victims), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        while killer.is_alive():
            for prompt, config, right in requests:
                assert llm.generate(prompt, config).token_ids == right
        over.set()
        killer.join()
        assert len(llm.supervisor.faults) >= 5  # some died while a group was being built


def test_a_short_pause_is_no_fault(tmp_path: Path) -> None:
    prompt, config, right = asked(str(cases.DREAM), (), 1)[0]
    timeout = 2 * TIMEOUT  # a busy machine adds to the pause
    with group(str(cases.DREAM), tmp_path, branch_parallel=2, rank_timeout=timeout) as llm:
        stream = llm.stream(prompt, config)
        next(stream)
        pid = llm.supervisor.pids[1]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.4, os.kill, (pid, signal.SIGCONT)).start()
        *_, last = stream
        assert last.output is not None
        assert last.output.token_ids == right
        # Nor is it when nobody listens, in the middle of a request or between two.
        for pause in (1, 10**9):
            for _ in llm.stream(prompt, config):
                pause -= 1
                time.sleep(1.5 * timeout if pause == 0 else 0)
            time.sleep(0.95 * timeout)
        assert not llm.supervisor.faults


def test_a_rank_that_never_starts_is_done_without(tmp_path: Path) -> None:
    """Rank 1 has no device: after a few tries the rest goes on."""
    from lopa.distributed.placement import DevicePlacement

    prompt, config, right = asked(str(cases.DREAM), (), 1)[0]
    with group(str(cases.DREAM), tmp_path, branch_parallel=2) as llm:
        llm.supervisor._placements[1] = DevicePlacement("cpu", 1, (10_000,))  # no such core
        os.kill(llm.supervisor.pids[1], signal.SIGKILL)
        assert llm.generate(prompt, config).token_ids == right
        assert llm.supervisor.faults[-1].ranks == 1
