"""What the tests of the command line share: its results, and small checkpoints to load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lopa import LLM
from lopa.models import checkpoint

DUMMY = ("--model", "dummy:dream-tiny")
SHORT = (*DUMMY, "--max-new-tokens", "8", "--block-size", "4")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """What a failed command said, which must be one line and nothing else."""
        assert self.code in (1, 2)
        assert self.out == ""
        last = self.err.splitlines()[-1]
        assert last.startswith("error: ")
        assert self.err.count("error: ") == 1
        assert "Traceback" not in self.err
        return last


Run = Callable[..., Result]


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """The dummy model as a Dream checkpoint without a tokenizer; `changes` go to config.json."""
    model = LLM("dummy:dream-tiny").model
    config = model.config
    raw = {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "mask_token_id": config.mask_id,
        "eos_token_id": config.eos_ids[0],
        "torch_dtype": "float32",
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {key: tensor.clone() for key, tensor in checkpoint.tensors(model).items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes and the tokens of ChatML, which make it a chat model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|mask|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
