"""The fields of `DecodeConfig` in words: what the command line and the playground say of each.

No default and no limit is written here: those are read from `lopa.config`.
"""

from __future__ import annotations

# Field → the group it is shown in, and what it does.
FIELDS: dict[str, tuple[str, str]] = {
    "decoder": ("Decoding", "How to decode"),
    "max_new_tokens": ("Decoding", "Most tokens of the answer"),
    "branches": ("Decoding", "k: lookahead branches in a round beside the anchor, or auto"),
    "threshold": ("Decoding", "τ_conf: fill every token more confident than this"),
    "seed": ("Decoding", "For sampling, at a temperature above 0"),
    "block_size": ("Window", "Tokens in a block"),
    "append_at": ("Window", "τ_add: decoded share of the last block that appends the next"),
    "activate_at": ("Window", "τ_act: decoded share that fully activates the right neighbour"),
    "attention": ("Window", "What a block sees: everything, or the blocks to its left"),
    "cache": ("Window", "What Fast-dLLM keeps between rounds"),
    "window": ("Window", "What is decoded at a time; only lopa may choose"),
    "ranking": ("Filling", "Confidence that orders forced fills and lookaheads"),
    "factor": ("Filling", "Fast-dLLM's factor rule, in place of the threshold"),
    "steps": (
        "Filling",
        "Fixed number of rounds; of sdar, for a block (default: one token per round)",
    ),
    "order": ("Filling", "What sdar fills first when few are above the threshold"),
    "objective": ("Lookahead", "What branches auto makes most of: tokens a second, or a forward"),
    "score": ("Lookahead", "How a branch is scored"),
    "score_fraction": (
        "Lookahead",
        "Share of the masks, least confident first, that mean averages",
    ),
    "score_window": ("Lookahead", "Masks in the sliding window of score window"),
    "creation_weight": (
        "Lookahead",
        "α: weight of the lookahead token's own confidence; 0 but with fills",
    ),
    "lookahead_floor": ("Lookahead", "Least probability of a lookahead token"),
    "lookahead_eos": ("Lookahead", "Let a lookahead place EOS, or look behind it"),
    "early_stop": ("Stopping", "Stop at EOS; without it, decode on as published"),
    "stop": ("Stopping", "Stop at this text; may be repeated"),
    "max_rounds": ("Stopping", "Stop after this many rounds"),
    "temperature": ("Sampling", "Sample tokens; 0 takes the most probable"),
    "top_p": ("Sampling", "Sample from the most probable tokens that make up this share"),
    "top_k": ("Sampling", "Sample from this many most probable tokens; 0 is all"),
}
