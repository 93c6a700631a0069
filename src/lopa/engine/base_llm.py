"""`BaseLLM`: what models in one process, on a rank and over ranks have in common.

That is prompts, settings and sessions. How weights are loaded and what drives the sessions is each
one's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

import torch

from lopa.config import DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.policy import LookaheadPolicy
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost
from lopa.engine import kept_cost, loader, prompts
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.engine_lock import EngineLock
from lopa.engine.loader import LoadOptions
from lopa.engine.output import Event, Output
from lopa.engine.prompts import Batch, GapTokens, Infill, Messages, Prompt, Text, is_batch
from lopa.engine.session import Session
from lopa.errors import ConfigError, PromptError
from lopa.grammar.compile import Compiler
from lopa.grammar.token_automaton import TokenAutomaton
from lopa.kernels.quantize import check_quantize
from lopa.models import checkpoint
from lopa.models.families import family_named, settings_for
from lopa.models.tokenizer import Tokenizer
from lopa.runner.device import choose_dtype
from lopa.types import Automaton, Gap

Configs = DecodeConfig | Sequence[DecodeConfig] | None  # for all prompts, or one each


class BaseLLM(ABC):
    """Prompts, settings and sessions of a model; it holds no weights itself."""

    def __init__(self, model: str | Path, options: LoadOptions, device: torch.device) -> None:
        self.name = str(model)
        self.device = device
        self.config = checkpoint.model_config(model)
        self.dtype = choose_dtype(options.dtype, self.config.dtype)
        kind = options.quantize
        self.quantize = None if kind is None else check_quantize(kind, device)
        self._options = options
        self._round_cost = options.given_cost()
        self.cost_seconds = 0.0  # that measuring it took, if it was measured here
        self._lock = EngineLock()

    def _finish_loading(self, options: LoadOptions) -> None:
        """Once `config` is final: special ids, and the tokenizer's ends of a turn."""
        self.config = loader.with_special_ids(self.config, options)
        use_turn_ends = options.eos_token_id is None
        self._turn_ends = loader.turn_ends(self.config, self.tokenizer) if use_turn_ends else ()
        self._compiler = Compiler(
            self.tokenizer, vocab_size=self.config.vocab_size, forbidden={self.config.mask_id}
        )

    tokenizer: Tokenizer | None  # set by each kind when it loads

    @abstractmethod
    def engine(self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET) -> Engine:
        """What runs many of this model's sessions at once."""

    # -- what a round costs -------------------------------------------------------------------

    @property
    def measures_cost(self) -> bool:
        """Whether there is a cost to measure: the model can be decoded with branches."""
        return "lopa" in family_named(self.config.family).decoders

    @property
    def knows_round_cost(self) -> bool:
        """Whether it is there without measuring: given, measured before, or kept on disk."""
        if self._round_cost is None:
            with self._lock.held():
                self._round_cost = self._round_cost or self._kept_cost()
        return self._round_cost is not None

    @property
    def round_cost(self) -> RoundCost:
        """What a round costs here, for branches "auto".

        Measured where it is not known: no other session may be running then.
        """
        if self._round_cost is None:
            with self._lock.held():  # one thread measures, the others wait for it
                if not self.knows_round_cost:
                    return self.measure_round_cost()
        assert self._round_cost is not None
        return self._round_cost

    def measure_round_cost(self) -> RoundCost:
        """Measure it anew, and keep it on disk."""
        with self._lock.held():
            began = time.perf_counter()
            self._round_cost = cost = self._measure_cost()
            self.cost_seconds = time.perf_counter() - began
            self._keep_cost(cost)
        return cost

    @abstractmethod
    def _measure_cost(self) -> RoundCost: ...

    def _kept_cost(self) -> RoundCost | None:
        return kept_cost.load(self._measured_with())

    def _keep_cost(self, cost: RoundCost) -> None:
        if cost is not EVERY_ROUND_THE_SAME:  # which stands for none
            kept_cost.save(cost, self._measured_with())

    def _measured_with(self) -> dict[str, str]:
        return kept_cost.measured_with(
            self.name, self._options, self.device, self.dtype, self.quantize
        )

    def close(self) -> None:  # noqa: B027 (a model in one process has nothing to end)
        """End what this model runs outside this process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = self.quantize or str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.name!r}, {kind}, {self.device})"

    # -- decoding -----------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: Prompt, config: Configs = None, *, progress: bool = False, **settings: Any
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Batch, config: Configs = None, *, progress: bool = False, **settings: Any
    ) -> list[Output]: ...
    def generate(
        self, prompts: Any, config: Configs = None, *, progress: bool = False, **settings: Any
    ) -> Output | list[Output]:
        """Generate the completions of the prompts, which are decoded together.

        Args:
            prompts: One prompt or a list of prompts. A prompt is text, chat messages or token ids.
            config: The decoding settings: one for all prompts, or a list with one each. None takes
                those that suit the model.
            progress: Whether to show a progress bar on standard error.
            settings: Fields of `DecodeConfig` on top of it: `branches=3, max_new_tokens=100`, or
                `schema={"type": "object", …}` for answers that fit.

        Returns:
            One `Output`, or a list of them in the order of the prompts. In fp32 they equal those of
            one prompt at a time.
        """
        many = is_batch(prompts)
        batch = prompts if many else [prompts]
        for prompt, one in zip(batch, self._configs(config, len(batch), settings), strict=True):
            self.check_chat(prompt, one)
        with self._lock.held():
            completed: Iterable[tuple[int, Output]] = self._as_completed(batch, config, settings)
            if progress:
                from rich.console import Console
                from rich.progress import track

                console = Console(stderr=True)
                completed = track(completed, "decoding", total=len(batch), console=console)
            outputs = [output for _, output in sorted(completed, key=lambda pair: pair[0])]
        return outputs if many else outputs[0]

    def generate_as_completed(
        self,
        prompts: Sequence[Prompt],
        config: Configs = None,
        *,
        max_running: int = MAX_RUNNING,
        token_budget: int = TOKEN_BUDGET,
        **settings: Any,
    ) -> Iterator[tuple[int, Output]]:
        """(index, output) of a list of prompts, `max_running` at once, as they are completed."""
        if not is_batch(prompts):
            raise PromptError("give a list of prompts: for one prompt use generate or stream")
        self._lock.check_process()
        limits = {"max_running": max_running, "token_budget": token_budget}
        return self._as_completed(prompts, config, settings, **limits)

    def _as_completed(
        self,
        prompts: Sequence[Prompt],
        config: Configs,
        settings: dict[str, Any],
        **limits: int,  # of the engine
    ) -> Iterator[tuple[int, Output]]:
        configs = self._configs(config, len(prompts), settings)
        engine = self.engine(**limits)
        # A bad one is found at once.
        encoded = [self._encode(*each) for each in zip(prompts, configs, strict=True)]
        indices: dict[Session, int] = {}

        def sessions() -> Iterator[Session]:
            for index, ((ids, gaps), config) in enumerate(zip(encoded, configs, strict=True)):
                session = self.session_from_ids(ids, config, gaps=gaps)
                indices[session] = index
                yield session

        for session in engine.run(sessions()):
            assert session.output is not None
            yield indices.pop(session), session.output

    @overload
    def chat(
        self, messages: Messages, config: Configs = None, *, progress: bool = False, **settings: Any
    ) -> Output: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        config: Configs = None,
        *,
        progress: bool = False,
        **settings: Any,
    ) -> list[Output]: ...
    def chat(
        self, messages: Any, config: Configs = None, *, progress: bool = False, **settings: Any
    ) -> Output | list[Output]:
        """Generate the reply to a chat conversation, by the model's chat template.

        Args:
            messages: A conversation, [{"role": "user", "content": "…"}], or a list of them.
            config: The decoding settings, as for `generate`.
            progress: Whether to show a progress bar.
            settings: Fields of `DecodeConfig`, as for `generate`.
        """
        if any(isinstance(m, str) for m in (messages, *messages)):
            raise PromptError('chat takes messages: [{"role": "user", "content": "…"}]')
        given: Any = {"config": config, "progress": progress, **settings}
        return self.generate(messages, **given)  # type: ignore[no-any-return]

    def infill(
        self,
        prefix: Text,
        suffix: str | Sequence[int],
        config: DecodeConfig | None = None,
        *,
        gap_tokens: GapTokens = None,
        **settings: Any,
    ) -> Output:
        """Fill the gap between a prefix and a suffix: the output's text is the gap's.

        Args:
            prefix: The text, chat messages or token ids before the gap.
            suffix: The text or token ids behind it.
            config: The decoding settings, as for `generate`.
            gap_tokens: How many tokens the gap has, or several numbers to choose from. None tries
                lengths up to max_new_tokens and fills the likeliest.
            settings: Fields of `DecodeConfig`, as for `generate`.
        """
        if isinstance(gap_tokens, int):
            settings.setdefault("max_new_tokens", gap_tokens)
        return self.generate(Infill(prefix, ((gap_tokens, suffix),)), config, **settings)

    def fill(
        self, pieces: Sequence[Any], config: DecodeConfig | None = None, **settings: Any
    ) -> Output:
        """Fill several gaps at once. pieces: text, a gap as its number of tokens, text, and so on.

        The output's text is all between the first piece and the last; `gaps` has each gap's own.
        """
        infill = Infill.of(pieces)
        if all(isinstance(tokens, int) for tokens, _ in infill.gaps):
            total = sum(tokens for tokens, _ in infill.gaps if isinstance(tokens, int))
            settings.setdefault("max_new_tokens", max(1, total))
        return self.generate(infill, config, **settings)

    def stream(
        self, prompt: Prompt, config: DecodeConfig | None = None, **settings: Any
    ) -> Iterator[Event]:
        """Generate the completion of one prompt: an event per round, as it happens.

        Args:
            prompt: Text, chat messages or token ids.
            config: The decoding settings, as for `generate`.
            settings: Fields of `DecodeConfig`, as for `generate`.

        Returns:
            An iterator of `Event`; its `text` is what became final in that round, and the last one
            has the `Output`.
        """
        self._lock.check_process()
        (config,) = self._configs(config, 1, settings)
        self.check_chat(prompt, config)
        return self.engine(max_running=1).stream(self.session(prompt, config))

    def decode_config(self, preset: str | None = None, **given: Any) -> DecodeConfig:
        """Settings for this model: what is given, else what suits its family."""
        return settings_for(self.config, preset, given)

    def session(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        cost: RoundCost | None = None,
        policy: LookaheadPolicy | None = None,
    ) -> Session:
        """A request to be run by an engine.

        cost: of rounds for branches "auto", in place of what they cost here.
        policy: of lookahead, in place of the configured one.
        """
        config = config or self.decode_config()
        ids, gaps = self._encode(prompt, config)
        return self.session_from_ids(ids, config, gaps=gaps, cost=cost, policy=policy)

    def _encode(self, prompt: Prompt, config: DecodeConfig) -> tuple[list[int], list[Gap]]:
        if not isinstance(prompt, Infill):
            return self.encode(prompt), []
        gaps = self.encode_gaps(prompt.gaps, config.max_new_tokens)
        return self.encode(prompt.prefix, whole=False), gaps

    def encode_gaps(
        self, gaps: Sequence[tuple[GapTokens, str | Sequence[int]]], most: int
    ) -> list[Gap]:
        """Of an `Infill`. most: tokens of a gap whose length is not given."""
        return prompts.encode_gaps(gaps, self.tokenizer, self.config, most)

    def session_from_ids(
        self,
        ids: Sequence[int],  # as `encode` gives them
        config: DecodeConfig,
        *,
        gaps: Sequence[Gap] = (),  # as `prompts.encode_gaps` gives them
        cost: RoundCost | None = None,
        policy: LookaheadPolicy | None = None,
        automaton: Automaton | None = None,  # in place of the configured one
    ) -> Session:
        family = family_named(self.config.family)
        if gaps:
            family.check_gaps(self.config, config)
            if config.stop and len(gaps) > 1:
                raise ConfigError("stop strings go with one gap: leave stop out")
            if config.schema is not None or config.regex is not None:
                raise ConfigError(
                    "a schema or regex is for answers, and a gap is none: leave it out"
                )
        family.check(self.config, config)
        if gaps:
            given = len(ids) + sum(len(gap.after) for gap in gaps)
            new = sum(max(gap.lengths) for gap in gaps)
            self._check_length(given, new, given + new)
        else:
            new = config.max_new_tokens
            self._check_length(len(ids), new, len(ids) + new)
        measured = config.branches == "auto" and config.objective == "speed"
        decoder = Decoder(
            config,
            ids,
            mask_id=self.config.mask_id,
            eos_ids=self._eos_ids(config),
            shift=self.config.shift,
            aligned=self.config.trained_block is not None,
            cost=(cost or self.round_cost) if measured else EVERY_ROUND_THE_SAME,
            policy=policy,
            automaton=automaton or self.automaton(config),
            gaps=gaps,
        )
        if not gaps:
            self._check_length(len(ids), new, len(decoder.tokens))  # in whole blocks
        return Session(decoder, self.tokenizer)

    def automaton(self, config: DecodeConfig) -> TokenAutomaton | None:
        """What answers have to fit: the schema or regex, compiled for this model's tokens.

        It takes seconds at most and is kept, also on disk. None: they may be any text.
        """
        return self._compiler.compile_for(config, self._eos_ids(config))

    def _eos_ids(self, config: DecodeConfig) -> tuple[int, ...]:
        return self.config.eos_ids + (self._turn_ends if config.early_stop else ())

    def _check_length(self, prompt: int, new: int, tokens: int) -> None:
        if tokens > self.config.max_positions:
            blocks = "" if tokens == prompt + new else ", in whole blocks"
            raise PromptError(
                f"the prompt has {prompt} tokens and {new} are to be added"
                f"{blocks}, but this model's context holds {self.config.max_positions}: shorten "
                "the prompt or ask for fewer new tokens"
            )

    def encode(self, prompt: Text, at_most: int | None = None, *, whole: bool = True) -> list[int]:
        """The token ids of a prompt: text, chat messages, or ids as they are.

        PromptError for more than `at_most` of them.
        whole: it is asked as it is; False: other text follows, such as a gap or a continuation.
        """
        return prompts.encode(prompt, self.tokenizer, self.config, at_most, whole=whole)

    def check_chat(self, prompt: Prompt, config: DecodeConfig) -> None:
        """PromptError, which says what it can do, for a chat the built-in model cannot read."""
        prompts.check_chat(prompt, self.tokenizer, config)

    def _configs(
        self, config: Configs, count: int, settings: dict[str, Any]
    ) -> Sequence[DecodeConfig]:
        """One for each prompt, with the settings on top."""
        each: Any = config if isinstance(config, list | tuple) else [config] * count
        for one in each:
            if one is not None and not isinstance(one, DecodeConfig):
                raise ConfigError(
                    f"config must be a DecodeConfig: got {type(one).__name__}; settings can be "
                    "given as keyword arguments, such as branches=3"
                )
        if len(each) != count:
            raise ConfigError(f"{len(each)} configs for {count} prompts: give one, or one each")
        return [
            self.decode_config(**settings) if one is None else one.changed(**settings)
            for one in each
        ]
