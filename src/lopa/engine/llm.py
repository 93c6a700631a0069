"""`LLM`: a model, its tokenizer and a runner behind `generate`, `chat` and `stream`.

`BaseLLM` is what models in one process, on a rank and over ranks have in common: prompts, settings
and sessions. How weights are loaded and what drives the sessions is each one's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args, overload

import torch
from torch import Tensor

from lopa.config import AttentionName, DecodeConfig
from lopa.decoding.decoder import Decoder
from lopa.decoding.policy import LookaheadPolicy
from lopa.decoding.round_cost import EVERY_ROUND_THE_SAME, RoundCost, RoundCostLike
from lopa.engine import cost_measurement, kept_cost, loader, prompts
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET, Engine
from lopa.engine.engine_lock import EngineLock
from lopa.engine.loader import LoadOptions
from lopa.engine.output import Event, Output
from lopa.engine.prompts import Batch, GapTokens, Infill, Messages, Prompt, Text, is_batch
from lopa.engine.scheduler import Scheduler
from lopa.engine.session import Session
from lopa.errors import ConfigError, PromptError
from lopa.grammar.compile import Compiler
from lopa.grammar.token_automaton import TokenAutomaton
from lopa.kernels import compilation, triton_start
from lopa.kernels.compilation import Compiled
from lopa.kernels.quantize import check_quantize
from lopa.models import checkpoint
from lopa.models.families import family_named, settings_for
from lopa.models.tokenizer import Tokenizer
from lopa.runner.device import check_fits, choose_device, choose_dtype
from lopa.runner.paged import Reuse
from lopa.runner.raw_logits import raw_logits
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


class LLM(BaseLLM):
    """A diffusion language model for generating text from prompts.

    It has a tokenizer, the model with its KV cache, and an engine that decodes many prompts at
    once:

        llm = LLM("tiny")
        output = llm.generate("Leo has 18 books. …", branches=7, max_new_tokens=128)
        print(output.text, output.tpf)

    Several threads may use it: one call decodes at a time and the others wait. A `stream` waits
    only while a round of it is asked for, so other calls may come between its rounds. A forked
    child may not use it: load the model there.

    Args:
        model: The name or path of a Hugging Face model: a hub id, a folder, "tiny" for the built-in
            model, or dummy:NAME for random weights of a known shape.
        adapter: The name or path of a LoRA adapter (PEFT), merged on loading.
        device: The device to run on: "cpu", "cuda", "cuda:1", "mps", "npu". "auto" is the first
            accelerator. For several devices see `ParallelLLM`.
        dtype: The data type of the weights and activations: "float32", "bfloat16", "float16" or
            "float64". "auto" is the checkpoint's.
        quantize: The method to quantize the linear layers: "fp8" or "int8". None keeps `dtype`.
        backend: The attention backend: "triton" (fused kernels and CUDA graphs), "sdpa" or
            "reference". "auto" is the fastest that the device has. On Hopper in bf16, "triton"
            keeps the large weights a second time, losslessly compressed, where that takes at most a
            quarter of the memory beside weights and cache: rounds of up to 64 tokens are faster
            then, and rounded differently.
        cache_tokens: The capacity of the KV cache in tokens. None is what the device's memory
            allows.
        prefix_reuse: Whether the KV cache of prompts is shared between requests (prefix caching):
            "exact" where the same tokens come out (block attention), "approximate" also under full
            attention, "off".
        warmup: Capture CUDA graphs for rounds of up to so many tokens before the first request.
            With 0 each size is captured when it first comes. Only the triton backend uses it.
        eos_token_id: The token id, or ids, that end an answer, in place of the checkpoint's.
        mask_token_id: The token id of a mask, in place of the checkpoint's.
        round_cost: (tokens, seconds) points of a round's time, for branches "auto". None measures
            them on first use and keeps them on disk. The same points give the same answers again,
            on any device.
        progress: A function that is called with (tensors read, tensors in all) while weights are
            loaded.
        compiling: A function that is called with (kernels compiled, kernels in all) while a GPU's
            kernels are compiled.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        eos_token_id: int | Sequence[int] | None = None,
        mask_token_id: int | None = None,
        quantize: str | None = None,
        backend: str = "auto",
        cache_tokens: int | None = None,
        prefix_reuse: Reuse = "exact",
        warmup: int = 0,
        round_cost: RoundCostLike | None = None,
        progress: checkpoint.Progress | None = None,
        compiling: compilation.Progress | None = None,
    ) -> None:
        options = LoadOptions(
            adapter=adapter,
            dtype=dtype,
            eos_token_id=eos_token_id,
            mask_token_id=mask_token_id,
            quantize=quantize,
            backend=backend,
            cache_tokens=cache_tokens,
            prefix_reuse=prefix_reuse,
            warmup=warmup,
            round_cost=round_cost,
        )
        super().__init__(model, options, choose_device(device))
        check_fits(self.config, self.device, self.dtype, self.quantize)
        if self.device.type == "cuda":
            triton_start.begin()
        self.tokenizer = loader.load_tokenizer(self.name, self.config)
        self.model = loader.load_weights(
            self.name,
            self.config,
            options,
            self.device,
            self.dtype,
            progress,
            quantize=self.quantize,
        )
        self.config = self.model.config
        self._finish_loading(options)
        self.model.config = self.config
        self.runner = loader.make_runner(
            self.model, options, backend=options.backend, compiling=compiling
        )

    def engine(
        self, *, max_running: int = MAX_RUNNING, token_budget: int = TOKEN_BUDGET
    ) -> Scheduler:
        self._lock.check_process()
        return Scheduler(
            self.runner,
            max_running=max_running,
            token_budget=token_budget,
            cost=self._round_cost,
            lock=self._lock,
        )

    def compile_kernels(self, progress: compilation.Progress | None = None) -> list[Compiled]:
        """Compile all kernels that this model may use, beyond those that loading it compiles.

        On a GPU: for the largest rounds, for sampling, and for answers that have to fit a schema
        or regex of the usual size. They are kept on disk. progress: as `compiling` of `LLM`.
        """
        compile_all = partial(
            self.runner.backend.compile_kernels,
            progress,
            # Rounds of more tokens have kernels of their own only where there are experts.
            tokens=TOKEN_BUDGET if self.config.mixture is not None else 0,
            sampling=True,
            fitting=True,
        )
        return [*self.runner.compiled, *self._lock.run(compile_all)]

    def capture_graphs(self, tokens: int, progress: compilation.Progress | None = None) -> int:
        """Those of rounds of up to so many tokens, as `warmup` does; how many they are."""
        if not 0 <= tokens <= TOKEN_BUDGET:
            raise ConfigError(f"graphs are of 0 to {TOKEN_BUDGET} tokens: got {tokens}")
        return self._lock.run(partial(self.runner.backend.warm_up, tokens, progress))

    def _measure_cost(self) -> RoundCost:
        given = self.runner, self.config, self.decode_config, self.tokenizer
        return self._lock.run(partial(cost_measurement.measure, *given))

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        attention: AttentionName = "full",
        prompt_len: int | None = None,
        block_size: int | None = None,
    ) -> Tensor:
        """Raw logits [tokens, vocab] of one sequence, no cache, not shifted, in fp32.

        Under `block` attention the first `prompt_len` tokens are block 0; models that count blocks
        from position 0 need no `prompt_len`.
        """
        if attention not in get_args(AttentionName):
            raise ConfigError(f"attention must be full or block: got {attention!r}")
        if block_size is not None and block_size < 1:
            raise ConfigError(f"block_size must be at least 1: got {block_size}")
        ids = prompts.token_ids(token_ids, self.config.vocab_size)
        if not 0 < len(ids) <= self.config.max_positions:
            raise PromptError(f"give 1 to {self.config.max_positions} tokens: got {len(ids)}")
        aligned = self.config.trained_block is not None
        if attention == "block" and (block_size is None or (prompt_len is None and not aligned)):
            raise ConfigError("block attention needs block_size, and prompt_len for this model")
        shape = attention, prompt_len or 0, block_size or 1
        return self._lock.run(partial(raw_logits, self.model, ids, *shape))
