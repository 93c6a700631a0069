"""The command line as ranks: its own, torchrun's, and torchrun's on two machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lopa.cli.main import main
from lopa.distributed import launch

SHORT = ("--model", "dummy:dream-tiny", "--device", "cpu", "--max-new-tokens", "24")
GENERATE = ("generate", "*", *SHORT, "--block-size", "8", "--branches", "3", "--json")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def start(*command: str, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def lopa(*arguments: str, text: str | None = None, launcher: tuple[str, ...] = ()) -> str:
    command = (*launcher, "-m", "lopa") if launcher else (sys.executable, "-m", "lopa")
    process = start(*command, *arguments, stdin=subprocess.PIPE)
    out, err = process.communicate(text, timeout=120)
    assert process.returncode == 0, err
    return out


def answer(out: str) -> list[int]:
    tokens: list[int] = json.loads(out)["token_ids"]
    return tokens


def test_own_ranks_answer_as_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(GENERATE) == 0
    alone = answer(capfd.readouterr().out)
    assert main((*GENERATE, "--branch-parallel", "2")) == 0
    assert answer(capfd.readouterr().out) == alone
    assert main((*GENERATE, "--tensor-parallel", "3")) == 2
    assert "error: tensor-parallel 3 cannot cut this model" in capfd.readouterr().err


@pytest.mark.parallel
def test_torchrun() -> None:
    alone = answer(lopa(*GENERATE))
    two = (*TORCHRUN, "--nproc-per-node", "2")
    # Rank 0 alone reads standard input, and everybody hears of it.
    asked = [word if word != "*" else "-" for word in GENERATE]
    assert answer(lopa(*asked, "--tensor-parallel", "2", text="*\n", launcher=two)) == alone


# Rank 0 is the last to find the mistake.
UNEVEN = """
import os, sys, time
from lopa.cli.main import main
if os.environ["RANK"] == "0":
    time.sleep(2)
sys.exit(main())
"""


@pytest.mark.parallel
def test_torchrun_shows_a_mistake_of_all_ranks_once(tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN, encoding="utf-8")
    two = (*TORCHRUN, "--nproc-per-node", "2", str(script))
    wrong = start(*two, *GENERATE, "--branch-parallel", "3")
    out, err = wrong.communicate(timeout=120)
    assert wrong.returncode != 0
    assert not out
    assert err.count("error: branch-parallel 3 × tensor-parallel 1 does not make 2 ranks") == 1


def test_a_mistake_of_one_rank_is_shown_by_that_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # `main` has another on other ranks than 0
    monkeypatch.setattr(launch, "_SECONDS_TO_FAIL", 0.0)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert main(("race",)) == 2
    sys.stdout.close()
    assert capsys.readouterr().err.startswith("rank 1: error: this command runs in one process")


@pytest.mark.parallel
def test_bench_with_own_ranks() -> None:
    short = ("--max-new-tokens", "32", "--block-size", "8", "--branches", "3", "--json")
    found = json.loads(
        lopa("bench", "parallel", *SHORT[:4], *short, "--branch-parallel", "2", "--rounds", "6")
    )
    assert (found["branch_parallel"], len(found["ranks"]), found["rounds"]) == (2, 2, 6)
    assert 0 < found["statistics_bytes"] < 64 * 1024
    for rank in found["ranks"]:
        parts = [rank[f"{p}_ms"] for p in ("forward", "idle", "gather", "commit", "host")]
        assert sum(parts) == pytest.approx(rank["round_ms"])
        assert min(parts) >= 0


def namespaces() -> bool:
    """Whether this machine lets us make two that see each other as machines would."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["ip", "netns", "list"], capture_output=True).returncode == 0


@pytest.mark.parallel
def test_two_machines(tmp_path: Path) -> None:
    """Two nodes of one rank: network namespaces with their own addresses, or loopback."""
    alone = answer(lopa(*GENERATE))
    names = [f"lopa{os.getpid()}{side}" for side in "ab"]
    separate = namespaces() and make_namespaces(names)
    try:
        where = [("ip", "netns", "exec", name) if separate else () for name in names]
        host = "10.231.7.1" if separate else "127.0.0.1"
        before = received(names[0]) if separate else 0
        nodes = [
            start(
                *where[node],
                *(() if not separate else ("env", f"GLOO_SOCKET_IFNAME=veth{'ab'[node]}")),
                *TORCHRUN,
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={node}",
                f"--master-addr={host}",
                f"--master-port={port(separate)}" if node == 0 else f"--master-port={_PORT[0]}",
                "-m",
                "lopa",
                *GENERATE,
            )
            for node in range(2)
        ]
        (out, err), (other, _) = (node.communicate(timeout=150) for node in nodes)
        assert answer(out or "{}") == alone, err
        assert not other  # rank 1 is silent
        if separate:
            print(f"{received(names[0]) - before} bytes went over the link, start-up included")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


_PORT = [0]


def port(separate: bool) -> int:
    """A free one, for both nodes; in a namespace of its own every port is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        _PORT[0] = 29500 if separate else found.getsockname()[1]
    return _PORT[0]


def make_namespaces(names: list[str]) -> bool:
    first, second = names
    commands = [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip -n {first} link add vetha type veth peer name vethb netns {second}",
        f"ip -n {first} addr add 10.231.7.1/24 dev vetha",
        f"ip -n {second} addr add 10.231.7.2/24 dev vethb",
        f"ip -n {first} link set vetha up",
        f"ip -n {second} link set vethb up",
        f"ip -n {first} link set lo up",
        f"ip -n {second} link set lo up",
    ]
    return all(
        subprocess.run(c.split(), capture_output=True, check=False).returncode == 0
        for c in commands
    )


def received(name: str) -> int:
    shown = subprocess.run(
        ["ip", "-n", name, "-s", "-j", "link", "show", "vetha"], capture_output=True, check=True
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"])
