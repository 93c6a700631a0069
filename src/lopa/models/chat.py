"""Chat templates: the jinja2 program of a checkpoint that turns messages into one prompt text.

Imported only when a chat is rendered, so that importing lopa never imports jinja2.

Templates run in jinja2's immutable sandbox and under a budget of loop turns and calls, so a broken
or careless template ends in a PromptError instead of a hang. Non-goals: bounding a template's
memory, and tools, documents or content that is not plain text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lopa.errors import PromptError

MAX_STEPS = 1_000_000  # loop turns and calls in one render; real templates use some per message

_steps: ContextVar[Iterator[int]] = ContextVar("lopa_template_steps")


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
        token = _steps.set(itertools.count(1))
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
        except Exception as error:  # a template is a program: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the model's chat template failed: {reason}") from error
        finally:
            _steps.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every call a template makes counted (macros can recurse)."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step()
        return super().call(context, obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}`: marks training targets in some templates; its body is plain output."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["lopa_counted"] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    tree = environment.parse(source)
    # The sandbox bounds one range() but not loops inside loops: count the turns of all of them.
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "lopa_counted", [], [], None, None, lineno=loop.lineno)
    tree.set_environment(environment)
    return environment.from_string(tree)


def _step() -> None:
    if next(_steps.get()) > MAX_STEPS:
        raise OverflowError(f"more than {MAX_STEPS} loop turns and calls; mend the template")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
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
