"""The live view of a run: tokens as they are filled, and the branches that competed for them.

The model's text is never treated as markup, and control characters are made visible.
"""

from __future__ import annotations

import colorsys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lopa.cli.terminal import stderr_console, visible

if TYPE_CHECKING:
    from lopa.engine.output import Event
    from lopa.engine.session import Session
    from lopa.types import Branch, Fill, Lookahead, Round

MASK = "▁"
_EOS = "∎"
_BLOCK_EDGE = "│"
_AHEAD = Style(color="cyan", underline=True)
_MERGED = Style(color="magenta", underline=True)
_EDITED = Style(color="yellow", underline=True)
_OF_KIND = {"merged": _MERGED, "edited": _EDITED}
_FRAME_SECONDS = 1 / 30  # between refreshes
_MAX_BRANCHES = 9  # rows of the table
_LOW_CONFIDENCE = 0.3  # at this and below everything is equally red
_NAMED = 2  # lookahead tokens of a branch that are shown; of more there is the number
_NAME_WIDTH = 9  # of each of them, quotes included
# Widths of the table's columns. They are fixed, so that nothing moves from round to round.
_COLUMNS = {"": 1, "place": 5, "lookahead": 23, "p": 5, "anchor": 12, "score": 7, " ": 29}
_GAP = 2
_BAR_WIDTH = 24


def confidence_style(max_prob: float) -> Style:
    """Red through yellow to green."""
    share = min(max((max_prob - _LOW_CONFIDENCE) / (1 - _LOW_CONFIDENCE), 0.0), 1.0)
    red, green, blue = (round(255 * x) for x in colorsys.hsv_to_rgb(share / 3, 0.65, 0.92))
    return Style(color=f"rgb({red},{green},{blue})")


