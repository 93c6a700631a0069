"""The modules that read: events in any chunks, metrics, tokens made visible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page
from synthetic import large_trace

OpenPage = Callable[..., Page]


def test_events_in_any_chunks(open_page: OpenPage) -> None:
    found = open_page().evaluate(
        """async () => {
          const { EventReader } = await import("/playground/api.js");
          const text = 'data: {"a": 1}\\r\\n\\r\\n: still here\\n\\n' +
            "data: x\\ndata: y\\n\\ndata: [DONE]\\n\\n";
          const answers = new Set();
          for (let size = 1; size <= text.length; size++) {
            const reader = new EventReader();
            const events = [];
            for (let i = 0; i < text.length; i += size) {
              events.push(...reader.push(text.slice(i, i + size)));
            }
            answers.add(JSON.stringify(events));
          }
          return [...answers];
        }"""
    )
    assert [json.loads(answer) for answer in found] == [['{"a": 1}', "x\ny", "[DONE]"]]


def test_metrics_and_visible_text(open_page: OpenPage) -> None:
    found = open_page().evaluate(
        """async () => {
          const { parseMetrics } = await import("/playground/engine.js");
          const { visible } = await import("/playground/dom.js");
          const text = '# HELP a b\\na_total 3.0\\nb{le="+Inf",x="q\\\\"}"} 4e2\\n';
          const tokens = ["\\n", "  ", "\\u202eabc", "a\\u0000"];
          return [Object.fromEntries(parseMetrics(text)), tokens.map(visible)];
        }"""
    )
    assert found == [
        {
            "a_total": [{"labels": {}, "value": 3}],
            "b": [{"labels": {"le": "+Inf", "x": 'q"}'}, "value": 400}],
        },
        ["↵", "␣␣", "\\u202eabc", "a␀"],
    ]


def test_landscapes_stand_where_the_masks_are(open_page: OpenPage, tmp_path: Path) -> None:
    made = large_trace(tmp_path / "large.jsonl")
    counts = open_page().evaluate(
        """async (text) => {
          const { readTrace, landscape } = await import("/playground/trace.js");
          const run = readTrace(text);
          return run.rounds.map((record, i) => {
            const { places } = run.masksBefore(i + 1);
            return record.branches.map((branch) => [
              landscape(branch).length,
              places.filter((p) => p < branch.end && p !== branch.lookahead?.position).length,
            ]);
          });
        }""",
        (tmp_path / "large.jsonl").read_text(),
    )
    assert counts == [[[b.masks, b.masks] for b in record.branches] for record in made.rounds]
