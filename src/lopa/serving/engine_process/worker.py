"""The engine process: loads the model, runs rounds, and reports what becomes of each job.

One thread reads orders from the API. Those of the `EncodingQueue` encode and check jobs, so that a
bad request is refused while a long round is running. The main thread owns the engine; it answers a
ping between two rounds, so that the answer shows that rounds go on. The process ends when the API's
end of the socket is closed, and is killed when the API's process ends, even while it is stopped.

An error of the model in a round (LopaError) fails the jobs that ran in it. Anything else ends the
process: the API starts another, with clean state, and submits its jobs again.

With several ranks no round happens in this process. A rank that is lost costs a pause; when the
ranks' supervisor gives up (RankError), this process ends like above.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lopa.config import (
    RANK_TIMEOUT,
    DecodeConfig,
    options_of,
    with_changes,
    with_waiting_branches,
)
from lopa.distributed.channel import die_with
from lopa.errors import ConfigError, LopaError, PromptError, RankError
from lopa.models.families import family_named
from lopa.serving.config import EngineConfig
from lopa.serving.engine_process.encoding_queue import EncodingQueue
from lopa.serving.engine_process.running_job import RunningJob
from lopa.serving.ipc import Channel
from lopa.serving.jobs import PATTERNS, Accepted, Event, Failed, Job, pack

if TYPE_CHECKING:
    from lopa.engine.base_llm import BaseLLM

_SUFFIX = "the suffix"
_ANY_TEXT = DecodeConfig()
_MOST_CONFIGS, _MOST_KEY = 256, 4096  # that are kept; characters that one is kept by
_NOTE_SECONDS = 1.0  # of compiling kernels, until the log says so
_BEAT_SECONDS = 1.0  # between signs of life while the model is loaded


class Worker:
    """Drives an engine by orders from a channel, until the channel is closed."""

    def __init__(self, llm: BaseLLM, config: EngineConfig, channel: Channel) -> None:
        given = {"max_running": config.max_running, "token_budget": config.token_budget}
        self.llm = llm
        self.config = config
        self.engine = llm.engine(**{k: v for k, v in given.items() if v is not None})
        context = llm.config.max_positions
        self.most_tokens = min(context, config.max_request_tokens or context)
        self._channel = channel
        self._tasks: dict[str, RunningJob] = {}  # added to the engine and not finished
        self._encoding: set[str] = set()  # jobs that are not encoded yet, nor aborted
        self._orders: list[tuple[str, Any]] = []
        self._changed = threading.Condition()
        self._opening = threading.Lock()  # jobs are encoded side by side, the rest is done in turn
        self._closed = False
        # Wrong defaults are found at once.
        usual = llm.decode_config(config.preset, **config.decoding)
        decoding = with_waiting_branches(config.decoding, usual.decoder, config.preset)
        self._usual = llm.decode_config(config.preset, **decoding)
        self._configs: dict[str, DecodeConfig] = {}  # by what was given

    def warm_up(self) -> None:
        """Run a round, so that the first request does not pay for lazy initialisation."""
        self._decode_one_token()
        if self.llm.measures_cost:
            _ = self.llm.round_cost  # later on other sessions would be running beside the measure

    def _decode_one_token(self) -> None:
        token = next(i for i in range(2) if i != self.llm.config.mask_id)
        job = Job(id="warm-up", prompt=[token], max_tokens=1)
        for _ in self.engine.stream(self.open(job)[0].session):
            pass

    def describe(self) -> dict[str, Any]:
        tokenizer = self.llm.tokenizer
        most = tokenizer.max_characters_per_token if tokenizer else None
        return {
            "max_running": self.engine.max_running,
            "max_request_tokens": self.most_tokens,
            "max_prompt_characters": most and most * self.most_tokens,
            "settings": self._usual.settings(),
            "device": str(self.llm.device),
            "decoders": list(family_named(self.llm.config.family).decoders),
            "chat": bool(self.llm.tokenizer and self.llm.tokenizer.chat_template),
            "ranks": self.engine.ranks_alive,
            "round_cost": self.llm.round_cost.settings() if self.llm.measures_cost else None,
            "pid": os.getpid(),
        }

    def run(self) -> None:
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        while True:
            with self._changed:
                while not (self._orders or self._closed or self.engine.busy):
                    if not self._changed.wait(self.engine.idle_check_seconds):
                        break
                orders, self._orders = self._orders, []
            if self._closed:
                return
            round_wanted = False
            for verb, what in orders:
                if verb == "submit":
                    self.engine.add(what.session)
                    self._tasks[what.job.id] = what
                elif verb == "abort":
                    task = self._tasks.pop(what, None)
                    if task is not None:
                        self.engine.abort(task.session)
                elif verb == "round":
                    round_wanted = True
            if not self.engine.busy:
                self.engine.check_ranks()
            reply = self._round() if round_wanted else {"events": self._step()}
            self._send(**reply, engine=self.gauges(), beat=True)

    def _round(self) -> dict[str, Any]:
        """Run a round of the jobs, or of one of its own, and say whether it went well."""
        if self.engine.busy:
            events = self._step()
            errors = [event.message for _, event in events if isinstance(event, Failed)]
            return {"events": events, "round": errors[0] if errors else ""}
        try:
            self._decode_one_token()
        except RankError:
            raise
        except LopaError as error:
            return {"round": str(error)}
        return {"round": ""}

    def _step(self) -> list[tuple[str, Event]]:
        by_session = {task.session: task for task in self._tasks.values()}
        events: list[tuple[str, Event]] = []
        try:
            steps = self.engine.step()
        except RankError:
            raise
        except LopaError as error:
            # Sessions on ranks are known to run by their first round.
            for session in list(self.engine.running) or list(self.engine.waiting):
                task = by_session[session]
                self.engine.abort(session)
                del self._tasks[task.job.id]
                events.append((task.job.id, Failed(kind="engine", message=str(error))))
            return events
        for session, step in steps:
            task = by_session[session]
            events += [(task.job.id, event) for event in task.report(step)]
            if step.output is not None:
                del self._tasks[task.job.id]
        return events

    def open(self, job: Job) -> tuple[RunningJob, Accepted]:
        """Encode and check a job; LopaError says what is wrong with it."""
        since = time.perf_counter()
        whole = job.suffix is None
        ids = self.llm.encode(job.prompt, at_most=self.most_tokens, whole=whole)
        behind: list[int] = []
        if job.suffix is not None:
            behind = self._encode_suffix(job.suffix)
        given = self._with_defaults(job.options)
        shape = {name: given[name] for name in PATTERNS if given.get(name) is not None}
        if whole:
            self.llm.check_chat(job.prompt, DecodeConfig(**shape) if shape else _ANY_TEXT)
        if shape:  # kept, so that it is there when the session is made
            self.llm.automaton(DecodeConfig(**shape))
        with self._opening:
            return self._open(job, ids, behind, since)

    def _tokenize(self, job: Job) -> Accepted:
        ids = self.llm.encode(job.prompt, at_most=self.most_tokens)
        return Accepted(prompt_tokens=len(ids), max_tokens=self.most_tokens, token_ids=ids)

    def _encode_suffix(self, suffix: str | list[int]) -> list[int]:
        try:
            return self.llm.encode(suffix, at_most=self.most_tokens, whole=False)
        except PromptError as error:
            raise PromptError(str(error).replace("the prompt", _SUFFIX)) from None

    def _open(
        self, job: Job, ids: list[int], behind: list[int], since: float
    ) -> tuple[RunningJob, Accepted]:
        """behind: the text behind a gap, if there is one."""
        llm, given = self.llm, self._with_defaults(job.options)
        names = [name for name in ("decoder", "window") if name in given]
        usual = self._decode_config({name: given[name] for name in names})
        block = 1 if usual.window == "canvas" else given.get("block_size", usual.block_size)
        left = self.most_tokens - len(ids) - len(behind)
        wanted = job.max_tokens or given.get("max_new_tokens", usual.max_new_tokens)
        if job.gap_tokens is not None:
            wanted = max(job.gap_tokens) if isinstance(job.gap_tokens, list) else job.gap_tokens
        elif behind:
            wanted = min(wanted, left)
        elif job.max_tokens is None and isinstance(block, int) and block > 0:
            wanted = min(wanted, left // block * block or left)
        if left < 1 or wanted > left:
            raise PromptError(
                f"the prompt has {len(ids) + len(behind)} tokens, and with max_tokens "
                f"{max(wanted, 1)} that is "
                f"more than the {self.most_tokens} that a request may hold here: shorten the "
                "prompt or ask for fewer tokens"
            )
        given["max_new_tokens"] = wanted
        if job.seed_offset:
            given["seed"] = given.get("seed", self._usual.seed) + job.seed_offset
        config = self._decode_config(given)
        # More rounds than tokens fill nothing in most of them, and may be any number.
        most = config.block_size if config.window == "pipeline" else config.max_new_tokens
        if config.steps is not None and config.steps > most:
            raise ConfigError(f"steps must be at most {most} here: one token per round")
        gaps = llm.encode_gaps([(job.gap_tokens, behind)], wanted) if behind else ()
        session = llm.session_from_ids(ids, config, gaps=gaps)
        if session.decoder.auto is not None:
            session.decoder.auto.known = tuple(job.known_branches)
        self.engine.check(session)
        task = RunningJob(job, session, since)
        return task, task.accepted(wanted)

    def _decode_config(self, given: dict[str, Any]) -> DecodeConfig:
        """What this makes of a request, kept: most of them give the same."""
        key = repr(sorted(given.items()))  # not the values: True is 1, and no number of branches
        found = self._configs.get(key)
        if found is None:
            found = self.llm.decode_config(self.config.preset, **given)
            if len(key) <= _MOST_KEY:
                if len(self._configs) >= _MOST_CONFIGS:
                    self._configs.clear()
                self._configs[key] = found
        return found

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        """The server's defaults under what a request gives, less what that makes meaningless.

        An option that is given as it is anyway changes nothing.
        """
        defaults, usual = self.config.decoding, self._usual.settings()
        changes = {name: value for name, value in options.items() if value != usual.get(name)}
        if "decoder" in changes or "window" in changes:
            own = options_of(changes.get("decoder", self._usual.decoder), changes.get("window"))
            common = set(DecodeConfig(decoder="vanilla").settings()) - options_of("vanilla")
            defaults = {k: v for k, v in defaults.items() if k in own or k in common}
        given = {**with_changes(defaults, changes), **options}
        return with_waiting_branches(given, self._usual.decoder, self.config.preset)

    def _listen(self) -> None:
        queue = EncodingQueue(self._encode)
        while (message := self._channel.receive()) is not None:
            verb, what = message
            with self._changed:
                if verb == "submit":
                    self._encoding.add(what["id"])
                    queue.put(Job(**what))
                elif verb == "abort" and what in self._encoding:
                    self._encoding.discard(what)
                else:
                    self._orders.append((verb, what))
                    self._changed.notify()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _encode(self, job: Job) -> None:
        """Encode a job and hand it to the engine's thread, unless it is aborted in the meantime."""
        if job.id not in self._encoding:
            return
        try:
            if job.tokenize:
                accepted = self._tokenize(job)
            else:
                task, accepted = self.open(job)
        except BaseException as error:  # no request may end this thread, nor the process
            self._encoding.discard(job.id)
            self._send([(job.id, _failure(error, job))])
            return
        self._send([(job.id, accepted)])
        with self._changed:
            if job.tokenize:
                self._encoding.discard(job.id)
            elif job.id in self._encoding:
                self._encoding.discard(job.id)
                self._orders.append(("submit", task))
                self._changed.notify()

    def _send(self, events: Sequence[tuple[str, Event]] = (), **more: Any) -> None:
        try:
            self._channel.send({"events": [[i, *pack(e)] for i, e in events], **more})
        except OSError:  # the API has gone; `_listen` finds the same
            self._closed = True

    def note(self, line: str) -> None:
        """Something for the log, and what it changes."""
        self._send([], log=line, engine=self.gauges())

    def gauges(self) -> dict[str, Any]:
        """The engine as it is now."""
        running = list(self.engine.running)
        return {
            "running": len(running),
            "waiting": len(self.engine.waiting),
            "ranks": self.engine.ranks_alive,
            "cache_tokens": sum(session.capacity for session in running),
            "pages": self.engine.kv_pages,
        }


