"""The built-in model's tokenizer: byte-level BPE trained on generated text, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from recipes.files import write_text

EOS = "<|endoftext|>"  # also the filler behind an answer
MASK = "<|mask|>"
SPECIALS = (EOS, MASK, "<|spare_0|>", "<|spare_1|>")  # ids in this order, from 0
EOS_ID, MASK_ID = 0, 1

# Words with the space before them, single digits without, runs of signs, line ends, indents.
# Digits alone: every number is spelt the same way wherever it stands, which arithmetic needs.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+(?!\S)|\s+"
# One user turn is one problem, which ends with a line end; earlier turns were never trained on.
# It was trained on single questions.
_CHAT = (
    "{% if messages | length > 1 %}{{ raise_exception('this model reads one question at a time, "
    "without a system message and without history: send one user message alone') }}{% endif %}"
    "{{ (messages[0]['content'] | trim) + '\\n' }}"
)


def train(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A tokenizer of at most `vocab_size` entries; the same texts give the same one."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(texts, trainer)
    return built


def save(built: tokenizers.Tokenizer, folder: Path) -> None:
    write_text(folder / "tokenizer.json", built.to_str())
    config = {"eos_token": EOS, "pad_token": EOS, "mask_token": MASK, "chat_template": _CHAT}
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
