"""How long it takes to compile patterns for a vocabulary of Dream's size.

The vocabulary is made up from a seed: bytes, words, punctuation, runs of spaces, other scripts.
"""

from __future__ import annotations

import json
import os
import resource
import time
from random import Random
from typing import Any

VOCAB = 152_064
NAMES = [
    *("name", "age", "price", "active", "title", "count", "rating", "done", "street", "number"),
    *("weight", "open", "city", "floor", "height", "public", "country", "year", "score", "closed"),
]
KINDS = ("string", "integer", "number", "boolean")
PATTERNS: dict[str, dict[str, Any]] = {
    "20 keys": {
        "schema": {
            "type": "object",
            "properties": {name: {"type": KINDS[i % 4]} for i, name in enumerate(NAMES)},
            "required": NAMES[:10],
        }
    },
    "20 strings of up to 40 characters": {
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string", "maxLength": 40} for name in NAMES},
            "required": NAMES,
        }
    },
    "any object": {"schema": {"type": "object"}},
    "a string of up to 1000 characters": {"schema": {"type": "string", "maxLength": 1000}},
    "yes or no": {"regex": "yes|no"},
    "words of any script": {"regex": r"\w+( \w+)*\."},
}


def vocabulary(seed: int = 0) -> list[bytes]:
    rng = Random(seed)
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    while len(found) < VOCAB - 2:
        kind = rng.random()
        if kind < 0.6:
            word = "".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 12)))
            text = rng.choice(["", " "]) + rng.choice([word, word.capitalize()])
        elif kind < 0.7:
            text = "".join(rng.choices('{}[]":,._-/\\ \n0123456789', k=rng.randint(2, 4)))
        elif kind < 0.75:
            text = " " * rng.randint(2, 80) + rng.choice(["", "\n", "{"])
        else:
            first, last = rng.choice([(0xA0, 0x5FF), (0x900, 0xDFF), (0x4E00, 0x9FFF)])
            text = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 4)))
        found[text.encode()] = None
    return list(found)


def main() -> None:
    os.environ["LOPA_CACHE_DIR"] = os.devnull  # nothing is kept
    from lopa.config import DecodeConfig
    from lopa.grammar.compile import Compiler
    from lopa.models.byte_alphabet import CHAR_OF_BYTE
    from lopa.models.tokenizer import Tokenizer
    from lopa.models.tokenizer_files import added_token, byte_level_part, byte_level_spec

    words = ["".join(CHAR_OF_BYTE[byte] for byte in token) for token in vocabulary()]
    ids = {word: i for i, word in enumerate(words)}
    spec = byte_level_spec(ids, [], None, [byte_level_part(False)])
    eos, mask = VOCAB - 2, VOCAB - 1
    spec["added_tokens"] = [added_token("<eos>", eos, {}), added_token("<mask>", mask, {})]
    compiler = Compiler(Tokenizer(spec), vocab_size=VOCAB, forbidden={mask})
    began = time.perf_counter()
    compiler.compile_for(DecodeConfig(regex="a"), [eos])
    print(f"the tokens' bytes, once: {time.perf_counter() - began:.2f} s")
    for name, given in PATTERNS.items():
        wall, processor = time.perf_counter(), time.process_time()
        found = compiler.compile_for(DecodeConfig(**given), [eos])
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        assert found is not None
        print(
            f"{name}: {wall:.2f} s ({processor:.2f} s of a processor), {found.states} states, "
            f"{found.classes} classes, shortest answer {found.min_tokens} tokens"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"vocabulary": VOCAB, "peak_mib": round(peak)}))


if __name__ == "__main__":
    main()
