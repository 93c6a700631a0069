"""Imports point one way, as docs/structure.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import lopa

SOURCE = Path(lopa.__file__).parent
# What each room may import, beside itself and the modules at the top.
MAY_IMPORT = {
    "grammar": set(),
    "decoding": {"grammar"},
    "tasks": set(),
    "models": set(),
    "kernels": {"models"},
    "runner": {"grammar", "kernels", "models"},
    "engine": {"decoding", "grammar", "kernels", "models", "runner"},
    "distributed": {"decoding", "engine", "grammar", "kernels", "models", "runner"},
    "bench": {"decoding", "distributed", "engine", "kernels", "models", "runner", "tasks"},
    "evaluation": {"decoding", "engine", "models", "tasks"},
}
MAY_IMPORT["studies"] = {*MAY_IMPORT, *MAY_IMPORT["bench"]}
MAY_IMPORT["serving"] = {"decoding", "distributed", "engine", "models", "runner", "tasks"}
MAY_IMPORT["cli"] = {*MAY_IMPORT}


def imported(path: Path) -> set[str]:
    """Rooms that a file imports from, type checking included."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "lopa":
                names = [f"lopa.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "lopa" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                rooms.add(parts[1])
    return rooms


def test_imports_point_one_way() -> None:
    rooms = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert rooms == set(MAY_IMPORT)
    wrong = [
        f"{path.relative_to(SOURCE)} imports {room}"
        for path in SOURCE.rglob("*.py")
        if (own := path.relative_to(SOURCE).parts[0]) in MAY_IMPORT
        for room in imported(path) - {own} - MAY_IMPORT[own]
    ]
    assert wrong == []


def test_the_modules_at_the_top_import_no_room() -> None:
    wrong = {path.name for path in SOURCE.glob("*.py") if imported(path)}
    assert wrong == {"__init__.py", "__main__.py"}  # which are what users import and run


def test_the_api_process_never_imports_torch() -> None:
    """Nor does it import what would: only the engine process loads a model."""
    heavy = {"runner", "kernels", "distributed", "decoding"}
    for path in (SOURCE / "serving" / "api").glob("*.py"):
        assert not imported(path) & heavy, path.name