def _failure(error: BaseException, job: Job) -> Failed:
    if isinstance(error, LopaError):
        param = _param(error, job)
        if not isinstance(error, ConfigError):
            param = "suffix" if _SUFFIX in str(error) else "prompt"
        return Failed(kind="invalid", message=str(error), param=param)
    if isinstance(error, Exception):
        return Failed(kind="engine", message=_named(error))
    # A panic of the tokenizer's library: it is Rust, and its panics are no Exceptions.
    message = f"the tokenizer cannot read the prompt ({_named(error)}): change it"
    return Failed(kind="invalid", message=message, param="prompt")


def _param(error: LopaError, job: Job) -> str | None:
    """The field of the request that an error is about, where it names one."""
    words = str(error).replace(",", " ").replace(":", " ").split()
    if job.suffix is not None and "suffix" in words:
        return "suffix"
    given = [name for name in words if name in job.options]
    if "max_new_tokens" in words and not given:
        return "max_tokens"
    if "pattern" in words:
        given += [name for name in PATTERNS if name in job.options]
    if not given:
        return None
    return "response_format" if given[0] == "schema" else given[0]


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main(descriptor: int) -> int:
    """Serve the socket that was inherited as `descriptor`."""
    die_with(os.getppid())
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the API decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    settings = channel.receive()
    if settings is None:
        return 0
    config = EngineConfig(**settings)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a prompt is encoded by its thread
    loaded = threading.Event()
    threading.Thread(target=_beat, args=(channel, loaded), name="beat", daemon=True).start()
    llm: BaseLLM | None = None
    worker: Worker | None = None

    def report(line: str) -> None:
        if worker is None:
            channel.send({"log": line})
        else:
            worker.note(line)

    try:
        llm = _load(config, report)
        worker = Worker(llm, config, channel)
        worker.warm_up()
        gc.collect()
        gc.freeze()  # the model and its libraries stay: looking at them takes 0.1 s each time
    except Exception as error:
        mended = isinstance(error, LopaError | OSError)
        message = str(error) if mended else _named(error)
        channel.send({"failed": message, "misuse": isinstance(error, ConfigError)})
        loaded.set()
        if llm is not None:
            llm.close()
        if not mended:
            raise
        return 1
    loaded.set()
    try:
        channel.send({"ready": worker.describe(), "engine": worker.gauges()})
        worker.run()
    except RankError as error:
        worker.note(str(error))
        return 1
    finally:
        llm.close()
    return 0


