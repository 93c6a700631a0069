"""Loading: layouts, dtypes, adapters, memory, and one clear line for every broken file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import goldens
from lopa import LLM, LopaError
from lopa.models import checkpoint
from lopa.models.families import dummy_shapes

SOURCE = goldens.MODELS / "dream_0"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((SOURCE / name).read_bytes())
    return tmp_path


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return LLM(folder, device="cpu", **options).forward(IDS)


def test_sharded_equals_single(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    keys = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for n in range(3):
        name = f"model-0000{n + 1}-of-00003.safetensors"
        part = {key: tensors[key] for key in keys[n::3]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(folder), logits(SOURCE))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LopaError, match=r"model-00002-of-00003\.safetensors is missing"):
        logits(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_any_stored_dtype(folder: Path, stored: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.to(stored) for k, v in tensors.items()}, folder / "model.safetensors")
    llm = LLM(folder, device="cpu", dtype="float32")
    assert llm.dtype == torch.float32
    # Rounding the weights by 2^-9 moves logits of some ten units by a few tenths at most.
    torch.testing.assert_close(llm.forward(IDS), logits(SOURCE), atol=1.0, rtol=0)
    half = LLM(folder, device="cpu", dtype="bfloat16")
    assert half.forward(IDS).dtype == torch.float32
    assert torch.isfinite(half.forward(IDS)).all()


def test_tensors_give_the_checkpoint_back() -> None:
    for source in (SOURCE, goldens.LLADA):
        model = LLM(source, device="cpu").model
        expected = load_file(source / "model.safetensors")
        given = checkpoint.tensors(model)
        assert given.keys() == expected.keys()
        assert all(torch.equal(given[key], expected[key]) for key in expected)


def test_tied_head(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tied = LLM(folder, device="cpu").forward(IDS)
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, folder / "model.safetensors")
    raw["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(tied, LLM(folder, device="cpu").forward(IDS))


def test_overrides() -> None:
    llm = LLM(SOURCE, device="cpu", eos_token_id=[1, 2], mask_token_id=7)
    assert llm.config.eos_ids == (1, 2)
    assert llm.config.mask_id == llm.runner.config.mask_id == 7
    with pytest.raises(LopaError, match="outside the vocabulary"):
        LLM(SOURCE, device="cpu", mask_token_id=10**6)


def test_parameter_counts() -> None:
    shape = dummy_shapes()["dream-7b"]
    assert shape.parameters == 7_615_616_512  # as published: 7.616 B
    model = LLM("dummy:dream-tiny", device="cpu").model
    assert sum(p.numel() for p in model.parameters()) == model.config.parameters


def test_dummies_are_repeatable() -> None:
    one, two = (LLM("dummy:dream-tiny", device="cpu").forward(IDS) for _ in range(2))
    assert torch.equal(one, two)


# -- LoRA -------------------------------------------------------------------------------------


def write_adapter(folder: Path, rank: int = 4, **config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(3):
        for module, out in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 64, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*\.(q|v)_proj", "all-linear"])
def test_lora_targets(folder: Path, targets: object) -> None:
    write_adapter(folder / "a")
    write_adapter(folder / "b", target_modules=targets)
    assert torch.equal(logits(folder, adapter=folder / "a"), logits(folder, adapter=folder / "b"))


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_lora_is_merged(folder: Path, rslora: bool, scale: float) -> None:
    adapter = folder / "adapter"
    pairs = write_adapter(adapter, use_rslora=rslora)
    base = load_file(folder / "model.safetensors")
    for key in [k for k in pairs if "lora_A" in k]:
        target = key.removeprefix("base_model.model.").replace("lora_A.", "")
        base[target] += scale * pairs[key.replace("lora_A", "lora_B")] @ pairs[key]
    merged = folder / "merged"
    merged.mkdir()
    save_file(base, merged / "model.safetensors")
    (merged / "config.json").write_bytes((folder / "config.json").read_bytes())
    given = logits(folder, adapter=adapter)
    torch.testing.assert_close(given, logits(merged), atol=1e-4, rtol=1e-4)
    assert (given - logits(folder)).abs().max() > 0.1


def test_lora_patterns(folder: Path) -> None:
    write_adapter(folder / "a", lora_alpha=8)
    write_adapter(folder / "b", lora_alpha=4, alpha_pattern={"q_proj": 8, "v_proj": 8})
    assert torch.equal(logits(folder, adapter=folder / "a"), logits(folder, adapter=folder / "b"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"r": 3}, "made for another one"),
        ({"r": None}, "lacks r or lora_alpha"),
        ({"target_modules": ["q_proj", "k_proj"]}, "none of the target_modules"),
        ({"target_modules": r".*\.q_proj"}, "none of the target_modules"),
        ({"target_modules": "("}, "target_modules cannot be read"),
    ],
)
def test_adapters_that_do_not_fit(folder: Path, config: dict[str, Any], named: str) -> None:
    write_adapter(folder / "adapter", **config)
    with pytest.raises(LopaError, match=named):
        logits(folder, adapter=folder / "adapter")


def test_odd_adapters(folder: Path) -> None:
    adapter = folder / "adapter"
    write_adapter(adapter, rank_pattern={"(": 4})
    with pytest.raises(LopaError, match="rank_pattern cannot be read"):
        logits(folder, adapter=adapter)
    write_adapter(adapter)
    tensors = {"model.norm.lora_A.weight": torch.ones(4, 64)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(LopaError, match="fits no layer"):
        logits(folder, adapter=adapter)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").mkdir()
    with pytest.raises(LopaError, match="cannot be read"):
        logits(folder, adapter=adapter)


def test_adapter_of_another_model(folder: Path) -> None:
    with pytest.raises(LopaError, match="fits no layer of this model"):
        logits(folder, adapter=goldens.LLADA / "lora")
    with pytest.raises(LopaError, match=r"adapter_config\.json is missing"):
        logits(folder, adapter=folder)


# -- broken input -----------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def garble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:60] = b"\xff" * 40
    path.write_bytes(bytes(data))


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 64)
    save_file(tensors, folder / "model.safetensors")


def missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.bias"]
    save_file(tensors, folder / "model.safetensors")


def extra_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")


def set_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def header_without_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + data[8:].replace(b'"shape"', b'"shade"', 1))


def set_header(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        raw = json.loads(data[8 : 8 + length])
        raw["model.norm.weight"] |= changes
        header = json.dumps(raw).replace("Infinity", "1e999").encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])

    return change


def giant(name: str, header: int = 0) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.write(header.to_bytes(8, "little"))
            file.truncate(2**40)  # sparse: it takes no room

    return make


def put(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def long_shard(folder: Path) -> None:
    weight_map = {"model.norm.weight": "x" * 5000}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)


def shard_outside(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    weight_map = dict.fromkeys(names, "../model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, r"model\.safetensors is cut off within tensor model\.\S+ "),
        (cut_header, "not a valid safetensors file"),
        (garble_header, "not a valid safetensors file"),
        (empty_file, "not a valid safetensors file"),
        (wrong_shape, r"up_proj\.weight has shape \[5, 64\] where config\.json asks for \[128, 64"),
        (missing_tensor, r"model\.layers\.2\.self_attn\.k_proj\.bias is missing"),
        (extra_tensor, r"q_norm\.weight is not part of a dream model"),
        (set_config(architectures=["GPT2LMHeadModel"]), "unknown architecture"),
        (set_config(architectures=[], model_type="gpt2"), "unknown architecture"),
        (set_config(rope_scaling={"type": "yarn"}), "rope_scaling"),
        (set_config(use_sliding_window=True), "use_sliding_window"),
        (set_config(hidden_act="gelu"), "hidden_act"),
        (set_config(hidden_size="wide"), "hidden_size"),
        (set_config(mask_token_id=None), "mask_token_id is missing"),
        (set_config(torch_dtype="int4"), "no dtype 'int4'"),
        (set_config(num_key_value_heads=3), "4 heads cannot share 3 key-value heads"),
        (set_config(num_hidden_layers=0), "layers is 0"),
        (set_config(num_attention_heads=0), "heads is 0"),
        (set_config(num_hidden_layers=10**9), "no model has so many"),
        (set_config(head_dim="16"), "head_dim is '16'"),
        (set_config(architectures=5), "not a list"),
        (set_config(rope_theta=0.0), "rope_theta is 0"),
        (set_config(rope_parameters={"rope_type": "yarn"}), "rope_type"),
        (set_config(quantization_config={"bits": 4}), "quantization_config"),
        (set_header(shape=[float("inf")]), "tensor model.norm.weight has no valid shape"),
        (set_header(shape=[-64]), "tensor model.norm.weight has no valid shape"),
        (set_header(shape=[2**70]), "tensor model.norm.weight has no valid shape"),
        (set_header(data_offsets=[0, float("inf")]), "tensor model.norm.weight has no valid"),
        (giant("model.safetensors", header=2**62), r"model\.safetensors is .*header is cut off"),
        (giant("model.safetensors", header=2**39), r"model\.safetensors is .*header is larger"),
        (giant("config.json"), r"config\.json is larger than"),
        (giant("tokenizer.json"), r"tokenizer\.json is larger than"),
        (long_shard, "File name too long"),
        (set_config(vocab_size=10**300), "vocab_size is above"),
        (set_config(rope_theta=10**400), "rope_theta is inf"),
        (header_without_shape, "not a valid safetensors file"),
        (nested_config, "cannot be read as JSON"),
        (shard_outside, "outside the folder"),
        (set_config(mask_token_id=100_000), "the mask token 100000 is outside the vocabulary"),
        (break_config, r"config\.json cannot be read as JSON"),
        (no_weights, r"pytorch_model\.bin is not read.*safe_serialization=True"),
    ],
)
def test_broken_checkpoints(folder: Path, damage: Callable[[Path], None], named: str) -> None:
    damage(folder)
    with pytest.raises(LopaError, match=named) as caught:
        logits(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ],
)
def test_what_is_no_file(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    put(name, make)(folder)
    with pytest.raises(LopaError, match=rf"{name} cannot be read \(it is no regular file"):
        logits(folder)


def test_an_adapter_that_is_a_pipe(folder: Path) -> None:
    write_adapter(folder / "adapter")
    put("adapter_model.safetensors", os.mkfifo)(folder / "adapter")
    with pytest.raises(LopaError, match=r"adapter_model\.safetensors cannot be read"):
        logits(folder, adapter=folder / "adapter")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/folder", "nowhere", "", "a/b/c", "~/nope", "~nobody-here/x"]
)
def test_missing_folder(name: str) -> None:
    with pytest.raises(LopaError, match="does not exist"):
        LLM(name, device="cpu")


def test_file_for_folder() -> None:
    with pytest.raises(LopaError, match="is a file"):
        LLM(SOURCE / "config.json", device="cpu")


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LopaError, match="could not be fetched from the hub") as caught:
        LLM("Dream-org/Dream-v0-Nowhere-7B", device="cpu")
    assert "\n" not in str(caught.value)


def test_dummy_names_and_devices() -> None:
    with pytest.raises(LopaError, match="dream-7b"):
        LLM("dummy:nothing", device="cpu")
    with pytest.raises(LopaError, match="no device 'cuda:9'"):
        LLM("dummy:dream-tiny", device="cuda:9")
    with pytest.raises(LopaError, match="no dtype 'int3'"):
        LLM("dummy:dream-tiny", device="cpu", dtype="int3")


MEASURE = """
import sys, torch
from pathlib import Path
from lopa.models import checkpoint

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

folder = Path(sys.argv[1])
config = checkpoint.read_config(folder)
before, peak = anonymous(), 0
def watch(done, total):
    global peak
    peak = max(peak, anonymous())
model = checkpoint.load(folder, config, device=torch.device("cpu"), dtype=torch.float32,
                        progress=watch)
print(peak - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_needs_little_more_than_the_model(tmp_path: Path) -> None:
    raw = json.loads((SOURCE / "config.json").read_text())
    raw |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    raw |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = checkpoint.read_config(tmp_path)
    model = checkpoint.dummy(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    tensors = {k: v.contiguous() for k, v in checkpoint.tensors(model).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert size > 75e6
    assert grown < 1.3 * size  # pages are rounded up by tensor; a second copy would be 2
