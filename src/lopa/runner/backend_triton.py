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
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lopa.config import DecodeConfig
from lopa.grammar.token_automaton import FORBIDDEN, TokenAutomaton
from lopa.kernels import compilation, prefix_attention
from lopa.kernels.compilation import Compiled
from lopa.kernels.fast_linear import input_dtype, linear, logits, swiglu
from lopa.kernels.fast_mixture import experts_dtype, mixture
from lopa.kernels.scaled import Scaled
from lopa.kernels.triton import pointwise
from lopa.kernels.triton.attention import attend
from lopa.kernels.triton.confidence import VocabularyPart, confidence
from lopa.kernels.triton.kv_write import PendingKVWrites, Staged, gather, write_kv
from lopa.kernels.triton.lattice import fill_lattice
from lopa.kernels.triton.pointwise import Weighted
from lopa.models.mixture import Mixture
from lopa.models.transformer import Layer, RMSNorm, Transformer, rope
from lopa.runner import graph_inputs
from lopa.runner.attention import attend_whole
from lopa.runner.backend_torch import Found, PendingStats, TorchBackend
from lopa.runner.batch import Batch, make_batch
from lopa.runner.constrained import keep_filled
from lopa.runner.device_automaton import lattice_rows, tables_of
from lopa.runner.graph_inputs import HeadInputs, HeadSizes, LayerInputs, LayerSizes
from lopa.runner.graphs import GraphCache, common_sizes
from lopa.runner.kv_cache import PAGE, KVCache, pages_for
from lopa.types import Automaton, Constraint, IntArray, Plan

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
        cos, sin = rope(torch.arange(longest, device=self.device), config, self.dtype)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        # Of the last forward: tokens that went to each expert
        self.expert_counts: dict[int, Tensor] = {
            index: self.table.new_zeros(len(layer.feed_forward.experts.stacks[0]))
            for index, layer in enumerate(model.layers)
            if isinstance(layer.feed_forward, Mixture)
        }
        self._vocabulary = _vocabulary_part(model)
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
        if batch.is_constrained and self._vocabulary is not None:
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
        """Capture the graphs of batches of up to so many tokens in 16 rows, without sampling."""
        lane = self._lanes[0]
        if lane.graphs is None:
            return 0
        self.flush()
        self._ensure_staging(lane, graph_inputs.round_up(tokens))
        layers, heads = common_sizes(tokens, self._group)
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
            for _ in self._fused_layers(inputs, stage, only=only, far=sizes.far):
                pass
        if sampling:
            heads.append(heads[-1]._replace(sampling=True))
        for head in heads:
            buffer = graph_inputs.head_buffer(head).to(self.device)
            self._run_head(lane, graph_inputs.split_head(buffer, head), head)
        fitting = fitting and self._vocabulary is None
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
        *_, hidden = self._fused_layers(inputs, lambda layer: (keys[layer], values[layer]), far=far)
        lane.staged.hidden[:count] = hidden

    def _run_head(self, lane: _Lane, inputs: HeadInputs[Tensor], sizes: HeadSizes) -> Tensor:
        """[3, N] int32: token, and the bits of max_prob and ranking."""
        out = torch.empty(3, sizes.wanted, dtype=torch.int32, device=self.device)
        wanted = gather(lane.staged.hidden, self.carry, inputs.wanted_from)
        confidence(
            logits(self.model, wanted),
            inputs.settings,
            inputs.temperature,
            self.model.config.mask_id,
            out,
            sampling=sizes.sampling,
            never=inputs.never if sizes.never else None,
            expected=inputs.expected if sizes.never else None,
            part=self._vocabulary,
        )
        return out

    @torch.inference_mode()
    def _run_constrained(
        self,
        lane: _Lane,
        batch: Batch,
        configs: Sequence[DecodeConfig],
        sizes: HeadSizes,
        to: Tensor,  # [3, N] int32 on the host
    ) -> None:
        """The head of a batch in which answers have to fit."""
        inputs = graph_inputs.head_on(self.device, batch, configs, sizes)
        wanted = gather(lane.staged.hidden, self.carry, inputs.wanted_from)
        found, mask_id = logits(self.model, wanted), self.model.config.mask_id
        out = torch.zeros(3, sizes.wanted, dtype=torch.int32, device=self.device)
        end = 0
        by_plan = zip((plan for _, plan in batch.plans), batch.wanted.counts, strict=True)
        for automaton, same in groupby(by_plan, key=_automaton):
            neighbours = list(same)
            begin, end = end, end + sum(count for _, count in neighbours)
            if begin == end:
                continue
            here = slice(begin, end)
            settings, heat = inputs.settings[here], inputs.temperature[here]
            if automaton is None:
                part = torch.empty(3, end - begin, dtype=torch.int32, device=self.device)
                confidence(
                    found[here],
                    settings,
                    heat,
                    mask_id,
                    part,
                    sampling=sizes.sampling,
                    never=inputs.never[here] if sizes.never else None,
                    expected=inputs.expected[here] if sizes.never else None,
                )
                out[:, here] = part
            else:
                rows = lattice_rows([plan for plan, _ in neighbours], mask_id, self.device)
                tables = tables_of(automaton, self.device)
                given = found[here], settings, heat, tables, rows, out, begin
                fill_lattice(*given, sampling=sizes.sampling)
        to.copy_(out, non_blocking=True)

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
        stream = self._fused_layers(inputs, lambda layer: (keys, values), whole)
        for layer in range(config.layers):
            x = next(stream)
            keep(layer, keys, values)
            yield x
        yield next(stream)

    def _fused_layers(
        self,
        inputs: LayerInputs[Tensor],
        stage: Callable[[int], tuple[Tensor, Tensor]],
        whole: int | None = None,
        only: Sequence[int] | None = None,
        far: int = 0,
    ) -> Iterator[Tensor]:
        """The residual stream after each layer, then the normed hidden states.

        stage: where the keys and values of a layer go. whole: tokens of one row that all see each
        other and nothing else, without the padding. only: these layers. far: tokens of the prefix
        that are left to cuDNN, if all rows are of one sequence.
        """
        config, sum_parts = self.model.config, self.model.sum_parts
        count, heads, dim = len(inputs.tokens), config.heads, config.head_dim
        rows = graph_inputs.attention_rows(inputs, self.table)
        pages = rows.table[:, : far // PAGE].index_select(0, rows.slot[:1])[0] if far else None
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        x = self.model.embedding(inputs.tokens)
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        indices = range(len(layers)) if only is None else only
        # Each norm and the layer that reads it
        norms = [(layers[i].attention_norm, layers[i].attention.qkv) for i in indices]
        h = _norm(x, None, *norms[0])
        out: Tensor | Weighted
        for number, index in enumerate(indices, 1):
            layer = layers[index]
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = linear(attention.qkv, h)
            keys, values = stage(index)
            weights = None
            if config.qk_norm:
                weights = attention.q_norm.weight, attention.k_norm.weight
            pointwise.rotate(qkv, cos, sin, weights, config.norm_eps, keys, values, heads)
            q = qkv.view(count, -1, dim)[:, :heads]
            cache = self.kv_cache.keys[index], self.kv_cache.values[index]
            if whole is None:
                part = None if pages is None else prefix_attention.attend_far(q, *cache, pages)
                mixed = attend(q, keys, values, *cache, rows, far=part)
            else:
                mixed = attend_whole(q, keys, values, whole)
            out = sum_parts(linear(attention.out, mixed.view(count, heads * dim)))
            if isinstance(feed_forward, Mixture):
                given = _norm_for_experts(x, out, layer.feed_forward_norm, feed_forward)
                out = mixture(feed_forward, *given, inputs.used, self.expert_counts[index])
                if self.model.part.count > 1:
                    out = sum_parts(pointwise.weighted_sum(out))
            else:
                h = _norm(x, out, layer.feed_forward_norm, feed_forward.gate_up)
                out = sum_parts(linear(feed_forward.down, swiglu(feed_forward, h)))
            is_last = number == len(norms)
            h = _norm(x, out, *((self.model.norm, None) if is_last else norms[number]))
            yield x
        assert isinstance(h, Tensor)
        yield h


def _vocabulary_part(model: Transformer) -> VocabularyPart | None:
    part, size = model.part, model.config.vocab_size
    if part.count == 1:
        return None
    widest = -(-size // part.count)
    return VocabularyPart(part.held(size).start, part.index, part.count, widest, model.sum_parts)


def _automaton(of_plan: tuple[Plan, int]) -> Automaton | None:
    constraint = of_plan[0].constraint
    return None if constraint is None else constraint.automaton


def _show_nothing(done: int, number: int) -> None: ...


def _same(both: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    return both


def _drop_graphs(lane: _Lane) -> None:
    """All of them: what they were captured on is replaced or closed."""
    if lane.graphs is not None:
        lane.graphs.clear()


def _norm(
    x: Tensor, delta: Tensor | Weighted | None, norm: RMSNorm, to: nn.Module | None
) -> Tensor | Scaled:
    """RMSNorm of x + delta, quantized if the layer `to` that reads it is; x becomes the sum."""
    return pointwise.norm(x, delta, norm.weight, norm.eps, input_dtype(to))


def _norm_for_experts(
    x: Tensor, delta: Tensor, norm: RMSNorm, to: Mixture
) -> tuple[Tensor, Scaled | None]:
    """The same for a router, and quantized for its experts if they are."""
    kind = experts_dtype(to)
    if kind is not None:
        return pointwise.norm_both(x, delta, norm.weight, norm.eps, kind)
    plain = pointwise.norm(x, delta, norm.weight, norm.eps, None)
    assert isinstance(plain, Tensor)
    return plain, None
