"""What the one transformer needs to know about a model; families translate config.json to it."""

from __future__ import annotations

from dataclasses import dataclass

from lopa.errors import CheckpointError

_MOST_LAYERS = 10_000
_MOST = 2**31  # of any other size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool
    shift: bool  # raw row p − 1 predicts position p
    mask_id: int
    eos_ids: tuple[int, ...]
    dtype: str = "float32"  # the checkpoint's own
    # Block-causal models: the block they were trained with, counted from position 0, prompt
    # included. None: attention is full, or blocks are counted from the end of the prompt.
    trained_block: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size layers heads kv_heads head_dim intermediate_size max_positions"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise CheckpointError(f"config.json: {name} is {getattr(self, name)}, not above 0")
            if getattr(self, name) > _MOST:
                raise CheckpointError(f"config.json: {name} is above {_MOST}: no model has so many")
        if self.layers > _MOST_LAYERS:  # each of them is listed before anything is read
            raise CheckpointError(f"config.json: layers is {self.layers}: no model has so many")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"config.json: {self.heads} heads cannot share {self.kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"config.json: head size {self.head_dim} is odd: RoPE needs pairs"
            )

    @property
    def parameters(self) -> int:
        """Number of parameters, the head counted once when it is tied."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        if self.qkv_bias:
            attention += q + 2 * kv
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.layers * layer + embeddings + self.hidden_size