@dataclass(slots=True)
class Counters:
    """Counters of a run so far; tokens are counted up to EOS."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tpf(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def text(self, gap: str = "   ") -> Text:
        pairs = (
            ("round", f"{self.rounds}"),
            ("tokens", f"{self.tokens}"),
            ("TPF", f"{self.tpf:.2f}"),
            ("tokens/s", f"{self.tokens_per_second:.0f}"),
        )
        return Text(gap).join(
            Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in pairs
        )


class OutputView:
    """The new tokens of a run so far, each coloured by its confidence."""

    def __init__(
        self,
        piece: Callable[[int], str],  # how a token is shown
        *,
        prompt: int,  # its length, where the output begins
        mask_id: int,
        eos_ids: Collection[int],
        block_size: int | None,  # None: no blocks
    ) -> None:
        self._piece = piece
        self._prompt = prompt
        self._mask_id = mask_id
        self._eos_ids = eos_ids
        self._block_size = block_size
        self._tokens: list[int] = []
        self._styles: dict[int, Style] = {}  # by index among the new tokens
        self._fresh: set[int] = set()  # filled in the last round
        self._next: set[int] = set()  # where the next round may look ahead
        self._committed = 0
        self.counters = Counters()
        self.done = False

    @classmethod
    def of(cls, session: Session) -> OutputView:
        decoder, tokenizer = session.decoder, session.tokenizer
        canvas = session.config.window == "canvas"
        return cls(
            tokenizer.piece if tokenizer else lambda token: f"{token} ",
            prompt=decoder.prompt,
            mask_id=decoder.mask_id,
            eos_ids=decoder.eos_ids,
            block_size=None if canvas else session.config.block_size,
        )

    def update(self, event: Event) -> None:
        record = event.round
        self._tokens = event.tokens
        self._fresh = {fill.position - self._prompt for fill in record.fills}
        for ahead in record.branches[record.winner].lookaheads:
            self._fresh.add(ahead.position - self._prompt)
            self._styles[ahead.position - self._prompt] = _AHEAD
        for fill in record.fills:  # one may replace the lookahead token
            style = _OF_KIND.get(fill.kind) or confidence_style(fill.max_prob)
            self._styles[fill.position - self._prompt] = style
        self._next = {ahead.position - self._prompt for draft in record.spawned for ahead in draft}
        self._committed = record.cached + record.committed - self._prompt
        self.counters.rounds += 1
        self.counters.seconds += record.seconds
        if event.output is not None:
            self.done = True
            self._tokens = event.output.token_ids
            self.counters.tokens = event.output.tokens
        else:
            self.counters.tokens = self._filled()

    def show(self, token: int, newline: str = "↵") -> str:
        return visible(self._piece(token), newline)

    def name(self, token: int) -> str:
        """The token in quotes; EOS tokens have long names."""
        return f"‘{_EOS if token in self._eos_ids else self.show(token)}’"

    def place(self, position: int) -> int:
        """Index among the new tokens."""
        return position - self._prompt

    def text(self) -> Text:
        text = Text(no_wrap=False, overflow="fold")
        for index, token in enumerate(self._tokens):
            if self._block_size and index and index % self._block_size == 0:
                text.append(_BLOCK_EDGE, "blue")
            piece, style = self._cell(index, token)
            word = piece.lstrip(" ")
            text.append(" " * (len(piece) - len(word)))  # unstyled: most pieces begin with a space
            text.append(word, style)
        return text

    def lines(self, console: Console, width: int, count: int) -> Text:
        """The last `count` lines of the text at this width, where tokens are filled."""
        wrapped = self.text().wrap(console, width, overflow="fold")
        return Text("\n").join(wrapped[-count:])

    def _cell(self, index: int, token: int) -> tuple[str, Style]:
        if token == self._mask_id:
            return MASK, Style(color="cyan") if index in self._next else Style(dim=True)
        if token in self._eos_ids:
            return _EOS, Style(dim=True)
        style = self._styles.get(index, Style())
        if self.done:
            pass  # all tokens are final
        elif index in self._fresh:
            style += Style(bold=True, reverse=True)
        elif index < self._committed:
            style += Style(dim=True)
        else:
            style += Style(bold=True)
        return self.show(token, "↵\n"), style

    def _filled(self) -> int:
        count = 0
        for token in self._tokens:
            count += token != self._mask_id
            if token in self._eos_ids:
                break
        return count


class Watch:
    """Shows a session's events on a console: live on a terminal, else one line per round."""

    def __init__(self, session: Session, console: Console | None = None) -> None:
        self._console = console or stderr_console()
        self._view = OutputView.of(session)
        self._title = session.config.decoder
        self._rows = min(session.config.most_branches + 1, _MAX_BRANCHES)
        self._round: Round | None = None
        self._live: Live | None = None
        self._drawn = 0.0
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, auto_refresh=False)

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: Event) -> None:
        self._round = event.round
        self._view.update(event)
        if self._live is None:
            self._console.print(self._line(event.round), soft_wrap=True)
        elif event.output is not None or time.monotonic() - self._drawn > _FRAME_SECONDS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Two lines of frame, one of counters, one left empty so that nothing scrolls.
        table = self._branches(options.max_width - _GAP)
        height = console.height - 4 - (self._rows + 1 if table else 0)
        yield Panel(
            self._view.lines(console, options.max_width - 4, max(height, 1)),
            title=self._title,
            title_align="left",
            subtitle=_legend(),
            subtitle_align="right",
            border_style="dim",
        )
        yield Padding(
            Group(*([table] if table else []), self._view.counters.text()), (0, 0, 0, _GAP)
        )

    def _branches(self, width: int) -> Table | None:
        """The branches of the last round, in rank order, the winner marked.

        p: the lookahead token's probability when it was placed. anchor: what the anchor of this
        round predicts there, its probability if that is the same token, else the other token.
        """
        record = self._round
        if record is None or self._rows == 1 or self._view.done:
            return None
        table = Table(box=None, header_style="dim", padding=(0, _GAP, 0, 0))
        widths = _widths(width)
        for name, own in widths.items():
            justify: JustifyMethod = "right" if name in ("place", "p", "score") else "left"
            table.add_column(name, justify=justify, width=own, no_wrap=True)
        scores = [branch.score for branch in record.branches]
        low, high = min(scores), max(scores)
        # With more branches than rows, the best scored are shown; the winner is one of them.
        best = sorted(range(len(scores)), key=lambda i: (i != record.winner, -scores[i]))
        shown = sorted(best[: self._rows])
        for number in shown:
            branch = record.branches[number]
            won = number == record.winner
            share = (branch.score - low) / (high - low) if high > low else 1.0
            colour = "green" if won else "grey50"
            bar = ProgressBar(
                total=1.0,
                completed=0.05 + 0.95 * share,  # the worst still has a short bar
                width=min(_BAR_WIDTH, widths[" "]),
                style="grey15",
                complete_style=colour,
                finished_style=colour,
            )
            table.add_row(
                Text("▸" if won else " ", "green"),
                *self._lookahead(branch),
                Text(f"{branch.score:.3f}", "bold green" if won else "dim"),
                Text(branch.refused, "dim") if branch.refused else bar,
            )
        for _ in range(self._rows - len(shown)):  # so that the lines below do not move
            table.add_row("")
        return table

    def _lookahead(self, branch: Branch) -> tuple[Text, Text, Text, Text]:
        """Where the first of its tokens is, the tokens, their probability, and the anchor's."""
        ahead = branch.lookaheads
        if not ahead:
            return Text(), Text("anchor", "dim"), Text(), Text()
        others = [o.token for a, o in zip(ahead, branch.anchor, strict=True) if o.token != a.token]
        return (
            Text(f"+{self._view.place(ahead[0].position)}", "dim"),
            self._names([a.token for a in ahead], _NAMED, "cyan"),
            _least([a.max_prob for a in ahead]),
            self._names(others, 1, "dim red")
            if others
            else _least([o.max_prob for o in branch.anchor]),
        )

    def _names(self, tokens: list[int], count: int, style: str) -> Text:
        """The first of the tokens, and how many more there are."""
        names = [Text(self._view.name(token)) for token in tokens[:count]]
        for name in names if len(tokens) > 1 else ():
            name.truncate(_NAME_WIDTH, overflow="ellipsis")
        more = [Text(f"+{len(tokens) - count}")] if len(tokens) > count else []
        text = Text(" ").join([*names, *more])
        text.stylize(style)
        return text

    def _line(self, record: Round) -> Text:
        """A round in one line of plain text."""
        ahead = record.branches[record.winner].lookaheads
        named = " ".join(_named(self._view, each) for each in ahead)
        won = f"lookahead {named}" if ahead else "anchor"
        parts = [f"round {record.index:>4}"]
        if len(record.branches) > 1:
            refused = sum(bool(branch.refused) for branch in record.branches)
            merged = sum(fill.kind == "merged" for fill in record.fills)
            counts = (
                f"1 of {len(record.branches)}",
                f"{refused} refused" if refused else "",
                f"{merged} merged" if merged else "",
            )
            parts.append(", ".join([won, *filter(None, counts)]))
        if edited := sum(fill.kind == "edited" for fill in record.fills):
            parts.append(f"{edited} edited")
        parts.append(f"{self._view.counters.tokens} tokens")
        parts.append(" ".join(_named(self._view, fill) for fill in record.fills) or "no fill")
        return Text("  ".join(parts))


def _widths(width: int) -> dict[str, int]:
    """Of the table's columns, on a console of this width."""
    found = dict(_COLUMNS)
    # What gives way where it is narrow, and to what width, in turn.
    for name, least in (("lookahead", 15), (" ", 10), ("lookahead", 10)):
        missing = sum(found.values()) + _GAP * len(found) - width
        found[name] = max(least, found[name] - max(0, missing))
    return found


def _least(probabilities: list[float]) -> Text:
    """The probability; of several the least."""
    least = min(probabilities)
    several = "≥" if len(probabilities) > 1 else ""
    return Text(f"{several}{least:.2f}", confidence_style(least))


def _named(view: OutputView, placed: Fill | Lookahead) -> str:
    return f"+{view.place(placed.position)}‘{view.show(placed.token)}’"


def _legend() -> Text:
    scale = [
        ("█", confidence_style(_LOW_CONFIDENCE + (1 - _LOW_CONFIDENCE) * i / 4)) for i in range(5)
    ]
    return Text.assemble(
        " confidence: low ",
        *scale,
        " high  ",
        ("lookahead", _AHEAD),
        "  ",
        ("merged", _MERGED),
        "  ",
        (MASK, "dim"),
        " mask ",
        style="not dim",
    )
