"""The backend of fused kernels and CUDA graphs, for NVIDIA GPUs.

A forward is two graphs, one of the layers and one of the head, each cached by its own sizes. The
layers: a copy of their inputs to the device, the KV writes that the last round committed, and the
layers themselves. The head: a copy of its inputs, the logits, their statistics, and a small copy
back. The head's inputs are filled while the device runs the layers. Where an answer has to fit an
automaton, whose sizes are its own, the head has no graph: it is queued behind the layers.

Of a part of a model the kernels are the same, with the heads, inner widths and vocabulary of the
part. What they find is summed over the ranks (`Transformer.sum_parts`) behind the embedding, before
each residual addition, and in the statistics. A graph has these sums in it, or is cut there
(`lopa.runner.graph_pieces`). Answers that have to fit an automaton have their head by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.grammar.token_automaton import FORBIDDEN, TokenAutomaton
from lopa.kernels import compilation, prefix_attention
from lopa.kernels.compilation import Compiled
from lopa.kernels.triton.kv_write import PendingKVWrites, Staged, write_kv
from lopa.models.transformer import Transformer
from lopa.runner import graph_inputs
from lopa.runner.backend_torch import Found, PendingStats, TorchBackend
from lopa.runner.batch import Batch, make_batch
from lopa.runner.constrained import keep_filled
from lopa.runner.fused_head import FusedHead
from lopa.runner.fused_layers import FusedLayers
from lopa.runner.graph_inputs import HeadInputs, HeadSizes, LayerInputs, LayerSizes
from lopa.runner.graphs import GraphCache, common_sizes
from lopa.runner.kv_cache import PAGE, KVCache, pages_for
from lopa.types import Constraint, IntArray, Plan

_HALF = torch.bfloat16, torch.float16  # what cuDNN's attention takes
_SLOTS = 256  # at first; doubled when more are open, which drops all graphs
_USUAL_TOKENS = 1024  # of the batches whose kernels are compiled ahead
_ALIKE = 2  # layers of a kind that a trial run has: the norm between them is one of its kernels


@dataclass(slots=True)
class _Lane:
    """What a forward has of its own from its launch to its commit."""

    graphs: GraphCache | None
    staged: Staged
    pending: PendingKVWrites[IntArray] | None = None  # written by its next graph
    launches: int = 0


class TritonBackend(TorchBackend):
    """Two forwards may be in flight, one in each lane; the device runs them one after the other."""

    def __init__(self, model: Transformer, kv_cache: KVCache, *, graphs: bool = True) -> None:
        super().__init__(model, kv_cache)
        config = model.config
        self._group = config.heads // config.kv_heads
        longest = min(config.max_positions, kv_cache.total_pages * PAGE)
        self.table = torch.zeros(_SLOTS, pages_for(longest), dtype=torch.int32, device=self.device)
        self.carry = self.carry.new_zeros(_SLOTS, config.hidden_size)
        self._fused_layers = FusedLayers(model, kv_cache, longest)
        self._head = FusedHead(model)
        self._by_cudnn = prefix_attention.is_faster(self.device, self.dtype, config.head_dim)
        self.is_async = graphs and self.device.type == "cuda"
        self.padding = graph_inputs.PADDING
        self._lanes = [self._new_lane(None)]
        if self.is_async:
            first = self._lanes[0].graphs
            assert first is not None
            self._lanes.append(self._new_lane(first.pool))

    def _new_lane(self, pool: Any) -> _Lane:
        cache = self.kv_cache
        staged = Staged(cache.keys[:, :0], cache.values[:, :0], self.carry[:0])
        return _Lane(GraphCache(self.device, pool) if self.is_async else None, staged)

    @property
    def expert_counts(self) -> dict[int, Tensor]:
        """By layer: tokens of the last forward that went to each expert."""
        return self._fused_layers.expert_counts

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def drop_graphs(self) -> None:
        for lane in self._lanes:
            _drop_graphs(lane)

    def open(self, slot: int, pages: Sequence[int]) -> None:
        self.flush()  # pending writes may be for a former owner of this slot or its pages
        if slot >= len(self.table):
            table, carry = (torch.cat([x, torch.zeros_like(x)]) for x in (self.table, self.carry))
            self.table, self.carry = table, carry
            self.drop_graphs()
            self.open(slot, pages)
            return
        on_gpu = self.device.type == "cuda"
        on_host = torch.tensor(pages, dtype=torch.int32, pin_memory=on_gpu)
        # Without waiting for a forward that is in flight
        self.table[slot, : len(pages)].copy_(on_host, non_blocking=on_gpu)

    # -- a round ------------------------------------------------------------------------------

    def launch(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        configs: Sequence[DecodeConfig],
        lane: int = 0,
    ) -> PendingStats:
        own = self._lanes[lane]
        graphs = own.graphs
        if graphs is None:
            found = self._run(own, batch, configs)
            return PendingStats(lambda: found)
        own.launches += 1
        launch, head = own.launches, self._replay(own, graphs, batch, configs)

        def wait() -> Found:
            if launch != own.launches:
                raise RuntimeError("another forward was launched since")
            graphs.wait()
            return self._found(own, head, batch, configs)

        return PendingStats(wait)

    def _replay(
        self, lane: _Lane, graphs: GraphCache, batch: Batch, configs: Sequence[DecodeConfig]
    ) -> IntArray | None:
        """Launch the layers and the head: where its result will be; None: by torch."""
        graphs.wait()  # for the last forward: its buffers are filled again
        sizes = self._layer_sizes(batch)
        if sizes not in graphs.layers:
            self._ensure_staging(lane, sizes.tokens)
            self._flush(lane)  # the trial run before a capture overwrites what is staged
        elif lane.pending is not None and not sizes.fit(lane.pending):
            self._flush(lane)
        run = partial(self._write_and_run_layers, lane, far=sizes.far)
        layers = graphs.layer_graph(sizes, run)
        layers.inputs.fill(batch, lane.pending, self._group)
        lane.pending = None
        if self.timer is not None:
            self.timer.start()
        graphs.replay(layers)
        out = None
        head_sizes = self._head_sizes(batch, configs)
        if head_sizes is not None and batch.is_constrained:
            on_host = torch.empty(
                3, head_sizes.wanted, dtype=torch.int32, pin_memory=self.device.type == "cuda"
            )
            graphs.run(partial(self._run_constrained, lane, batch, configs, head_sizes, on_host))
            out = on_host.numpy()
        elif head_sizes is not None:
            head = graphs.head_graph(head_sizes, partial(self._run_head, lane))
            graph_inputs.fill_head(head.inputs, batch, configs)
            graphs.replay(head)
            out = head.out
        if self.timer is not None:
            self.timer.stop()
        return out

    def _run(self, lane: _Lane, batch: Batch, configs: Sequence[DecodeConfig]) -> Found:
        """Without graphs."""
        inputs = graph_inputs.layers_on(self.device, batch, self._group)
        self._ensure_staging(lane, len(inputs.tokens))
        self._run_layers(lane, inputs, self._layer_sizes(batch).far)
        sizes, out = self._head_sizes(batch, configs), None
        if sizes is not None and batch.is_constrained:
            on_host = torch.empty(3, sizes.wanted, dtype=torch.int32)
            self._run_constrained(lane, batch, configs, sizes, on_host)
            out = on_host.numpy()
        elif sizes is not None:
            head = graph_inputs.head_on(self.device, batch, configs, sizes)
            out = self._run_head(lane, head, sizes).cpu().numpy()
        return self._found(lane, out, batch, configs)

    def _layer_sizes(self, batch: Batch) -> LayerSizes:
        return graph_inputs.layer_sizes(batch, self._group, by_cudnn=self._by_cudnn)

    def _head_sizes(self, batch: Batch, configs: Sequence[DecodeConfig]) -> HeadSizes | None:
        """None where the head is left to torch."""
        if batch.is_constrained and self._head.part is not None:
            return None
        return graph_inputs.head_sizes(batch, configs)

    def _found(
        self,
        lane: _Lane,
        out: IntArray | None,  # [3, N] int32 of the confidence kernel; None: by torch
        batch: Batch,
        configs: Sequence[DecodeConfig],
    ) -> Found:
        """The result may view `out`."""
        if out is None:
            return self._find_statistics(batch, lane.staged.hidden, configs)
        found = out[:, : len(batch.wanted.source)]
        token, max_prob, ranking = (
            found[0].astype(np.int64),
            found[1].view(np.float32),
            found[2].view(np.float32),
        )
        end = 0
        for (_, plan), config, count in zip(batch.plans, configs, batch.wanted.counts, strict=True):
            here = slice(end, end := end + count)
            if config.edits and plan.constraint is not None:
                own = token[here], max_prob[here], ranking[here]
                keep_filled(plan, self.model.config.mask_id, config, own)
        return token, max_prob, ranking

    def commit(
        self,
        source: IntArray,
        target: IntArray,
        carries: Sequence[tuple[int, int]],
        lane: int = 0,
    ) -> None:
        """Leave the writes to the lane's next graph, which does them before its layers."""
        own = self._lanes[lane]
        self._flush(own)
        carry_source, carry_slot = np.array(carries, np.int64).reshape(-1, 2).T
        own.pending = PendingKVWrites(source, target, carry_source, carry_slot)
        if own.graphs is None:
            self._flush(own)

    def flush(self) -> None:
        for lane in self._lanes:
            self._flush(lane)

    @torch.inference_mode()
    def _flush(self, lane: _Lane) -> None:
        if lane.pending is not None:
            self._write_kv(lane, graph_inputs.writes_on(self.device, lane.pending))
            lane.pending = None

    def _write_kv(self, lane: _Lane, writes: PendingKVWrites[Tensor]) -> None:
        write_kv(lane.staged, self.kv_cache.keys, self.kv_cache.values, self.carry, writes)

    def staged(self, begin: int, count: int) -> Tensor:
        keys, values, hidden = self._lanes[0].staged
        here = slice(begin, begin + count)
        return torch.cat(
            [keys[:, here].flatten(), values[:, here].flatten(), hidden[here.stop - 1]]
        )

    # -- sizes --------------------------------------------------------------------------------

    def warm_up(self, tokens: int, progress: compilation.Progress | None = None) -> int:
        """Capture the graphs of batches of up to so many tokens, without sampling."""
        lane = self._lanes[0]
        if lane.graphs is None:
            return 0
        self.flush()
        self._ensure_staging(lane, graph_inputs.round_up(tokens))
        layers, heads = common_sizes(tokens, self._group, most_rows=graph_inputs.ROWS[-1])
        number = len(layers) + len(heads)
        show = progress or _show_nothing
        for done, sizes in enumerate(layers):
            show(done, number)
            lane.graphs.layer_graph(sizes, partial(self._write_and_run_layers, lane))
        for done, head in enumerate(heads, len(layers)):
            show(done, number)
            lane.graphs.head_graph(head, partial(self._run_head, lane))
        show(number, number)
        return number

    def compile_kernels(
        self,
        progress: compilation.Progress | None = None,
        *,
        tokens: int = 0,
        sampling: bool = False,
        fitting: bool = False,
    ) -> list[Compiled]:
        if self.device.type != "cuda":
            return []
        with compilation.noted() as jobs:
            self.note_kernels(tokens, sampling=sampling, fitting=fitting)
        return compilation.compile_all(jobs, self.device, progress)

    @torch.inference_mode()
    def note_kernels(self, tokens: int, *, sampling: bool, fitting: bool) -> None:
        """Launch what `compile_kernels` says; the kernels are noted, and not run."""
        lane, config = self._lanes[0], self.model.config
        layers, heads = common_sizes(_USUAL_TOKENS, self._group)
        more = [1 << n for n in range(_USUAL_TOKENS.bit_length(), tokens.bit_length())]
        layers += [graph_inputs.round_layers(n, 1, self._group) for n in more]
        for sizes in [*layers, *self._with_far_part(layers)]:
            buffer = graph_inputs.layer_buffer(sizes).to(self.device)
            inputs = graph_inputs.split_layers(buffer, sizes)
            self._write_kv(lane, graph_inputs.pending_writes(inputs))
            shape = 2, sizes.tokens, config.kv_heads, config.head_dim
            keys, values = torch.empty(shape, dtype=self.dtype, device=self.device)
            stage = partial(_same, (keys, values))
            only = self._some_layers()
            for _ in self._fused_layers.run(inputs, self.table, stage, only=only, far=sizes.far):
                pass
        if sampling:
            heads.append(heads[-1]._replace(sampling=True))
        for head in heads:
            buffer = graph_inputs.head_buffer(head).to(self.device)
            self._run_head(lane, graph_inputs.split_head(buffer, head), head)
        fitting = fitting and self._head.part is None
        if fitting:
            self._note_lattice(lane, 0.0)
        if fitting and sampling:
            self._note_lattice(lane, 1.0)

    def _with_far_part(self, sizes: Sequence[LayerSizes]) -> list[LayerSizes]:
        """The fewest and the most tokens of which a part of the longest prefix is left to cuDNN."""
        longest = self.table.shape[1] * PAGE if self._by_cudnn else 0
        found = sorted(s for s in sizes if prefix_attention.far_tokens(longest, s.tokens))
        return [s._replace(far=prefix_attention.CHUNK) for s in found[:1] + found[-1:]]

    def _note_lattice(self, lane: _Lane, temperature: float) -> None:
        """Of a row that may be any text."""
        model, length = self.model.config, 32
        class_of = np.ones(model.vocab_size, np.int32)
        class_of[model.mask_id] = FORBIDDEN
        following, nearby = np.array([[-1, 0]], np.int32), np.zeros(1, np.int32)
        automaton = TokenAutomaton(class_of, following, 0, np.ones(1, np.bool_), nearby, 0)
        masks = np.full((1, length), model.mask_id)
        ends, wanted = np.array([length]), np.ones((1, length), np.bool_)
        constraint = Constraint(automaton, 0, 0, length, length)
        plan = Plan(1, 0, 0, 0, masks, ends, wanted, None, constraint)
        batch, configs = (
            make_batch([(0, plan)], model.shift),
            [DecodeConfig(temperature=temperature)],
        )
        sizes = graph_inputs.head_sizes(batch, configs)
        assert sizes is not None
        out = self.table.new_empty(3, sizes.wanted)
        self._run_constrained(lane, batch, configs, sizes, out)

    def _some_layers(self) -> list[int]:
        """Of each kind of layer the first few, for a trial run."""
        kinds = [type(layer.feed_forward) for layer in self.model.layers]
        return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < _ALIKE]

    @torch.inference_mode()
    def _ensure_staging(self, lane: _Lane, tokens: int) -> None:
        """Staging for at least so many tokens."""
        capacity, config = len(lane.staged.hidden), self.model.config
        if tokens <= capacity:
            return
        self._flush(lane)
        tokens = max(tokens, 2 * capacity)
        shape = (config.layers, tokens, config.kv_heads, config.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        values, hidden = torch.empty_like(keys), self.carry.new_empty(tokens, config.hidden_size)
        lane.staged = Staged(keys, values, hidden)  # when memory runs out, the old one stays
        _drop_graphs(lane)

    # -- on the device ------------------------------------------------------------------------

    def _write_and_run_layers(self, lane: _Lane, inputs: LayerInputs[Tensor], far: int = 0) -> None:
        self._write_kv(lane, graph_inputs.pending_writes(inputs))
        self._run_layers(lane, inputs, far)

    def _run_layers(self, lane: _Lane, inputs: LayerInputs[Tensor], far: int = 0) -> None:
        """Stages keys, values and hidden states."""
        count = len(inputs.tokens)
        keys, values = lane.staged.keys[:, :count], lane.staged.values[:, :count]
        *_, hidden = self._fused_layers.run(
            inputs, self.table, lambda layer: (keys[layer], values[layer]), far=far
        )
        lane.staged.hidden[:count] = hidden

    def _run_head(self, lane: _Lane, inputs: HeadInputs[Tensor], sizes: HeadSizes) -> Tensor:
        return self._head.run(lane.staged.hidden, self.carry, inputs, sizes)

    def _run_constrained(
        self,
        lane: _Lane,
        batch: Batch,
        configs: Sequence[DecodeConfig],
        sizes: HeadSizes,
        to: Tensor,  # [3, N] int32 on the host
    ) -> None:
        self._head.run_constrained(lane.staged.hidden, self.carry, batch, configs, sizes, to)

    def _layers(
        self,
        batch: Batch,
        tables: Sequence[IntArray],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[Tensor]:
        """For a long prompt: no graph, no staging, one layer at a time."""
        config = self.model.config
        inputs = graph_inputs.layers_on(self.device, batch, self._group)
        shape = (len(inputs.tokens), config.kv_heads, config.head_dim)
        keys, values = torch.empty(2, *shape, dtype=self.dtype, device=self.device)
        whole = None
        if batch.is_one_whole_row and (self.device.type == "cpu" or self.dtype in _HALF):
            whole = batch.size
        stream = self._fused_layers.run(inputs, self.table, lambda layer: (keys, values), whole)
        for layer in range(config.layers):
            x = next(stream)
            keep(layer, keys, values)
            yield x
        yield next(stream)


def _show_nothing(done: int, number: int) -> None: ...


def _same(both: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    return both


def _drop_graphs(lane: _Lane) -> None:
    """All of them: what they were captured on is replaced or closed."""
    if lane.graphs is not None:
        lane.graphs.clear()
