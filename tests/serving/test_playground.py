"""The page as a server sends it: files, headers, and what it is told of the settings."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lopa import LLM, DecodeConfig
from lopa.config import AcceptName, DecoderName, with_waiting_branches
from lopa.errors import ConfigError
from lopa.presets import PRESETS
from lopa.serving import playground
from lopa.serving.config import EngineConfig
from lopa.serving.engine_process.worker import Worker
from lopa.serving.playground.info import describe

STATIC = Path(playground.__file__).parent / "static"
ENGINE: dict[str, Any] = {"settings": DecodeConfig().settings()}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(playground.router)
    app.state.model = "tiny"
    app.state.backend = SimpleNamespace(engine=ENGINE)
    return TestClient(app)


def test_every_file_is_served_as_what_it_is(client: TestClient) -> None:
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
    names = [path.name for path in STATIC.iterdir()]
    assert "index.html" in names
    for name in names:
        response = client.get(f"/playground/{name}")
        assert response.status_code == 200
        assert response.content == (STATIC / name).read_bytes()
        kind = kinds.get(Path(name).suffix, "image/svg+xml")
        assert response.headers["content-type"].startswith(kind)
        assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").content == (STATIC / "index.html").read_bytes()


def test_policy_and_caching(client: TestClient) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.headers["cache-control"] == "no-cache"
    tag = response.headers["etag"]
    again = client.get("/", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head("/").status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2finfo.py", "__init__.py", "../info.py", "%00"])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/playground/{name}").status_code == 404


def test_the_page_asks_nobody_else() -> None:
    for path in STATIC.iterdir():
        text = path.read_text()
        found = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert found <= {"http://www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?! [^>]*src=)|\son\w+=|<style|\sstyle=", page)


def test_modules_import_what_is_there() -> None:
    names = {path.name for path in STATIC.iterdir()}
    for path in STATIC.glob("*.js"):
        for module in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert module in names, (path.name, module)


def test_a_model_that_is_loading(client: TestClient) -> None:
    client.app.state.backend = SimpleNamespace(engine={})  # type: ignore[attr-defined]
    assert client.get("/playground/info").status_code == 503
    assert client.get("/").status_code == 200


def test_replicas_say_nothing_of_themselves(client: TestClient) -> None:
    client.app.state.backend = SimpleNamespace()  # type: ignore[attr-defined]
    assert client.get("/playground/info").json()["defaults"] == DecodeConfig().settings()


def test_settings_are_those_of_the_config(client: TestClient) -> None:
    info = client.get("/playground/info").json()
    assert info["model"] == "tiny"
    known = {f.name for f in fields(DecodeConfig)} - {"schema", "regex"}
    assert {field["name"] for field in info["fields"]} == known
    for field in info["fields"]:
        assert field["line"]
        assert (field["kind"] == "choice") == ("choices" in field)
    # The form knows every kind of field by name, but for plain numbers.
    known = re.findall(r'kind === "(\w+)"', (STATIC / "settings.js").read_text())
    assert {field["kind"] for field in info["fields"]} == {*known, "number"}
    assert set(info["presets"]) == set(PRESETS)
    for name, values in info["presets"].items():
        assert DecodeConfig(**values) == DecodeConfig.preset(name)
    for contestant in info["contestants"]:
        DecodeConfig(**contestant)
    assert all(example["prompt"] for example in info["examples"])


def test_each_decoder_has_its_own_options() -> None:
    info = describe("tiny", ENGINE)
    assert {variant["decoder"] for variant in info["variants"]} == set(get_args(DecoderName))
    for variant in info["variants"]:
        deciding = ("decoder", "window", "accept", "score")
        chosen = {k: v for k in deciding if (v := variant[k]) is not None}
        settings = DecodeConfig(**chosen).settings()
        assert variant["defaults"].items() <= settings.items()
        # What is offered may be given; what is not, may not.
        assert DecodeConfig(**{**variant["defaults"], **chosen}) == DecodeConfig(**chosen)
        others: dict[str, Any] = {"branches": 2, "score_window": 3, "block_size": 16}
        others |= {"agreement": 0.4, "merge": True}
        for name, other in others.items():
            if name in variant["used"]:
                DecodeConfig(**chosen, **{name: other})
            else:
                with pytest.raises(ConfigError):
                    DecodeConfig(**chosen, **{name: other})


def test_the_server_s_defaults_are_shown() -> None:
    usual = DecodeConfig(branches=3, threshold=0.8, max_new_tokens=64).settings()
    info = describe("other", {"settings": usual, "decoders": ["d2f", "lopa"]})
    assert {variant["decoder"] for variant in info["variants"]} == {"d2f", "lopa"}
    for variant in info["variants"]:
        if "threshold" in variant["used"]:
            assert variant["defaults"]["threshold"] == 0.8
        assert variant["defaults"].get("branches", 3) == 3
        assert variant["defaults"]["max_new_tokens"] == 64
    assert [c["decoder"] for c in info["contestants"]] == ["d2f", "lopa", "lopa"]


def test_another_score_than_the_server_s_is_shown_with_its_own_weight() -> None:
    usual = DecodeConfig(score="mean", branches=3).settings()
    info = describe("other", {"settings": usual, "decoders": ["lopa"]})
    for variant in info["variants"]:
        if variant["accept"] == "exact":
            assert "creation_weight" not in variant["used"]
            continue
        own = DecodeConfig(accept=variant["accept"], score=variant["score"])
        assert variant["defaults"]["creation_weight"] == own.creation_weight
    first = info["variants"][0]
    assert (first["accept"], first["score"]) == (usual["accept"], "mean")


def test_how_branches_are_accepted_decides_the_options() -> None:
    info = describe("tiny", ENGINE)
    fields = {field["name"]: field for field in info["fields"]}
    assert fields["accept"]["choices"] == list(get_args(AcceptName))
    assert fields["agreement"]["kind"] == fields["agreement_ahead"]["kind"] == "number"
    used = {v["accept"]: set(v["used"]) for v in info["variants"] if v["decoder"] == "lopa"}
    assert {"agreement", "agreement_ahead", "score"} <= used["agreed"]
    assert used["agreed"] - used["score"] == {"agreement", "agreement_ahead", "merge"}
    assert not used["exact"] & {"agreement", "merge", "score", "creation_weight", "lookahead_eos"}
    assert fields["merge"]["kind"] == "bool"


@pytest.mark.parametrize(
    "given",
    [
        {"agreement": 0.2, "merge": False},
        {"score": "mean", "lookahead_floor": 0.3, "threshold": 0.8},
        {"accept": "score", "lookahead_eos": True, "creation_weight": 0.1},
        {"accept": "exact", "branches": 3},
        {"decoder": "d2f", "threshold": 0.8},
        {"decoder": "fast-dllm", "threshold": 0.8},
    ],
)
@pytest.mark.parametrize("accept", [None, *get_args(AcceptName)])
def test_what_the_page_shows_is_what_the_engine_decodes_with(
    given: dict[str, Any], accept: AcceptName | None
) -> None:
    """Of the server's own settings, another way to accept keeps what it can use."""
    worker = worker_with(**given)
    info = describe("other", {"settings": worker._usual.settings()})
    asked: dict[str, Any] = {"decoder": "lopa"} | ({"accept": accept} if accept else {})
    variants = [v for v in info["variants"] if v["decoder"] == "lopa"]
    shown = next(v for v in variants if v["accept"] == (accept or variants[0]["accept"]))
    config = DecodeConfig(**worker._with_defaults(asked))
    assert shown["defaults"].items() <= config.settings().items()
    assert (shown["window"], shown["accept"]) == (config.window, config.accept)


