"""The runner in use: flat batches over a paged cache.

This is the host's side: which slot has which pages, which prefixes are shared, which rows are
staged. The device's side is a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lopa.config import DecodeConfig
from lopa.kernels.compilation import Progress
from lopa.models.transformer import Transformer
from lopa.runner.backend_torch import Found, PendingStats, TorchBackend
from lopa.runner.base import InFlight, Plans, check_kv_capacity, make_stats
from lopa.runner.batch import Batch, make_batch
from lopa.runner.kv_cache import PAGE, KVCache, pages_for, slot_mapping
from lopa.runner.prefix_cache import Entry, PrefixCache
from lopa.types import IntArray, Plan, Stats

PREFILL_TOKENS = 2048  # what a long prompt may add to a round: tokens · share of the layers

# exact: only where the same tokens come out; approximate: also under full attention, where the
# keys of a prompt depend on what follows it.
Reuse = Literal["exact", "approximate", "off"]


@dataclass(slots=True)
class _Slot:
    config: DecodeConfig
    pages: list[int]
    table: IntArray  # the same pages, as an array
    prompt: Sequence[int]
    grain: Literal["whole", "pages"] | None  # how its prefix is shared, if at all
    reused: int = 0
    chain: list[Entry] = field(default_factory=list)  # `pages` grain: the entries it stands on
    known: list[int] = field(default_factory=list)  # `pages` grain: committed tokens
    plan: Plan | None = None  # forwarded and not yet committed
    lane: int | None = None  # where it was forwarded last
    begins: IntArray | None = None  # [R] of that plan: first token of each row; None: written
    prefill: Iterator[Found | None] | None = None  # a long prompt under way
    carry_position: int = -1


class PagedRunner:
    def __init__(
        self,
        model: Transformer,
        cache_tokens: int,
        *,
        reuse: Reuse = "exact",
        prefill_tokens: int = PREFILL_TOKENS,
        backend: Callable[[Transformer, KVCache], TorchBackend] = TorchBackend,
        warmup: int = 0,  # prepare for rounds of up to so many tokens
        compiling: Progress | None = None,  # of kernels
    ) -> None:
        self.model = model
        self.config = model.config
        parameter = next(model.parameters())
        self.kv_cache = KVCache(model.config, parameter.device, parameter.dtype, cache_tokens)
        self.prefix_cache = PrefixCache(self.kv_cache)
        self.reuse = reuse
        self.prefill_tokens = prefill_tokens
        self.backend = backend(model, self.kv_cache)
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        # By lane: whose staged rows the backend holds
        self._latest: list[PendingStats | None] = [None] * self.backend.lanes
        self.compiled = self.backend.compile_kernels(compiling)
        if warmup:
            self.backend.warm_up(warmup)

    @property
    def is_async(self) -> bool:
        return self.backend.is_async

    @property
    def lanes(self) -> int:
        return self.backend.lanes

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        return self.backend.padding

    @property
    def capacity(self) -> int:
        """Tokens of the whole cache."""
        return self.kv_cache.total_pages * PAGE

    @property
    def kv_pages(self) -> tuple[int, int]:
        return self.kv_cache.used_pages, self.kv_cache.total_pages

    # -- slots --------------------------------------------------------------------------------

    def check(self, capacity: int) -> None:
        check_kv_capacity(capacity, self.capacity)

    def open(self, config: DecodeConfig, capacity: int, prompt: Sequence[int] = ()) -> int | None:
        self.check(capacity)
        grain = self._grain(config) if prompt else None
        whole, chain = None, []
        if grain == "whole":
            whole = self.prefix_cache.find_whole(prompt)
            if (
                whole is not None
                and whole.length % PAGE
                and pages_for(capacity) == self.kv_cache.total_pages
            ):
                whole = None  # its last page is copied, and both do not fit
        elif grain == "pages":
            # A shifted model needs the row before its first mask: leave it the last token.
            limit = len(prompt) - 1 if self.config.shift else len(prompt)
            chain = self.prefix_cache.find_pages(prompt, limit)
        shared = [page for entry in chain for page in entry.pages]
        tail = None
        if whole is not None:
            full = whole.length // PAGE
            shared, tail = whole.pages[:full], whole.pages[full:]
        self.kv_cache.incref([*shared, *(tail or [])])  # before evict, which may not free them
        wanted = pages_for(capacity) - len(shared)
        self.prefix_cache.evict(wanted)
        own = self.kv_cache.alloc(wanted)
        if own is None:
            self.kv_cache.free([*shared, *(tail or [])])
            return None
        number = self._free.pop() if self._free else len(self._slots)
        pages = [*shared, *own]
        slot = _Slot(config, pages, np.array(pages, np.int64), prompt, grain, chain=chain)
        self._slots[number] = slot
        self.backend.open(number, pages)
        if whole is not None:
            slot.reused = whole.length
            slot.carry_position = whole.length - 1
            if tail:
                self.backend.copy(tail[0], own[0])
                self.kv_cache.free(tail)
            if whole.carry is not None:
                self.backend.carry[number] = whole.carry
        elif chain:
            slot.reused = chain[-1].length
            slot.known = list(prompt[: slot.reused])
        return number

    def reused(self, slot: int) -> int:
        return self._slots[slot].reused

    def shares(self, slot: int) -> bool:
        state = self._slots[slot]
        if state.grain == "whole":  # the prompt alone
            return state.plan is not None and state.plan.start == 0
        return state.grain is not None

    def close(self, slot: int) -> None:
        self.kv_cache.free(self._slots.pop(slot).pages)
        self._free.append(slot)

    def _grain(self, config: DecodeConfig) -> Literal["whole", "pages"] | None:
        if self.reuse == "off" or config.window != "pipeline":
            return None
        if config.attention == "full":
            return "pages" if self.reuse == "approximate" else None
        if self.config.trained_block is None:
            return "whole"
        return None if PAGE % self.config.trained_block else "pages"

    # -- rounds -------------------------------------------------------------------------------

    def cost(self, plan: Plan) -> int:
        """A single row is cut along the layers when it is long."""
        alone = len(plan.rows) == 1
        return min(plan.rows.size, self.prefill_tokens) if alone else plan.rows.size

    def launch(self, plans: Plans, lane: int = 0) -> InFlight:
        for slot, plan in plans:
            self._check_carry(self._slots[slot], plan)
        self._enter(plans, lane)
        self._latest[lane] = None  # in case this one is interrupted
        if not self.is_async or any(self.cost(plan) != plan.rows.size for _, plan in plans):
            return InFlight(partial(self.forward, plans, lane))
        batch = make_batch(plans, self.config.shift)
        pending = self.backend.launch(batch, *self._of_slots(plans), lane)
        self._latest[lane] = pending

        def wait() -> list[Stats | None]:
            if self._latest[lane] is not pending:  # its staged rows have been overwritten
                return self.forward(plans, lane)
            for slot, plan in plans:
                self._slots[slot].plan, self._slots[slot].lane = plan, lane
            found = self._pieces(batch, pending.wait())
            return [_stats(found[slot]) for slot, _ in plans]

        return InFlight(wait)

    @torch.inference_mode()
    def forward(self, plans: Plans, lane: int = 0) -> list[Stats | None]:
        self._enter(plans, lane)
        self._latest[lane] = None
        found: dict[int, Found | None] = {}
        short = []
        for slot, plan in plans:
            state = self._slots[slot]
            self._check_carry(state, plan)
            state.plan, state.lane = plan, lane
            if self.cost(plan) == plan.rows.size:
                short.append((slot, plan))
            elif state.prefill is None:
                batch = make_batch([(slot, plan)], self.config.shift)
                share = self.config.layers * self.prefill_tokens // batch.size
                state.prefill = self.backend.prefill(
                    batch, state.table, state.config, max(1, share)
                )
        # One long prompt at a time, the one that came first; others may be another engine's.
        asked = {slot for slot, _ in plans}
        prefills = (s for n, s in self._slots.items() if n in asked and s.prefill is not None)
        long = next(prefills, None)
        if short:
            batch = make_batch(short, self.config.shift)
            found |= self._pieces(batch, self.backend.forward(batch, *self._of_slots(short), lane))
        for slot, _ in plans:
            state = self._slots[slot]
            if state is long and state.prefill is not None:
                found[slot] = next(state.prefill)
                if found[slot] is not None:
                    state.prefill, state.begins = None, None
        return [_stats(found.get(slot)) for slot, _ in plans]

    def _enter(self, plans: Plans, lane: int) -> None:
        """Write what is pending in the lanes that these slots come from: a forward writes its own
        lane's alone."""
        if any(self._slots[slot].lane not in (None, lane) for slot, _ in plans):
            self.backend.flush()

    def _of_slots(self, plans: Plans) -> tuple[list[IntArray], list[DecodeConfig]]:
        """What a backend needs to know of the slots of a batch."""
        states = [self._slots[slot] for slot, _ in plans]
        return [state.table for state in states], [state.config for state in states]

    def _pieces(self, batch: Batch, found: Found) -> dict[int, Found | None]:
        """By slot; where its rows are is noted for the commit."""
        token, max_prob, ranking = found
        pieces: dict[int, Found | None] = {}
        end = 0
        metadata = batch.metadata
        counts = zip(batch.plans, metadata.first_rows, batch.wanted.counts, strict=True)
        for (slot, plan), row, count in counts:
            here = slice(end, end := end + count)
            pieces[slot] = token[here], max_prob[here], ranking[here]
            self._slots[slot].begins = metadata.row_begin[row : row + len(plan.rows)]
        return pieces

    def _check_carry(self, state: _Slot, plan: Plan) -> None:
        if not self.config.shift or not plan.start or state.carry_position == plan.start - 1:
            return
        if plan.wanted[:, 0].any():
            raise RuntimeError(f"no logits remembered for position {plan.start}")

    def commit(self, winners: Sequence[tuple[int, int]]) -> None:
        source, slots, carries = [], [], []
        lane = (self._slots[winners[0][0]].lane if winners else None) or 0  # of all of them
        for number, winner in winners:
            slot = self._slots[number]
            plan = slot.plan
            if plan is None:
                raise RuntimeError(f"slot {number} has no forward to commit")
            if plan.commit and slot.begins is not None:
                begin = int(slot.begins[winner])
                source.append(np.arange(begin, begin + plan.commit))
                slots.append(slot_mapping(slot.table, plan.start, plan.commit))
                carries.append((begin + plan.commit - 1, number))
        if source:
            with torch.inference_mode():
                self.backend.commit(np.concatenate(source), np.concatenate(slots), carries, lane)
        for number, winner in winners:
            self._committed(number, self._slots[number], winner)

    def staging(self, tokens: int) -> Tensor:
        """An unwritten buffer of the size that `staged` gives for so many tokens."""
        config, keys = self.config, self.kv_cache.keys
        size = 2 * tokens * config.layers * config.kv_heads * config.head_dim + config.hidden_size
        return torch.empty(size, device=keys.device, dtype=keys.dtype)

    @torch.inference_mode()
    def staged(self, slot: int, row: int) -> Tensor:
        """What a commit of that row of the last forward would write, in one flat buffer."""
        state = self._slots[slot]
        if state.plan is None or state.begins is None:
            raise RuntimeError(f"slot {slot} has nothing staged")
        return self.backend.staged(int(state.begins[row]), state.plan.commit)

    @torch.inference_mode()
    def install(self, slot: int, plan: Plan, row: int, buffer: Tensor) -> None:
        """Commit what another runner's `staged` gave for that row of the plan."""
        state = self._slots[slot]
        state.plan = plan
        self.backend.install(slot, slot_mapping(state.table, plan.start, plan.commit), buffer)
        self._committed(slot, state, row)

    def _committed(self, number: int, slot: _Slot, winner: int) -> None:
        plan, slot.plan = slot.plan, None
        assert plan is not None
        if not plan.commit:
            return
        slot.carry_position = plan.start + plan.commit - 1
        if slot.grain == "whole":
            if plan.start == 0 and plan.commit == len(slot.prompt):
                self.backend.flush()
                carry = self.backend.carry[number].clone() if self.config.shift else None
                pages = slot.pages[: pages_for(len(slot.prompt))]
                self.prefix_cache.add_whole(slot.prompt, pages, carry)
        elif slot.grain == "pages":
            slot.known += plan.rows[winner, : plan.commit].tolist()
            while (end := PAGE * (len(slot.chain) + 1)) <= len(slot.known):
                before = slot.chain[-1] if slot.chain else None
                page = slot.pages[len(slot.chain)]
                tokens = slot.known[end - PAGE : end]
                slot.chain.append(self.prefix_cache.add_page(before, tokens, page))


def _stats(found: Found | None) -> Stats | None:
    return None if found is None else make_stats(*found)
