"""Parts of a model: what is read for a rank is what the whole model has there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import goldens
from lopa import LopaError
from lopa.models import checkpoint, llada2, tensor_file
from lopa.models.families import FAMILIES
from lopa.models.family import Family
from lopa.models.part import Part, check, degrees
from lopa.models.tensor_file import TensorFile
from lopa.models.transformer import Transformer

CPU = torch.device("cpu")
# Buffers of one row and of all, and parts of rows read by themselves or with their rows.
READERS = [(2**20, 2**20), (64, 2**20), (2**20, 1)]


def load(folder: Path, part: Part, dtype: torch.dtype = torch.float32) -> Transformer:
    return checkpoint.load(
        folder, checkpoint.read_config(folder), device=CPU, dtype=dtype, part=part
    )


def check_parts(whole: Transformer, parts: list[Transformer]) -> None:
    for index, model in enumerate(parts):
        own = dict(model.named_parameters())
        for name, parameter in whole.named_parameters():
            left = own.pop(name).clone()
            for place, values in Part(index, len(parts)).take(parameter, name, whole.config):
                assert torch.equal(left[place], values), name
                left[place] = torch.nan
            assert left.isnan().all(), name  # it holds nothing else
        assert not own


@pytest.mark.parametrize(("buffer", "seek"), READERS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_parts_of_every_family(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, seek: int
) -> None:
    monkeypatch.setattr(tensor_file, "_BUFFER", buffer)
    monkeypatch.setattr(tensor_file, "_SEEK", seek)
    checkpoint.write_tiny(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        whole = load(tmp_path, Part(), dtype)
        check_parts(whole, [load(tmp_path, Part(i, 2), dtype) for i in range(2)])
    stored = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(t.float(), stored[k])
        for k, t in checkpoint.tensors(load(tmp_path, Part())).items()
    )


def test_parts_of_stacked_experts(tmp_path: Path) -> None:
    checkpoint.write_tiny(llada2.FAMILY, tmp_path)
    whole = load(tmp_path, Part())
    (tmp_path / "stacked").mkdir()
    (tmp_path / "stacked" / "config.json").write_text((tmp_path / "config.json").read_text())
    parameters, found = dict(whole.named_parameters()), {}
    for key, target in llada2.stacked_targets(whole.config).items():
        parameter = parameters[target.parameter]
        found[key] = parameter[target.place(parameter.dim())].clone()
    save_file(found, tmp_path / "stacked" / "model.safetensors")
    check_parts(whole, [load(tmp_path / "stacked", Part(i, 2)) for i in range(2)])


def test_parts_of_a_dummy() -> None:
    config = checkpoint.model_config("dummy:dream-tiny")
    mixture = llada2.read_config(llada2.FAMILY.tiny)
    for shape in (config, replace(config, vocab_size=261), mixture):
        made = [
            checkpoint.dummy(shape, device=CPU, dtype=torch.float32, seed=0, part=Part(i, n))
            for n in (1, 2)
            for i in range(n)
        ]
        check_parts(made[0], made[1:])


def test_an_adapter_is_cut_with_its_weight() -> None:
    folder = goldens.LLADA
    config = checkpoint.read_config(folder)
    whole, *parts = (
        checkpoint.load(
            folder, config, device=CPU, dtype=torch.float32, adapter=folder / "lora", part=part
        )
        for part in (Part(), Part(0, 2), Part(1, 2))
    )
    for index, model in enumerate(parts):
        own = dict(model.named_parameters())
        for name, parameter in whole.named_parameters():
            for place, values in Part(index, 2).take(parameter, name, config):
                torch.testing.assert_close(own[name][place], values, atol=1e-6, rtol=0)


def test_degrees() -> None:
    config = llada2.read_config({**llada2.FAMILY.tiny, "num_key_value_heads": 4})
    assert degrees(config) == [1, 2, 4]
    assert config.mixture is not None
    narrow = replace(config, mixture=replace(config.mixture, inner=6))
    assert degrees(narrow) == [1, 2]
    with pytest.raises(LopaError, match=r"experts' inner width \(6\) do not divide by 4"):
        check(narrow, 4)
    sparse = replace(
        config, intermediate_size=7, mixture=replace(config.mixture, dense_layers=frozenset())
    )
    assert degrees(sparse) == [1, 2, 4]  # no layer has that width


def test_files_that_do_not_hold_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for entry, reason in (
        ({"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]}, "is stored as I8"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}, "8 bytes, which is not its"),
    ):
        raw = json.dumps({"a": entry}).encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
        with TensorFile(path) as file, pytest.raises(LopaError, match=reason):
            file.read("a", (slice(0, 2), slice(0, 2)), torch.empty(2, 2))
