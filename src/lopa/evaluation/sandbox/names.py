"""The names that tests use: which are theirs, Python's, or the answer's."""

from __future__ import annotations

import ast
import builtins
import sys
from importlib import import_module
from typing import Any

from lopa.evaluation.sandbox.link import Link


class Names(dict[str, Any]):
    """The namespace of the tests: what they do not define is Python's, or else the answer's."""

    def __init__(self, tests: ast.AST, link: Link, given: dict[str, Any], entry_point: str) -> None:
        super().__init__(given)
        self._link = link
        loaded: set[str] = set()
        bound: set[str] = set()
        owners: set[str] = set()
        for node in ast.walk(tests):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owners.add(node.value.id)
        self._modules = owners & sys.stdlib_module_names  # `math.isclose`: not the answer's
        own = loaded - bound - self._modules - given.keys()
        python = {name for name in own if hasattr(builtins, name)}
        # A function under test may have the name of one of Python's, if it is the only one that is
        # tested. Else an answer that defines `set` or `all` would decide what they mean.
        under_test = {entry_point} if entry_point else set() if own - python else python
        self._python = python - under_test

    def __missing__(self, name: str) -> Any:
        if name in self._modules:
            return import_module(name)
        if name in self._python or name.startswith("__"):
            raise KeyError(name)
        try:
            return self._link.name(name)
        except KeyError:
            if hasattr(builtins, name):
                raise
            raise NameError(f"name {name!r} is not defined") from None
