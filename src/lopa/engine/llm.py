"""`LLM`: a model, its tokenizer and a runner behind `generate`, `chat` and `stream`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from torch import Tensor

from lopa.config import AttentionName
from lopa.decoding.round_cost import RoundCost, RoundCostLike
from lopa.engine import cost_measurement, loader, prompts
from lopa.engine.base import MAX_RUNNING, TOKEN_BUDGET
from lopa.engine.base_llm import BaseLLM
from lopa.engine.loader import LoadOptions
from lopa.engine.scheduler import Scheduler
from lopa.errors import ConfigError, PromptError
from lopa.kernels import compilation, triton_start
from lopa.kernels.compilation import Compiled
from lopa.models import checkpoint
from lopa.runner.device import check_fits, choose_device
from lopa.runner.paged import Reuse
from lopa.runner.raw_logits import raw_logits


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
