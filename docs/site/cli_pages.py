"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from lopa.cli.main import app
from lopa.cli.serve import ENVIRONMENT


def command_line() -> str:
    """A page: every command with its arguments and options."""
    lines = [
        "# Command line",
        "",
        "Made from `lopa --help`. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 stopped.",
        f"Every option of `lopa serve` has an environment variable, `{ENVIRONMENT}_` and its name.",
        "",
    ]
    for name, command in _commands("lopa", typer.main.get_command(app)):
        lines += _section(name, command)
    return "\n".join(lines)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if name != "lopa":
        yield name, command
    for inner, found in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {inner}", found)


def _section(name: str, command: Any) -> list[str]:
    lines = [f"{'#' * len(name.split())} {name}", "", *_paragraphs(command.help or ""), ""]
    panels: dict[str, list[str]] = {}
    for param in command.params:
        if not param.hidden:
            panels.setdefault(_panel(param), []).append(_row(param))
    for panel, rows in panels.items():
        lines += [f"| {panel} | |", "|---|---|", *rows, ""]
    return lines


def _paragraphs(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _panel(param: Any) -> str:
    return param.rich_help_panel or ("Options" if param.opts[0].startswith("-") else "Arguments")


def _row(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    value = f" *{param.metavar}*" if param.metavar else ""
    shown = param.default if param.show_default and not param.required else None
    default = "" if shown in (None, False, "") else f" Default: `{shown}`."
    return f"| {names}{value} | {param.help or ''}{default} |".replace("|auto", "\\|auto").replace(
        "\\[", "["
    )
