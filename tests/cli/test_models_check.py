"""`lopa models check`: what a checkpoint would run as, or what is in its way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Run, write_tokenizer
from fake_hub import fake_hub
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from lopa import LLM
from lopa.models.families import FAMILIES

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def folder(ids_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ids_model, tmp_path / "model"))


def check(run: Run, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("models", "check", *arguments, "--json").out)
    return found


def test_a_published_shape(run: Run) -> None:
    found = check(run, "dummy:dream-7b")
    assert found["runs"] is True
    assert found["parameters"] == 7_615_616_512  # as on its model card
    assert found["weight_bytes"] == 2 * 7_615_616_512
    assert found["kv_bytes_per_1k"] == 1024 * 2 * 28 * 4 * 128 * 2  # K and V, layers, heads, bf16
    devices = {fit["device"]: fit for fit in found["fits"]}
    assert devices["RTX 4090"]["tensor_parallel"] == 1
    assert check(run, "dummy:dream-7b", "--dtype", "float32")["fits"][0]["tensor_parallel"] == 2


def test_a_shape_that_has_to_be_split(run: Run) -> None:
    """100 B parameters in bf16 are 191.6 GiB; its four key-value heads allow four parts."""
    devices = {fit["device"]: fit for fit in check(run, "dummy:llada2-flash")["fits"]}
    parts = {name: fit["tensor_parallel"] for name, fit in devices.items()}
    assert parts == {"RTX 4090": None, "L40S": None, "A100, H100": 4, "H200": 2}
    assert "--tensor-parallel 4" in run("models", "check", "dummy:llada2-flash").out


def test_every_family_as_loading_sees_it(run: Run, tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = tmp_path / family.name
        assert run("models", "make-tiny", family.name, str(folder)).code == 0
        found = check(run, str(folder))
        llm = LLM(folder, device="cpu")
        assert found["family"] == family.name
        assert found["parameters"] == sum(p.numel() for p in llm.model.parameters())
        assert found["settings"] == llm.decode_config().settings()
        assert found["tokenizer"] is False
        result = run("models", "check", str(folder))
        assert result.code == 0
        assert "runs" in result.out


def test_the_adapter_published_for_it(run: Run, folder: Path) -> None:
    assert check(run, str(folder))["adapters"] == []
    named = folder.rename(folder.parent / "DiffuCoder-7B-Instruct")
    ours = ["SJTU-Deng-Lab/D2F_DiffuCoder_Instruct_7B_Lora"]
    assert check(run, str(named))["adapters"] == ours
    assert ours[0] in run("models", "check", str(named)).out


def test_an_adapter(run: Run, folder: Path) -> None:
    adapter = write_adapter(folder / "adapter")
    assert check(run, str(folder), "--adapter", str(adapter))["adapter"] == str(adapter)
    text = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(text.replace('"r": 2', '"r": 3'))
    problem = check(run, str(folder), "--adapter", str(adapter))["problem"]
    assert "made for another one" in problem


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, 128),
        f"{name}.lora_B.weight": torch.ones(128, 2),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


# -- what is in the way -------------------------------------------------------------------------


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def gguf(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "dream-q4_k_m.gguf").write_bytes(b"GGUF")


def quantized(method: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        raw = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
        path.write_text(json.dumps(raw))

    return change


def pointer(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(POINTER)

    return change


def shards_without_an_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for n in (0, 1):
        part = {key: tensors[key] for key in sorted(tensors)[n::2]}
        save_file(part, folder / f"model-0000{n + 1}-of-00002.safetensors")


def only_an_adapter(folder: Path) -> None:
    shutil.rmtree(folder)
    write_adapter(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (pickled, ("pytorch_model.bin is not read", "safe_serialization=True")),
        (gguf, ("dream-q4_k_m.gguf is GGUF", "in safetensors that it was made from")),
        (quantized("gptq"), ("stored quantized (gptq)", "--quantize fp8 or int8")),
        (quantized("awq"), ("stored quantized (awq)", "--quantize fp8 or int8")),
        (pointer("model.safetensors"), ("is a Git LFS pointer", "git lfs pull")),
        (pointer("config.json"), ("is a Git LFS pointer", "git lfs pull")),
        (shards_without_an_index, ("model-00001-of-00002", "without model.safetensors.index.json")),
        (only_an_adapter, ("is an adapter", "as the adapter")),
        (shutil.rmtree, ("does not exist", "give a folder, a hub id")),
    ],
)
def test_what_is_in_the_way(
    run: Run, folder: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    """Checking and loading say the same."""
    damage(folder)
    result = run("models", "check", str(folder))
    for word in words:
        assert word in result.error
    loaded = run("generate", "1 2 3", "--model", str(folder), "--max-new-tokens", "8")
    assert loaded.error == result.error
    found = check(run, str(folder))
    assert found["runs"] is False
    assert f"error: {found['problem']}" == result.error


def test_a_file_in_place_of_a_folder(run: Run, folder: Path) -> None:
    gguf(folder)
    assert "is GGUF" in run("models", "check", str(folder / "dream-q4_k_m.gguf")).error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", ("adapter_config.json is missing", "fetch it")),
        ("adapter_model.safetensors", ("adapter_model.safetensors is missing", "PEFT")),
    ],
)
def test_a_missing_file_of_an_adapter(
    run: Run, folder: Path, name: str, words: tuple[str, ...]
) -> None:
    adapter = write_adapter(folder / "adapter")
    (adapter / name).unlink()
    options = ("--adapter", str(adapter))
    result = run("models", "check", str(folder), *options)
    for word in words:
        assert word in result.error
    short = ("--max-new-tokens", "8")
    loaded = run("generate", "1 2 3", "--model", str(folder), *options, *short)
    assert loaded.error == result.error


# -- the hub ------------------------------------------------------------------------------------


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Point the hub's client, which has read its environment by now, elsewhere; its cache."""

    def point(url: str, offline: bool = False) -> Path:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return tmp_path / "hub"

    return point


def test_a_hub_id_by_its_headers(run: Run, folder: Path, hub_at: Callable[..., Path]) -> None:
    write_tokenizer(folder)
    with fake_hub("some/model", folder) as hub:
        hub_at(hub.url)
        result = run("models", "check", "some/model", "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["parameters"] == LLM(folder, device="cpu").config.parameters
    assert found["tokenizer"] is True
    assert hub.sent["config.json"] == (folder / "config.json").stat().st_size
    size = (folder / "model.safetensors").stat().st_size
    assert 0 < hub.sent["model.safetensors"] <= 100_001 < size / 10
    assert not hub.sent["tokenizer.json"]


def test_a_hub_id_that_cannot_run(run: Run, folder: Path, hub_at: Callable[..., Path]) -> None:
    shards_without_an_index(folder)
    with fake_hub("some/model", folder) as hub:
        hub_at(hub.url)
        problem = check(run, "some/model")["problem"]
        other = run("models", "check", "some/other").error
    assert problem.startswith("some/model holds shards")
    assert "without model.safetensors.index.json" in problem
    assert "could not be fetched from the hub" in other


def test_a_hub_id_offline(run: Run, folder: Path, hub_at: Callable[..., Path]) -> None:
    """What is in the cache is checked; what is not has a remedy."""
    cache = hub_at("http://127.0.0.1:9", offline=True)
    error = run("models", "check", "some/model").error
    assert "hf download some/model --local-dir FOLDER" in error
    commit = "0" * 40
    repository = cache / "models--some--model"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert check(run, "some/model")["family"] == "dream"
