"""The files of deploy/ name what is there: options, paths, targets, metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
import yaml
from serving_support import Server

from lopa.cli.main import app
from lopa.cli.serve import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_every_file_is_read() -> None:
    files = [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    assert len(files) == 6
    for file in files:
        assert all(read(str(file.relative_to(DEPLOY))))


def test_every_metric_exists(server: Server) -> None:
    """Of the dashboard and of the alerts; a histogram has three names, a counter ends in total."""
    server.complete(max_tokens=1)
    text = server.http.get("/metrics").text
    have = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    have |= set(re.findall(r"^(lopa_\w+)[{ ]", text, re.MULTILINE))
    for file in ("grafana/dashboards/lopa.json", "alerts.yml"):
        asked = set(re.findall(r"\blopa_\w+", (DEPLOY / file).read_text()))
        assert asked
        assert asked <= have, file


def test_the_dashboard() -> None:
    board = json.loads((DEPLOY / "grafana/dashboards/lopa.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 10
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == source["uid"]
            assert target["expr"].count("(") == target["expr"].count(")")
    documented = (ROOT / "docs" / "serving.md").read_text()
    for metric in set(re.findall(r"lopa_\w+", json.dumps(board))):
        assert re.sub(r"_(sum|count|bucket)$", "", metric) in documented, metric


def test_every_variable_is_an_option() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {f"{ENVIRONMENT}_{param.name.upper()}" for param in serve.params}
    container = read("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    given = {variable["name"] for variable in container["env"]}
    given |= set(read("compose.yaml")[0]["services"]["lopa"]["environment"])
    given |= set(re.findall(r"\bLOPA_\w+", (DEPLOY / "Dockerfile").read_text()))
    given |= set(re.findall(r"\bLOPA_\w+", (ROOT / "docs" / "deploying.md").read_text()))
    assert given - options == {"LOPA_CACHE_DIR"}  # of every command


def test_probes(server: Server) -> None:
    container = read("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server.http.get(container[probe]["httpGet"]["path"]).status_code == 200
    assert "/health/live" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_has_what_it_copies() -> None:
    """And the file of what Docker may see lets it."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {
        word for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M) for word in line.split()
    }
    assert copied == seen
    assert all((ROOT / name).exists() for name in copied)
    targets = set(re.findall(r" AS (\w+)", dockerfile)) - {"base"}
    assert targets == set(re.findall(r"--target (\w+)", dockerfile)) == {"cpu", "cuda"}
    assert read("compose.yaml")[0]["services"]["lopa"]["build"]["target"] == "${LOPA_TARGET:-cpu}"


def test_prometheus_asks_by_a_name_that_the_server_has() -> None:
    (scrape,) = read("prometheus.yml")[0]["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    service = read("compose.yaml")[0]["services"]["lopa"]
    assert target == f"{service['hostname']}:8000"