def _beat(channel: Channel, loaded: threading.Event) -> None:
    """Tell the API that the process is not stopped while it loads."""
    with contextlib.suppress(OSError):
        while not loaded.wait(_BEAT_SECONDS):
            channel.send({"beat": True})


class _CompileNotes:
    """Lines for the log, where a GPU's kernels take long to compile."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._since = time.monotonic()
        self._is_noted = False

    def show(self, done: int, total: int) -> None:
        if not done:
            self._since, self._is_noted = time.monotonic(), False
            return
        seconds = time.monotonic() - self._since
        if done == total and self._is_noted:
            self._report(f"{total} kernels compiled in {seconds:.1f} s")
        elif done < total and not self._is_noted and seconds > _NOTE_SECONDS:
            self._is_noted = True
            self._report(f"compiling {total} kernels for this GPU, once")


def _load(config: EngineConfig, report: Callable[[str], None]) -> BaseLLM:
    if config.ranks == 1:
        from lopa.engine.llm import LLM

        llm = LLM(config.model, compiling=_CompileNotes(report).show, **config.llm)
        # A request with a temperature or a schema would make all others wait for its kernels.
        llm.compile_kernels(_CompileNotes(report).show)
        return llm
    from lopa.distributed.fork_server import ForkServer

    # It imports torch while this process does.
    fork_server = ForkServer()
    try:
        from lopa.distributed.parallel_llm import ParallelLLM

        return ParallelLLM(
            config.model,
            branch_parallel=config.branch_parallel,
            tensor_parallel=config.tensor_parallel,
            rank_timeout=config.rank_timeout or RANK_TIMEOUT,
            report=report,
            fork_server=fork_server,
            **config.llm,
        )
    except BaseException:
        fork_server.close()
        raise


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of the device's libraries may not let go
