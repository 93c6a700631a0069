"""Schemas and regexes, decoded with many settings at once, and what became of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import torch
from made_up_regexes import made_up_regex
from made_up_schemas import made_up
from safetensors.torch import load_file, save_file

import lopa
from lopa.engine.base_llm import BaseLLM
from lopa.errors import ConfigError

TINY = Path(lopa.__file__).parent / "tiny"
WINDOWS: list[dict[str, Any]] = [
    {},
    {"attention": "block"},
    {"window": "canvas"},
    {"window": "blocks", "cache": "none"},
    {"window": "blocks", "cache": "prefix"},
    {"window": "blocks", "cache": "dual"},
]
BRANCHES, TEMPERATURES = (0, 3, 7), (0.0, 1.0)


def random_model(folder: Path) -> Path:
    """The built-in model's tokenizer on one layer of random weights."""
    for path in TINY.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(x.shape, generator=generator) / x.shape[-1] ** 0.5
        for name, x in load_file(TINY / "model.safetensors").items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings_of(number: int) -> dict[str, Any]:
    """In turn: all branches and temperatures with all windows."""
    number, window = divmod(number, len(WINDOWS))
    number, branches = divmod(number, len(BRANCHES))
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    drawn = {"seed": number, "temperature": temperature}
    return {**WINDOWS[window], "branches": BRANCHES[branches], **drawn}


def check_schemas(llm: BaseLLM, seeds: range, offset: int = 0) -> int:
    """Decode one answer for each schema, with one of the settings; how many there were."""
    cases = [{"schema": made_up(seed).schema} for seed in seeds]
    return _check(llm, cases, offset)


def check_regexes(llm: BaseLLM, seeds: range, offset: int = 0) -> int:
    return _check(llm, [{"regex": made_up_regex(seed, nested=False)} for seed in seeds], offset)


def _check(llm: BaseLLM, cases: list[dict[str, Any]], offset: int) -> int:
    asked, configs = [], []
    for number, case in enumerate(cases, offset):
        try:
            automaton = llm.automaton(llm.decode_config(max_new_tokens=512, **case))
        except ConfigError:
            continue  # nothing fits, or too much: what is refused is tested elsewhere
        assert automaton is not None
        if automaton.min_tokens > 200:
            continue
        tokens = max(8, automaton.min_tokens + number % 40)  # often just enough
        asked.append(case)
        configs.append(llm.decode_config(max_new_tokens=tokens, **settings_of(number), **case))
    outputs = llm.generate([llm.encode(f"Question {i}: ") for i in range(len(asked))], configs)
    for case, output in zip(asked, outputs, strict=True):
        assert output.finish == "eos", case
        if "schema" in case:
            jsonschema.validate(json.loads(output.text), case["schema"])
        else:
            assert re.fullmatch(case["regex"], output.text), (case, output.text)
    return len(asked)
