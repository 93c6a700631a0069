"""Requests made up from the server's own description of itself: none of them is a 5xx."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from serving_support import Server

pytestmark = pytest.mark.soak

CASES = int(os.environ.get("LOPA_SCHEMA_CASES", "2000"))


def test_made_up_requests(chat_folder: Path) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    small = ("--max-request-tokens", "64", "--block-size", "8", "--max-new-tokens", "8")
    statuses: dict[int, int] = {}
    with Server("--model", str(chat_folder), "--branches", "1", *small) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        found = [result.ok() for result in schema.get_all_operations()]
        # Nearly all of what there is to be said is said to the two endpoints that take bodies.
        for operation in found:
            for mode in GenerationMode:
                count = round(CASES * (0.26 if operation.method == "post" else 0.02))

                def ask(case: Any) -> None:
                    response = case.call(base_url=server.url, timeout=60)
                    statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                    assert response.status_code < 500, response.text

                make = settings(
                    max_examples=count,
                    phases=[Phase.generate],
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                )
                with suppress(Unsatisfiable):  # where there is nothing to get wrong
                    seed(1)(make(given(operation.as_strategy(mode))(ask)))()
        assert server.complete(max_tokens=1).status_code == 200
        assert not [line for line in server.lines if line["level"] == "error"]
    print(f"\nmade-up requests: {sum(statuses.values())}: {statuses}")
    assert sum(statuses.values()) >= CASES
    assert statuses[200] > CASES / 20
    assert statuses[400] > CASES / 5