def worker_with(**given: Any) -> Any:
    """The part of an engine process that knows what the server was started with."""
    usual = DecodeConfig(**given)
    usual = DecodeConfig(**with_waiting_branches(given, usual.decoder, None))
    worker = Worker.__new__(Worker)
    worker.config, worker._usual = EngineConfig(model="other", decoding=given), usual
    return worker


@pytest.mark.parametrize(
    ("decoding", "preset", "options", "branches"),
    [
        ({}, None, {}, "auto"),
        ({}, None, {"accept": "exact"}, "auto"),
        ({}, None, {"branches": 3}, 3),
        ({}, None, {"branches": 0}, 0),
        ({"branches": 2}, None, {}, 2),
        ({"branches": 2}, None, {"branches": "auto"}, "auto"),
        ({}, "gsm8k", {}, 14),
        ({}, "gsm8k", {"branches": "auto"}, "auto"),
        ({}, None, {"decoder": "d2f"}, 0),
        ({"decoder": "d2f"}, None, {}, 0),
        ({"decoder": "d2f"}, None, {"decoder": "lopa"}, "auto"),
    ],
)
def test_who_decides_how_many_branches(
    decoding: dict[str, Any], preset: str | None, options: dict[str, Any], branches: object
) -> None:
    llm = LLM("dummy:dream-tiny", device="cpu")
    config = EngineConfig(model="dummy:dream-tiny", preset=preset, decoding=decoding)
    worker = Worker(llm, config, None)  # type: ignore[arg-type]
    given = worker._with_defaults(options)
    assert llm.decode_config(preset, **given).branches == branches
    if not options:
        assert worker._usual.branches == branches


@pytest.mark.parametrize("given", [{"agreement": 0.2}, {"score": "mean"}, {"merge": False}])
@pytest.mark.parametrize(
    "changes",
    [{"accept": "score"}, {"accept": "exact"}, {"early_stop": False}, {"accept": "agreed"}],
)
def test_a_request_may_change_how_branches_are_accepted(
    given: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = DecodeConfig(**worker_with(**given)._with_defaults(changes))
    if changes == {"accept": "agreed"}:  # it is so anyway
        assert config == DecodeConfig(branches="auto", **given)
    else:
        assert config == DecodeConfig(branches="auto", **changes)


def test_a_request_that_names_what_is_usual_changes_nothing() -> None:
    given = {"window": "blocks", "cache": "none", "score": "mean", "creation_weight": 0.3}
    worker = worker_with(**given)
    for name in ("decoder", "window", "score", "accept", "attention", "early_stop"):
        settings = worker._with_defaults({name: getattr(worker._usual, name)})
        assert DecodeConfig(**settings) == worker._usual
    assert DecodeConfig(**worker._with_defaults({"decoder": "d2f"})) == DecodeConfig(decoder="d2f")


def test_a_server_that_accepts_exactly() -> None:
    """Another way to accept has the usual score then."""
    usual = DecodeConfig(accept="exact").settings()
    variants = describe("other", {"settings": usual, "decoders": ["lopa"]})["variants"]
    assert variants[0]["accept"] == "exact"
    for accept in ("score", "agreed"):
        first = next(v for v in variants if v["accept"] == accept)
        assert first["score"] == DecodeConfig(accept=accept).score  # type: ignore[arg-type]
