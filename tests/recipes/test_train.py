"""The recipe from end to end on a stand-in task: learn, stop, resume, export, load, decode."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.pool import pack, unpack
from recipes.settings import Optim, Settings
from recipes.tokenizer import train
from recipes.train import Trainer, main

from lopa import LLM, DecodeConfig
from lopa.errors import ConfigError, LopaError
from lopa.models.checkpoint import dummy
from lopa.models.dream import FAMILY
from lopa.models.transformer import Transformer
from recipes import human, objective, schedule, settings

SMOKE = Path(__file__).parents[2] / "recipes" / "smoke.toml"


def smoke() -> Settings:
    return settings.load(
        SMOKE,
        [
            "data.source=recipe_stub",
            "data.scoring=recipe_stub",
            "data.length=96",
            "run.new_tokens=32",
        ],
    )


def metrics(out: Path, kind: str) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.engine
def test_learns_stops_resumes_and_exports(tmp_path: Path) -> None:
    first = Trainer(smoke(), out=tmp_path, minutes=10, steps=240, device="cpu")
    try:
        before = first.evaluation.losses(first.average)["words"]
        original = first.advance

        def advance() -> torch.Tensor:
            first.stopping = first.step == 99  # as a signal would, in the middle
            return original()

        first.advance = advance  # type: ignore[method-assign]
        assert not first.run()
        middle = first.evaluation.losses(first.average)["words"]
    finally:
        first.close()
    assert first.step == 100

    second = Trainer(smoke(), out=tmp_path, minutes=10, steps=240, device="cpu", resume=True)
    try:
        assert second.step == 100
        assert second.seconds >= first.before
        assert second.pool.next_chunk >= first.pool.next_chunk
        for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        momentum = [
            o.state_dict()["state"][0]["exp_avg"] for o in (*first.optimizers, *second.optimizers)
        ]
        assert torch.equal(*momentum)
        assert second.run()
        after = second.evaluation.losses(second.average)["words"]
    finally:
        second.close()
    assert second.step == 240
    assert before > 5.0  # the logarithm of the vocabulary
    assert middle < 0.5 * before
    assert after < 0.15 * before
    rates = [line["lr"] for line in metrics(tmp_path, "train")]
    assert rates[-1] < 0.05 * max(rates)
    assert "accuracy_words_lopa7" in metrics(tmp_path, "eval")[-1]

    # The exported folder is the averaged model, to half precision.
    llm = LLM(tmp_path / "model", device="cpu")
    assert llm.config == second.average.config
    (row, *_), (prompt, *_), *_ = unpack(second.evaluation.rows["words"])
    ids = row.tolist()
    ids[int(prompt) + 2 :] = [llm.config.mask_id] * (len(ids) - int(prompt) - 2)
    sees = torch.ones(1, len(ids), len(ids), dtype=torch.bool)
    bias = objective.attention_bias(sees, torch.float32)
    with torch.no_grad():
        hidden = objective.hidden_states(second.average, torch.tensor([ids]), bias)
        expected = second.average.logits(hidden[0])
    torch.testing.assert_close(llm.forward(ids), expected, atol=0.05, rtol=0.01)
    for config in (
        DecodeConfig(decoder="vanilla", max_new_tokens=32),
        DecodeConfig(decoder="fast-dllm", max_new_tokens=32),
        DecodeConfig(decoder="d2f", max_new_tokens=32, attention="block"),
        DecodeConfig(decoder="lopa", max_new_tokens=32, branches=3),
    ):
        text = llm.generate(second.evaluation.problems["words"][0].prompt, config).text
        assert "####" in text


def test_losses_are_those_of_shifted_rows() -> None:
    """Position p is predicted by row p − 1, under block attention as the engine computes it."""
    config = replace(FAMILY.shapes["dream-tiny"], layers=2)
    model = dummy(config, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    tokens = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    blocks = torch.where(torch.arange(40) < 8, -1, (torch.arange(40) - 8) // 16)
    sees = (blocks[None, :] <= blocks[:, None]).expand(2, -1, -1)
    with torch.no_grad():
        bias = objective.attention_bias(sees, torch.float32)
        losses = objective.token_losses(model, tokens, tokens, bias)
    assert losses.shape == (2, 39)
    from lopa.runner.raw_logits import raw_logits

    for row in range(2):
        logits = raw_logits(model, tokens[row].tolist(), "block", 8, 16)
        expected = [-logits[p - 1].log_softmax(0)[tokens[row, p]] for p in range(1, 40)]
        torch.testing.assert_close(losses[row], torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.engine
def test_parts_and_fallbacks_give_the_same_gradient(tmp_path: Path) -> None:
    """A batch in parts, after running out of memory, and after a compilation that failed."""
    trainer = Trainer(smoke(), out=tmp_path, minutes=1, device="cpu")
    plain = trainer.forward

    def too_large(*arguments: Any) -> torch.Tensor:
        if len(arguments[1]) > 8:
            raise torch.OutOfMemoryError("made up")
        return plain(*arguments)

    def broken(*arguments: Any) -> torch.Tensor:
        plain(*arguments).backward()  # type: ignore[no-untyped-call]
        raise RuntimeError("made up")

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        trainer.model.zero_grad()
        return found

    try:
        trainer.pool.wait()
        noisy = trainer.batch()
        trainer.backward(noisy)
        whole = gradients()
        trainer.parts = 3
        trainer.backward(noisy)
        others = [gradients()]
        trainer.parts, trainer.forward = 1, too_large
        trainer.robust_backward(noisy)
        assert trainer.parts == 2
        others.append(gradients())
        trainer.compiled, trainer.forward = True, broken
        trainer.robust_backward(noisy)
        assert not trainer.compiled
        others.append(gradients())
    finally:
        trainer.close()
    for other in others:
        for ours, theirs in zip(whole, other, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.engine
def test_a_loss_that_is_not_a_number_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(smoke(), out=tmp_path, minutes=10, steps=12, device="cpu")
    original = trainer.advance
    broken = iter([False] * 4 + [True])

    def advance() -> torch.Tensor:
        if next(broken, False):
            with torch.no_grad():
                trainer.model.norm.weight.fill_(torch.nan)
        return original()

    trainer.advance = advance  # type: ignore[method-assign]
    try:
        assert trainer.run()
    finally:
        trainer.close()
    assert (trainer.step, trainer.recoveries, trainer.caution) == (12, 1, 0.5)
    assert all(p.isfinite().all() for p in trainer.average.parameters())


def test_rows_that_do_not_fit_are_dropped() -> None:
    built = train(["ab cd", "12 34"], 300)
    packed, dropped = pack(
        built, [("ab", "cd" * 15, 0), ("ab", "1" * 32, 1), ("ab", "1" * 31, 1)], 40
    )
    assert dropped == 1  # 32 digits and an end of text need two blocks
    tokens, prompt, answer, task = unpack(torch.from_numpy(packed))
    assert prompt.tolist() == [1, 1]
    assert answer[1] == 31
    assert task.tolist() == [0, 1]
    assert (tokens[1, 32:] == 0).all()
    assert built.decode(tokens[1, 1:32].tolist()) == "1" * 31


def test_digits_stand_alone_and_text_comes_back() -> None:
    built = train(["12 + 34 = 46\n    return x1", "a 46 b 46 c 46 d 46"], 400)
    text = "46 + 1234\n    x46 é"
    ids = built.encode(text).ids
    pieces = [built.decode([i]) for i in ids]
    assert all(piece.isdigit() <= (len(piece) == 1) for piece in pieces)
    assert built.decode(ids) == text


def test_rate_follows_the_clock() -> None:
    optim = Optim(warmup=10, cooldown=0.5)
    assert schedule.factor(0, 0.0, optim) == pytest.approx(0.1)
    assert schedule.factor(100, 0.5, optim) == 1.0
    assert schedule.factor(100, 0.75, optim) == pytest.approx(0.5)
    assert schedule.factor(100, 1.2, optim) == 0.0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimiser(name: str) -> None:
    model = Transformer(replace(FAMILY.shapes["dream-tiny"], layers=1))
    found = schedule.optimizers(model, Optim(optimizer=name))
    held = [id(p) for o in found for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_settings_refuse_what_they_do_not_know(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting 'hiden'"):
        settings.load(None, ["model.hiden=3"])
    with pytest.raises(ConfigError, match="must be int"):
        settings.load(None, ["model.layers=many"])
    with pytest.raises(ConfigError, match="no section"):
        settings.load(None, ["nodel.layers=3"])
    with pytest.raises(ConfigError, match=r"none\.toml"):
        settings.load(tmp_path / "none.toml")
    assert settings.load(None, ["optim.lr=1"]).optim.lr == 1.0
    assert settings.load(SMOKE.with_name("tiny.toml")).data.length == 192


def test_human_solutions_are_cleaned_and_chosen(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}?", "answer": "a 1+1=<<1+1=2>>2\n#### 2"} for i in range(26)]
    with gzip.open(tmp_path / "gsm8k_train.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with gzip.open(tmp_path / "svamp.jsonl.gz", "wt") as file:
        row = {"question": "how many?", "equation": "( 76.0 - 25.0 )", "answer": 51.0}
        file.write(json.dumps(row))
    with gzip.open(tmp_path / "mbpp.jsonl.gz", "wt") as file:
        file.write("never read")
    pairs = human.read(tmp_path, 100)
    assert ("q1?\n", "a 1+1=2\n#### 2") in pairs
    assert {"q0?\n", "q25?\n"}.isdisjoint(prompt for prompt, _ in pairs)  # held out
    assert pairs[-1] == ("how many?\n", "76 - 25 = 51\n#### 51")
    assert len(human.read(tmp_path, 10)) == 10
    with pytest.raises(LopaError, match="give their folder"):
        human.read(tmp_path / "missing", 100)


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--config", str(SMOKE), "--resume"]) == 1
    assert "leave --resume out" in capsys.readouterr().err
    where = ["--out", str(tmp_path), "--config", str(SMOKE), "--data", str(tmp_path / "x")]
    assert main(where) == 1
    assert "give their folder" in capsys.readouterr().err
