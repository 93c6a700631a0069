"""A zygote from the side that starts it, and the one of each kind that is kept."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lopa
from lopa.errors import LopaError
from lopa.evaluation.sandbox.walls import LANDLOCK, NAMESPACES

_START = "import sys; sys.path.insert(0, {!r}); from {} import main; main()"
_MAIN = "lopa.evaluation.sandbox.zygote"
_START_SECONDS = 300.0
_END_SECONDS = 5.0
_PASSED_ON = ("LD_LIBRARY_PATH",)  # without which Python may not start; emptied before answers
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Kit:
    """What there is beside the standard library."""

    modules: tuple[str, ...] = ()  # loaded
    paths: tuple[str, ...] = ()  # where they are found
    folders: tuple[str, ...] = ()  # seen


class GoneError(Exception):
    """The zygote does not take requests any more."""


class Zygote:
    """Starts the process; MissingWallsError where the machine does not allow its walls."""

    def __init__(self, kit: Kit, walls: str) -> None:
        self.walls = walls
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            standard = _standard_library()
            said = [theirs.fileno(), walls, [*standard, *kit.folders], kit.modules, kit.paths]
            package = str(Path(lopa.__file__).parent.parent)
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-B", "-c", _START.format(package, _MAIN)),
                    json.dumps(said),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_ENVIRONMENT | {n: os.environ[n] for n in _PASSED_ON if n in os.environ},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = ours
        ready = select.select([ours], [], [], _START_SECONDS)[0]
        try:
            said_back = ours.recv(1 << 16) if ready else b""
        except OSError:
            said_back = b""
        if said_back != b"{}":
            self.close()
            why = json.loads(said_back)["missing"] if said_back else "a Python that starts in it"
            raise MissingWallsError(why)

    def spawn(
        self, role: str, seconds: float, megabytes: int, sockets: Sequence[socket.socket]
    ) -> None:
        """Fork a process of this role. `sockets` go to it, the first to its warden; closed here."""
        request = json.dumps({"role": role, "seconds": seconds, "megabytes": megabytes})
        try:
            socket.send_fds(self._channel, [request.encode()], [s.fileno() for s in sockets])
        except OSError as error:
            raise GoneError from error
        finally:
            for end in sockets:
                end.close()

    def close(self) -> None:
        """End it and all that it has forked."""
        self._channel.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class MissingWallsError(Exception):
    """What the machine does not allow."""


class Zygotes:
    """One of each kind, started when it is asked for."""

    def __init__(self) -> None:
        self.walls: tuple[str, ...] = (NAMESPACES, LANDLOCK)  # the first that are allowed here
        self._kept: dict[tuple[Kit, tuple[str, ...]], Zygote] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def of(self, kit: Kit) -> Zygote:
        with self._lock:
            if self._owner != os.getpid():  # forked: they are the parent's
                self._kept, self._owner = {}, os.getpid()
            if (kit, self.walls) not in self._kept:
                self._kept[kit, self.walls] = self._start(kit)
            return self._kept[kit, self.walls]

    def drop(self, zygote: Zygote) -> None:
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if kept is not zygote}
        zygote.close()

    def close(self) -> None:
        if self._owner == os.getpid():
            for zygote in list(self._kept.values()):
                self.drop(zygote)

    def _start(self, kit: Kit) -> Zygote:
        missing = []
        for walls in self.walls:
            try:
                return Zygote(kit, walls)
            except MissingWallsError as error:
                missing.append(str(error))
        raise LopaError(
            f"generated code is not run, because there is no isolation here: {'; '.join(missing)}. "
            "Allow user namespaces or Landlock, or run it without with --unsafe-code"
        )


def _standard_library() -> list[str]:
    """Its folders, as Python imports from them. One in another is seen with that one."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    shared = sysconfig.get_config_var("DESTSHARED")
    if shared and os.path.isdir(shared):
        found.add(shared)
    base = {path.replace(sys.prefix, sys.base_prefix, 1) for path in found}
    kept = sorted(path for path in base if os.path.isdir(path))
    return [p for p in kept if not any(p.startswith(other + "/") for other in kept)]


ZYGOTES = Zygotes()
atexit.register(ZYGOTES.close)
