"""The golden cases: runs of the published loops on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lopa import DecodeConfig

FOLDER = Path(__file__).parent / "golden"
MODELS = FOLDER / "models"
CASES = sorted((FOLDER / "cases").glob("*.json"))
LLADA = MODELS / "llada_a"

_RANKING = {
    "default": "max_prob",
    "margin_confidence": "margin",
    "neg_entropy": "neg_entropy",
    "maskgit_plus": "max_prob",
    "topk_margin": "margin",
    "entropy": "neg_entropy",
}


def read(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def parity_config(case: dict[str, Any]) -> DecodeConfig:
    """The case's settings under our names."""
    args, mode = case["args"], case["mode"]
    common: dict[str, Any] = {"max_new_tokens": args["max_new_tokens"], "early_stop": False}
    if mode == "vanilla":
        return DecodeConfig(
            decoder="vanilla",
            steps=args["diffusion_steps"],
            ranking=_RANKING[args["alg"]],
            **common,
        )
    common |= {
        "block_size": args["block_size"],
        "append_at": args["block_add_threshold"],
        "activate_at": args["decoded_token_threshold"],
        "threshold": args["skip_threshold"],
        "ranking": _RANKING[args["sampling_strategy"]],
        "attention": "block" if mode == "d2f-orig" else args["attention"],
    }
    if mode != "lopa":
        return DecodeConfig(decoder="d2f", **common)
    return DecodeConfig(
        decoder="lopa",
        branches=0 if args["branches"] == 1 else args["branches"],
        score_fraction=args["branch_topp"],
        creation_weight=args["selection_conf_alpha"],
        lookahead_eos=True,
        **common,
    )
