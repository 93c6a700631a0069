"""Help texts of the fields of `DecodeConfig`, for the command line and the playground.

No default and no limit is written here: those are in `lopa.config` and `lopa.option_checks`.
"""

from __future__ import annotations

# Field → the group it is shown in, and its help text.
FIELDS: dict[str, tuple[str, str]] = {
    "decoder": ("Decoding", "Decoding algorithm"),
    "max_new_tokens": ("Decoding", "Maximum new tokens"),
    "branches": ("Decoding", "k: lookahead branches per round beside the anchor, or auto"),
    "threshold": ("Decoding", "τ_conf: fill every token that is more confident than this"),
    "seed": ("Decoding", "Seed of sampling, at a temperature above 0"),
    "block_size": ("Window", "Tokens per block"),
    "append_at": ("Window", "τ_add: decoded share of the last block that appends the next"),
    "activate_at": ("Window", "τ_act: decoded share of a block that fully activates the next"),
    "attention": ("Window", "What a block attends to: everything, or the blocks to its left"),
    "cache": ("Window", "KV cache of Fast-dLLM between rounds"),
    "window": ("Window", "What is decoded at a time; only lopa can choose"),
    "ranking": ("Filling", "Confidence that orders forced fills and lookaheads"),
    "factor": ("Filling", "Fast-dLLM's factor rule, instead of the threshold"),
    "steps": (
        "Filling",
        "Fixed number of rounds; in a pipeline, rounds that each block is shared out over",
    ),
    "quota": ("Filling", "Minimum tokens that a round fills in a block that has to get on"),
    "edit_threshold": (
        "Filling",
        "Replace a filled token of an unfinished block by one more confident than this",
    ),
    "edit_rounds": ("Filling", "Maximum rounds of editing after the last mask of a block"),
    "order": ("Filling", "What sdar fills first when few tokens are above the threshold"),
    "objective": (
        "Lookahead",
        "What branches auto maximises: tokens per second, or tokens per forward",
    ),
    "accept": (
        "Lookahead",
        "Branches that may win: by score alone, agreed by the anchor, or exact (same tokens)",
    ),
    "agreement": ("Lookahead", "Minimum probability that the anchor gives a lookahead token"),
    "agreement_ahead": ("Lookahead", "The same in blocks behind the one of the first mask"),
    "merge": ("Lookahead", "Let the winner take along the tokens of branches that agree with it"),
    "score": ("Lookahead", "How a branch is scored"),
    "score_fraction": (
        "Lookahead",
        "Share of the masks, least confident first, that score mean averages",
    ),
    "score_window": ("Lookahead", "Masks in the sliding window of score window"),
    "creation_weight": (
        "Lookahead",
        "α: weight of the lookahead token's own confidence; 0 unless the score is fills",
    ),
    "lookahead_floor": ("Lookahead", "Minimum probability of a lookahead token"),
    "lookahead_eos": ("Lookahead", "Allow lookaheads that are EOS or stand after EOS"),
    "early_stop": ("Stopping", "Stop at EOS; without it, decode on as published"),
    "stop": ("Stopping", "Stop string; may be repeated"),
    "schema": ("Stopping", "JSON Schema that the answer fits; {} is any JSON"),
    "regex": ("Stopping", "Regular expression that the whole answer matches"),
    "max_rounds": ("Stopping", "Maximum rounds"),
    "temperature": (
        "Sampling",
        "Sample tokens at this temperature; 0 is greedy. Confidences stay those of temperature 1",
    ),
    "top_p": ("Sampling", "Sample from the most probable tokens with this total probability"),
    "top_k": ("Sampling", "Sample from this many most probable tokens; 0 is all"),
}
