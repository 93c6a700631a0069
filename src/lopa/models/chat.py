"""Chat templates: the jinja2 program of a checkpoint that turns messages into one prompt text.

Imported only when a chat is rendered, so that importing lopa never imports jinja2.

Templates run in jinja2's immutable sandbox, which bounds neither time nor memory. So a render has a
budget of CPU time and of characters. Each loop turn, operator, filter, call and output looks at the
clock, and one that could make more than the budget is refused before it is done. Non-goals: tools,
documents or content that is not plain text.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from lopa.errors import PromptError

MAX_SECONDS = 1.0  # of this thread's CPU time in one render; real templates take milliseconds
MAX_SIZE = 50_000_000  # characters of all values that one render makes
MAX_SOURCE = 100_000  # characters of a template; real ones have some 10,000

# Filters that pass values on without making text of them; others are checked part by part.
_LAZY = {
    *("count", "d", "default", "first", "items", "last", "length", "list", "map"),
    *("reject", "rejectattr", "reverse", "select", "selectattr"),
}
_SLOW = ("format", "pprint", "sum", "urlize", "wordwrap")  # filters that no template needs
_PARTS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# A format that makes more than it is given: a width of four digits, or one among the arguments.
_WIDE = re.compile(
    r"\{[^{}]*:[^{}]*(\d{4}|\{)|%(\([^()]*\))?[-+ #_^.\d]*(\d{4}|\*)",
)

_budget: ContextVar[_Budget] = ContextVar("lopa_template_budget")


class _Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.size = MAX_SIZE

    def spend(self, size: int = 0) -> None:
        self.size -= size
        if self.size < 0:
            raise _too_large()
        if time.thread_time() > self.deadline:
            raise OverflowError(f"it takes more than {MAX_SECONDS} s; mend the template")


class ChatTemplate:
    """A checkpoint's template; `tokens` are the names it may use (bos_token and the like).

    Rendering is thread-safe. The source is compiled at the first render: a template that cannot be
    used is no reason to refuse a model whose user passes plain text.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = dict(tokens)
        self._compiled: Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The prompt text; PromptError, in one line, whatever goes wrong in the template."""
        token = _budget.set(_Budget())
        try:
            if self._compiled is None:
                self._compiled = _compile(self._source)
            return self._compiled.render(
                **self._tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                # Templates ask "tools is not none", which an undefined name would pass.
                tools=None,
                documents=None,
            )
        except _RefusalError as refusal:
            said = " ".join(str(refusal).split())
            raise PromptError(f"the model's chat template refuses this: {said}") from None
        except Exception as error:  # a template is a program: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the model's chat template failed: {reason}") from error
        finally:
            _budget.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with all that a template does on the budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, Macro):
            method = getattr(obj, "__wrapped__", obj)  # of str.format, which the sandbox wraps
            owner = getattr(method, "__self__", None)
            operands = (*args, *kwargs.values())
            if isinstance(owner, str) and "format" in method.__name__ and _WIDE.search(owner):
                raise _too_large()
            if isinstance(owner, str | bytes | int):
                _check(owner, *operands)
            else:
                _size(operands)
        return _spend(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check(left, right)
        elif operator == "**" and not (abs(left) < 2**64 and abs(right) < 64):
            raise _too_large()
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise _too_large()
            _check(left, right)
        return _spend(super().call_binop(context, operator, left, right))


class _Counted(NodeTransformer):
    """What the sandbox has no hook for becomes a filter: loops, `~`, and lists of all kinds.

    Text of the template becomes an output like any other.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter("lopa_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("lopa_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.Literal) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("lopa_made", node)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return node if node.ctx == "store" else self.visit_List(node)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno)


class _Namespace(Namespace):
    __repr__ = object.__repr__  # not all that it holds


class _Generation(Extension):
    """`{% generation %}`: marks training targets in some templates; its body is plain output."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE:
        raise OverflowError(f"it has more than {MAX_SOURCE} characters")
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        finalize=_output,
    )
    for name in _SLOW:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = _on_budget(function, name in _LAZY)
    environment.filters["lopa_counted"] = _counted
    environment.filters["lopa_concat"] = _concat
    environment.filters["lopa_made"] = _made
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    tree = _Counted().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _too_large() -> OverflowError:
    return OverflowError(f"it makes more than {MAX_SIZE} characters; mend the template")


def _size(value: Any) -> int:
    """Characters of a value as text, about; a part counts as often as it occurs."""
    total, stack = 1, [value]
    while stack:
        part = stack.pop()
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, dict):
            total += 16 * len(part)
            stack += (*part.keys(), *part.values())
        elif isinstance(part, _PARTS):
            total += 16 * len(part)
            stack += part
        elif isinstance(part, int):
            total += part.bit_length() // 3
        if total > MAX_SIZE:
            raise _too_large()
    return total


def _check(*operands: Any) -> None:
    """Refuse an operation whose result may be too large.

    At most it is as large as the product of its two largest operands: a repeat, a replacement, a
    width. A number counts as what it may be the number of.
    """
    sizes = sorted(16 * abs(o) if isinstance(o, int) else _size(o) for o in operands)
    if sizes and sizes[-1] * (sizes[-2] if len(sizes) > 1 else 1) > MAX_SIZE:
        raise _too_large()


def _spend(value: Any) -> Any:
    """Take a value that was made off the budget. Its parts are older: they were taken before."""
    shallow = isinstance(value, (dict, *_PARTS))
    _budget.get().spend(4 * len(value) if shallow else _size(value))
    return value


def _on_budget(function: Callable[..., Any], lazy: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        if not lazy:
            _check(*args, *kwargs.values())
        return _spend(function(*args, **kwargs))

    return filtered


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.get().spend()
        yield item


def _concat(parts: list[Any]) -> Any:
    _size(parts)
    return _spend("".join(map(str, parts)))


def _made(value: Any) -> Any:
    _size(value)
    return _spend(value)


@pass_context  # so that nothing is put out at compile time
def _output(_: Context, value: Any) -> Any:
    _budget.get().spend(_size(value))
    return value


class _RefusalError(TemplateError):
    """Raised by the template itself."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    if _WIDE.search(pattern):
        raise _too_large()
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes <, > and & for HTML, which a model has never seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
