"""Whatever is wrong with what the user gave: one line that names it, and a failing exit code."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import SHORT, Run, write_checkpoint
from safetensors.torch import load_file, save_file

TINY = ("--max-new-tokens", "8", "--block-size", "4")


@pytest.fixture
def broken(ids_model: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(ids_model, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fails(
    run: Run, folder: Path | str, *words: str, code: int = 1, more: tuple[str, ...] = ()
) -> None:
    result = run("generate", "1 2 3", "--model", str(folder), *TINY, *more)
    for word in words:
        assert word in result.error
    assert result.code == code


# -- models -------------------------------------------------------------------------------------


def test_missing_folder(run: Run, tmp_path: Path) -> None:
    fails(run, tmp_path / "no", str(tmp_path / "no"), "does not exist")


def test_empty_folder(run: Run, tmp_path: Path) -> None:
    fails(run, tmp_path, "config.json is missing")


def test_unknown_dummy(run: Run) -> None:
    fails(run, "dummy:nosuch", "nosuch", "dream-tiny")


def test_truncated_weights(run: Run, broken: Path) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    fails(run, broken, str(path), "cut off")


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, (20).to_bytes(8, "little") + b"{not json"])
def test_corrupt_header(run: Run, broken: Path, head: bytes) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(head + b"x" * 40 if head else b"")
    fails(run, broken, str(path), "not a valid safetensors file")


def test_wrong_shape(run: Run, broken: Path) -> None:
    change_config(broken, vocab_size=300)
    fails(run, broken, "model.embed_tokens.weight", "260", "300")


def test_missing_tensor(run: Run, broken: Path) -> None:
    path = broken / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    fails(run, broken, "model.norm.weight", "missing")


def test_unknown_architecture(run: Run, broken: Path) -> None:
    change_config(broken, architectures=["LlamaForCausalLM"])
    fails(run, broken, "LlamaForCausalLM", "DreamModel")


def test_config_that_is_no_json(run: Run, broken: Path) -> None:
    (broken / "config.json").write_text("{")
    fails(run, broken, "config.json", "JSON")


def test_adapter_that_does_not_fit(run: Run, ids_model: Path, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    halves = {key.format("A"): torch.zeros(2, 64), key.format("B"): torch.zeros(64, 2)}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    fails(run, ids_model, "q_proj", "another one", more=("--adapter", str(tmp_path)))


def test_adapter_that_is_none(run: Run, ids_model: Path, tmp_path: Path) -> None:
    fails(run, ids_model, "adapter_config.json", more=("--adapter", str(tmp_path)))


def test_hub_id_without_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lopa", "generate", "x", "--model", "some-org/some-model"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert done.stderr.splitlines()[-1].startswith("error: model some-org/some-model ")


# -- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", [("generate", "-"), ("chat",)])
def test_bytes_on_stdin(run: Run, command: tuple[str, ...], errors: str) -> None:
    """Python reads standard input by one or the other, as the locale is."""
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\n"), "utf-8", errors)
    error = run(*command, *SHORT, stdin=stdin).error
    assert "standard input is not UTF-8 text" in error
    assert "iconv" in error


@pytest.mark.parametrize(("prompt", "stdin"), [("", ""), ("-", ""), ("-", "\n")])
def test_empty_prompt(run: Run, prompt: str, stdin: str) -> None:
    result = run("generate", prompt, *SHORT, stdin=stdin)
    assert "the prompt is empty" in result.error
    assert result.code == 2


def test_prompt_longer_than_the_context(run: Run, ids_model: Path) -> None:
    result = run("generate", "1 " * 125, "--model", str(ids_model), *TINY)
    assert "125 tokens" in result.error
    assert "128" in result.error
    assert result.code == 2


@pytest.mark.parametrize("prompt", ["1 999 2", "1 258 2"])  # unknown, and the mask
def test_ids_that_cannot_be(run: Run, ids_model: Path, prompt: str) -> None:
    assert run("generate", prompt, "--model", str(ids_model), *TINY).code == 2


def test_text_that_is_no_unicode(run: Run) -> None:
    assert "Unicode" in run("generate", "caf\udce9", *SHORT).error


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--branches", "-1"), ("branches", "-1")),
        (("--branches", "1000"), ("branches", "128")),
        (("--threshold", "1.5"), ("threshold", "1.5")),
        (("--threshold", "nan"), ("threshold", "nan")),
        (("--append-at", "-0.1"), ("append_at",)),
        (("--activate-at", "2"), ("activate_at",)),
        (("--max-new-tokens", "0"), ("max_new_tokens",)),
        (("--max-new-tokens", "30", "--no-early-stop"), ("block_size 32", "30")),
        (("--block-size", "0"), ("block_size",)),
        (("--decoder", "d2f", "--branches", "4"), ("branches", "d2f", "lopa")),
        (("--decoder", "vanilla", "--threshold", "0.9"), ("threshold", "vanilla")),
        (("--decoder", "fast-dllm", "--steps", "8", "--threshold", "0.9"), ("steps", "threshold")),
        (("--decoder", "d2f", "--window", "canvas"), ("window", "d2f")),
        (("--top-p", "0.5"), ("top_p", "temperature")),
        (("--stop", ""), ("stop",)),
        (("--preset", "nosuch"), ("nosuch", "gsm8k")),
        (("--device", "nosuch:9"), ("nosuch:9", "cpu")),
        (("--dtype", "int3"), ("int3", "bfloat16")),
    ],
)
def test_options(run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run("generate", "x", "--model", "dummy:dream-tiny", *arguments)
    for word in words:
        assert word in result.error
    assert result.code == 2


def test_stop_strings_need_a_tokenizer(run: Run, ids_model: Path) -> None:
    fails(run, ids_model, "tokenizer", code=2, more=("--stop", "x"))


def test_a_good_checkpoint_loads(run: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "good")
    assert run("generate", "1 2 3", "--model", str(folder), *TINY).code == 0
