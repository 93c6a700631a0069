"""Run by a test without Triton's interpreter: kernels noted as on a Hopper, without a device.

Prints a line of JSON for each model: the kernels that a trial run notes, those of rounds, of a
sampled one and of one that has to fit an automaton that it has not noted (none, if all is well),
and with --compile what is left to note once all are compiled.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lopa.config import DecodeConfig
from lopa.engine.loader import load_tokenizer
from lopa.grammar.compile import Compiler
from lopa.kernels import compilation, prefix_attention
from lopa.kernels.quantize import quantize_layer
from lopa.kernels.triton import attention, experts, matmul
from lopa.models import checkpoint
from lopa.models.part import WHOLE, Part
from lopa.models.transformer import Transformer
from lopa.runner import graph_inputs
from lopa.runner.backend_triton import TritonBackend
from lopa.runner.batch import make_batch
from lopa.runner.kv_cache import KVCache
from lopa.types import Constraint, Plan

HOPPER = 226 * 1024  # bytes of shared memory
CASES = (
    ("tiny", torch.float32, None, WHOLE),
    ("dummy:dream-7b", torch.bfloat16, None, WHOLE),
    ("dummy:dream-7b", torch.bfloat16, "int8", WHOLE),
    ("dummy:llada2-mini", torch.bfloat16, None, Part(1, 2)),
    ("dummy:llada2-mini", torch.bfloat16, None, WHOLE),
)


class Device:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def plan(rows: int, length: int, token: int = 5, start: int = 64, **more: Any) -> Plan:
    tokens = np.full((rows, length), token)
    ends = np.full(rows, start + length)
    return Plan(1, start, start, 0, tokens, ends, np.ones((rows, length), bool), None, **more)


def noted(
    name: str, dtype: torch.dtype, quantize: Any, part: Part
) -> tuple[compilation.Jobs, dict[str, Any]]:
    config = checkpoint.model_config(name)
    device = torch.device("meta")
    model = Transformer(part.config(config), device, dtype)
    model.part, model.config = part, replace(model.config, vocab_size=config.vocab_size)
    for layer in model.layers if quantize else ():
        quantize_layer(layer, quantize)  # type: ignore[arg-type]
    backend = TritonBackend(model, KVCache(model.config, device, dtype, 32768), graphs=False)
    tokenizer = load_tokenizer(name, config)
    compiler = Compiler(tokenizer, vocab_size=config.vocab_size, forbidden={config.mask_id})
    automaton = compiler.compile_for(DecodeConfig(regex="[0-9]+"), config.eos_ids)
    with compilation.noted() as ahead:
        backend.note_kernels(8192 if config.mixture else 0, sampling=True, fitting=True)
    assert automaton is not None
    constraint = Constraint(automaton, automaton.start, 64, 128, 1000)
    hot = DecodeConfig(temperature=0.7)
    batches = [
        *([(1, plan(rows, 64))] for rows in (1, 2, 4, 8, 16)),
        *([(1, plan(1, length))] for length in (1, 32, 96, 200)),
        [(slot, plan(4, 64)) for slot in range(8)],
        *([(1, plan(rows, 64, start=20000))] for rows in (1, 4, 8, 16)),
    ]
    with compilation.noted() as late:
        lane = backend._lanes[0]
        for plans in batches:
            run(backend, lane, plans, DecodeConfig())
            run(backend, lane, plans, hot)
        if part.count == 1:  # else it is torch's
            fitting = plan(4, 64, config.mask_id, constraint=constraint)
            run(backend, lane, [(1, fitting)], DecodeConfig(regex="[0-9]+"))
    return ahead, {
        "model": f"{name} {dtype} {quantize}",
        "is_whole": part.count == 1,
        "kernels": Counter(job.name for job in ahead.values()),
        "late": sorted({job.name for key, job in late.items() if key not in ahead}),
    }


@torch.inference_mode()
def run(backend: TritonBackend, lane: Any, plans: Any, config: DecodeConfig) -> None:
    """What a round launches."""
    batch, configs = make_batch(plans, backend.model.config.shift), [config] * len(plans)
    inputs = graph_inputs.layers_on(backend.device, batch, backend._group)
    backend._ensure_staging(lane, len(inputs.tokens))
    backend._write_and_run_layers(lane, inputs, backend._layer_sizes(batch).far)
    sizes = graph_inputs.head_sizes(batch, configs)
    assert sizes is not None
    if batch.is_constrained:
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=backend.device)
        backend._run_constrained(lane, batch, configs, sizes, out)
    else:
        head = graph_inputs.head_on(backend.device, batch, configs, sizes)
        backend._run_head(lane, head, sizes)


if __name__ == "__main__":
    driver.set_active(Device())
    for module in (attention, experts, matmul):
        module.shared_memory = lambda device: HOPPER  # type: ignore[attr-defined]
    prefix_attention.is_faster = lambda device, dtype, dim: dtype is torch.bfloat16
    for case in CASES:
        jobs, found = noted(*case)
        if "--compile" in sys.argv and case in (CASES[0], CASES[-1]):
            # What is compiled is not noted for the models that follow.
            quick = ("_gather", "_activate") if case is CASES[0] else ("_merge",)
            small = {key: job for key, job in jobs.items() if job.name in quick}
            compilation._compile_triton.__code__ = (  # without loading it to a device
                lambda kernel, data: (kernel.preload(data), None)[1]
            ).__code__
            compiled = compilation.compile_all(small, torch.device("cpu"))
            found["compiled"] = [one._asdict() for one in compiled]
            if case is CASES[0]:
                again = noted(*case)[0]
                found["left"] = len(jobs) - len(again)
        print(json.dumps(found), flush=True)
