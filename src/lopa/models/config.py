"""What the one transformer needs to know about a model; families translate config.json to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lopa.errors import CheckpointError

_MOST_LAYERS = 10_000
_MOST = 2**31  # of any other size


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """The experts of a model, and how its router chooses among them."""

    experts: int
    per_token: int  # experts that a token goes to
    inner: int  # width of an expert
    shared: int = 0  # width of what every token goes through beside them; 0: nothing
    dense_layers: frozenset[int] = frozenset()  # those that have a plain feed-forward

    scoring: Literal["sigmoid", "softmax"]
    bias: bool = False  # added to the scores for the choice, not for the weights
    groups: int = 1  # neighbours; experts are chosen from the best `top_groups` of them
    top_groups: int = 1
    renormalise: bool  # divide the weights of the chosen by their sum
    scale: float = 1.0  # of the weights, in the end

    def __post_init__(self) -> None:
        for name in ("experts", "per_token", "inner", "groups", "top_groups"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise CheckpointError(
                    f"config.json: {name} of the experts is {getattr(self, name)}, not above 0"
                )
        if not 0 <= self.shared <= _MOST:
            raise CheckpointError(f"config.json: shared experts of width {self.shared}")
        if self.experts % self.groups or self.top_groups > self.groups:
            raise CheckpointError(
                f"config.json: {self.experts} experts cannot be chosen from {self.top_groups} of "
                f"{self.groups} groups"
            )
        size = self.experts // self.groups
        if self.groups > 1 and size < 2:
            raise CheckpointError("config.json: a group of experts is scored by its best two")
        if self.per_token > size * self.top_groups:
            raise CheckpointError(
                f"config.json: {self.per_token} experts a token, of {size * self.top_groups} that "
                "may be chosen"
            )


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
    # Trained to replace its own tokens, and published with this probability of a better one.
    edit_threshold: float | None = None
    rotary_dim: int | None = None  # of each head, the first so many turn by RoPE; None: all
    mixture: MixtureConfig | None = None

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
        turned = self.rotary_size
        if turned % 2 or not 0 < turned <= self.head_dim:
            raise CheckpointError(
                f"config.json: RoPE turns pairs, and not {turned} of {self.head_dim} in a head"
            )

    @property
    def rotary_size(self) -> int:
        """How many of a head's numbers RoPE turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """The experts of a layer; None: it has a plain feed-forward."""
        mixture = self.mixture
        return None if mixture is None or layer in mixture.dense_layers else mixture

    @property
    def parameters(self) -> int:
        """Number of parameters, the head counted once when it is tied."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        layers = sum(map(self.layer_parameters, range(self.layers)))
        return layers + embeddings + self.hidden_size

    def layer_parameters(self, layer: int) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = self.hidden_size * (q + 2 * kv) + q * self.hidden_size + 2 * self.hidden_size
        if self.qkv_bias:
            found += q + 2 * kv
        if self.qk_norm:
            found += 2 * self.head_dim
        width, mixture = self.intermediate_size, self.mixture_of(layer)
        if mixture is not None:
            width = mixture.experts * mixture.inner + mixture.shared
            found += mixture.experts * (self.hidden_size + mixture.bias)
        return found + 3 * self.hidden_size * width
