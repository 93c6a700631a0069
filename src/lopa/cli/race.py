"""`lopa race`: the same prompt with several decoders, one round of each in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from lopa.cli.model import (
    check_question,
    encode,
    example,
    load,
    output_text,
    prepare_cost,
    read_prompt,
)
from lopa.cli.options import (
    ChatOption,
    DecodeOptions,
    JsonOption,
    ModelOptions,
    with_decoding,
    with_model,
)
from lopa.cli.progress import Progress, start_torch
from lopa.cli.terminal import label, print_note, stderr_console, visible
from lopa.config import DecodeConfig, DecoderName, WindowName, options_of
from lopa.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from lopa.cli.watch import OutputView
    from lopa.decoding.round_cost import RoundCost
    from lopa.engine.llm import LLM
    from lopa.engine.output import Event, Output
    from lopa.engine.session import Session
    from lopa.models.config import ModelConfig

_DECODERS = get_args(DecoderName)
_NEW_TOKENS = 96  # at most, of each decoder: a comparison need not be long
_TIE = 0.05  # share of the tokens per second that a clock may be wrong by
_FRAME_SECONDS = 1 / 20
_LANE_LINES = 7  # of text in the live view, at most
_TEXT_LINES = 8  # of text in the table, at most; --json has all of it
# (tokens, seconds) of one row and of eight on one H200 in bf16: of rounds of answers, and by
# measurements/h200/round_cost_7b_bf16.json
H200_TINY = ((64, 0.503e-3), (512, 0.755e-3))
H200_7B = ((64, 4.10e-3), (512, 11.87e-3))


@with_decoding("decoder", max_new_tokens=str(_NEW_TOKENS))
@with_model()
def race(
    model: ModelOptions,
    decoding: DecodeOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads standard input (default: a built-in example)."),
    ] = None,
    decoders: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="Decoders to compare (default: all that fit the model).",
            rich_help_panel="Decoding",
        ),
    ] = None,
    chat: ChatOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decode one prompt with several decoders side by side, and compare them.

    An option goes to the decoders that use it. Each decoder is timed alone. Unless the number of
    branches is given, lopa runs twice: with its usual number and with auto.
    """
    start_torch()
    from lopa.models.checkpoint import model_config

    if model.preset is None:
        decoding = {"max_new_tokens": _NEW_TOKENS, **decoding}
    names = decoders.split(",") if decoders is not None else None
    configs = configurations(names, decoding, model.preset, model_config(model.name))
    text = example(model.name, decoding.get("seed")) if prompt is None else read_prompt(prompt)
    if prompt is None:
        print_note(visible(text))
    llm = load(model)
    check_question(llm, text, configs[0])
    prompt_ids = encode(llm, text, chat)
    cost_seconds = prepare_cost(llm, *configs)
    outputs = run(llm, prompt_ids, configs)
    if as_json:
        results = [output.summary() for output in outputs]
        found = {"prompt": text, "results": results, "cost_seconds": cost_seconds}
        print(json.dumps(found, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    texts = [output_text(llm, output) for output in outputs]
    console.print(results_table(outputs, texts, cost_seconds))
    cost = llm.round_cost if llm.measures_cost and llm.knows_round_cost else None
    if line := verdict(outputs, cost, is_built_in=llm.name == "tiny"):
        console.print(f"\n{line}")
    if cost_seconds:
        console.print(
            f"What rounds cost was measured in {cost_seconds:.1f} s, once: it is kept; "
            "lopa bench cost does it anew."
        )


def configurations(
    decoders: Sequence[str] | None, given: DecodeOptions, preset: str | None, model: ModelConfig
) -> list[DecodeConfig]:
    """The settings of each decoder: the given options that it uses.

    An option that none of them uses is an error. A preset is for lopa; the others take from it the
    options that they use.
    """
    from lopa.models.families import family_named, settings_for

    fitting = family_named(model.family).decoders
    names = [name.strip() for name in decoders or fitting]
    for name in names:
        if name not in _DECODERS:
            raise ConfigError(f"no decoder {name!r}: choose from {', '.join(_DECODERS)}")
        if names.count(name) > 1:
            raise ConfigError(f"{name} is named twice: name it once")
    window = given.get("window")
    used = {name: _used(cast(DecoderName, name), window) for name in names}
    optional = frozenset().union(*(_used(name, w) for name in _DECODERS for w in (None, window)))
    for option in given:
        if option in optional and not any(option in options for options in used.values()):
            raise ConfigError(f"{option} is used by none of {', '.join(names)}: leave it out")
    asked = {**_preset_changes(preset), **given}
    chosen = {
        name: {k: v for k, v in asked.items() if k not in optional or k in used[name]}
        for name in names
    }
    configs = [settings_for(model, None, {"decoder": n, **own}) for n, own in chosen.items()]
    if "lopa" in chosen and "branches" not in given and preset is None:
        own = {**chosen["lopa"], "branches": "auto"}
        at = names.index("lopa") + 1
        configs.insert(at, settings_for(model, None, {"decoder": "lopa", **own}))
    return configs


def _used(decoder: DecoderName, window: WindowName | None) -> frozenset[str]:
    if decoder == "lopa":
        return options_of(decoder, window)
    return options_of(decoder) - {"window"}  # its window is fixed


def _preset_changes(preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    usual = DecodeConfig().settings()
    settings = DecodeConfig.preset(preset).settings()
    return {name: value for name, value in settings.items() if value != usual.get(name)}


def run(llm: LLM, prompt_ids: list[int], configs: Sequence[DecodeConfig]) -> list[Output]:
    """Run all decoders, one round of each in turn; the time of an output is that of its rounds."""
    from rich.live import Live

    from lopa.cli.watch import OutputView
    from lopa.engine.scheduler import Scheduler

    with Progress("preparing"):  # the one-time cost of the first forward is not timed
        for config in configs:
            with closing(llm.engine(max_running=1)) as engine:
                next(engine.stream(llm.session(prompt_ids, config)))
    console = stderr_console()
    with ExitStack() as stack:
        lanes = []
        for config in configs:
            engine = stack.enter_context(closing(Scheduler(llm.runner, overlap=False)))
            session = llm.session(prompt_ids, config)
            lanes.append(Lane(session, engine.stream(session), OutputView.of(session)))
        live = Live(Track(lanes), console=console, auto_refresh=False, transient=True)
        refreshed = 0.0
        progress = Progress("decoding", "decoders done")
        with live if console.is_terminal else progress:
            while not all(lane.view.done for lane in lanes):
                for lane in lanes:
                    lane.step()
                if console.is_terminal and time.monotonic() - refreshed > _FRAME_SECONDS:
                    live.refresh()
                    refreshed = time.monotonic()
                progress.update(sum(lane.view.done for lane in lanes), len(lanes))
    return [lane.output for lane in lanes]


@dataclass(slots=True)
class Lane:
    """A decoder's session and its view."""

    session: Session
    events: Iterator[Event]
    view: OutputView

    def step(self) -> None:
        if (event := next(self.events, None)) is not None:
            self.view.update(event)

    @property
    def output(self) -> Output:
        assert self.session.output is not None
        return self.session.output


@dataclass(slots=True)
class Track:
    """The live view: a panel per decoder, two abreast on a wide terminal."""

    lanes: Sequence[Lane]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        abreast = 2 if options.max_width >= 80 and len(self.lanes) > 1 else 1
        rows = -(-len(self.lanes) // abreast)
        line_count = max(1, min(_LANE_LINES, (console.height - 1) // rows - 2))
        grid = Table.grid(expand=True)
        for _ in range(abreast):
            grid.add_column(ratio=1)
        width = options.max_width // abreast - 4
        texts = [lane.view.lines(console, width, line_count) for lane in self.lanes]
        height = max(text.plain.count("\n") for text in texts) + 3  # the same for all
        panels = [_panel(lane, text, height) for lane, text in zip(self.lanes, texts, strict=True)]
        for row in range(rows):
            grid.add_row(*panels[row * abreast : (row + 1) * abreast])
        yield grid


def _panel(lane: Lane, text: Text, height: int) -> Panel:
    from rich.panel import Panel
    from rich.text import Text

    done = lane.view.done
    return Panel(
        text,
        title=Text(f" {label(lane.session.config)}{' ✓' if done else ''} ", "not dim bold"),
        title_align="left",
        subtitle=Text.assemble(" ", lane.view.counters.text(gap="  "), " ", style="not dim"),
        subtitle_align="right",
        height=height,
        border_style="green" if done else "dim",
    )


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a text, at most `_TEXT_LINES` lines."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = Text(self.text.strip()).wrap(console, options.max_width)
        if len(lines) > _TEXT_LINES:
            lines[_TEXT_LINES - 1].truncate(options.max_width - 1)
            lines[_TEXT_LINES - 1].append("…")
        yield from lines[:_TEXT_LINES]


def results_table(
    outputs: Sequence[Output], texts: Sequence[str], cost_seconds: float = 0.0
) -> Table:
    """A row per decoder; the best value of each column stands out.

    cost_seconds: that measuring the cost of rounds took, for auto: once, so it is shown beside.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", leading=1)
    table.add_column("decoder", style="bold", no_wrap=True)
    for name in ("rounds", "TPF", "tokens/s", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text")
    figures: list[tuple[list[float], Any, str]] = [
        ([o.rounds for o in outputs], min, ".0f"),
        ([o.tpf for o in outputs], max, ".2f"),
        ([o.tokens_per_second for o in outputs], max, ".1f"),
        ([o.seconds for o in outputs], min, ".2f"),
    ]
    for row, (output, text) in enumerate(zip(outputs, texts, strict=True)):
        cells = [
            Text(format(values[row], form), "bold green" if values[row] == best(values) else "")
            for values, best, form in figures
        ]
        if cost_seconds and output.config.branches == "auto":
            cells[-1].append(f" + {cost_seconds:.1f}", "dim")
        table.add_row(label(output.config), *cells, Excerpt(visible(text, "↵ ")))
    return table


def verdict(outputs: Sequence[Output], here: RoundCost | None, *, is_built_in: bool) -> str:
    """Who won and why, where lookahead ran beside others: what rows cost here, and on a GPU.

    here: what rounds cost on this machine, where it is known.
    """
    from lopa.decoding.round_cost import RoundCost

    ahead = [output for output in outputs if output.config.decoder == "lopa"]
    if not ahead or len(outputs) < 2:
        return ""
    there = RoundCost(H200_TINY if is_built_in else H200_7B)
    where = "an H200" if is_built_in else "an H200 with a 7B model"
    rows = f"{_eight_rows(there):.1f} times one on {where}"
    if here is not None:
        rows = f"{_eight_rows(here):.1f} times one on this machine and {rows}"
    line = f"{_fastest(outputs, ahead)} Eight rows cost {rows}"
    plain = next((output for output in outputs if output.config.decoder == "d2f"), None)
    if plain is None:
        return f"{line}."
    best = min(ahead, key=lambda output: _seconds_at(output, there))
    times = _seconds_at(plain, there) / _seconds_at(best, there)
    return (
        f"{line}: there {label(best.config)} with its {best.rounds} rounds would be "
        f"{times:.1f} times as fast as d2f with its {plain.rounds} (a projection from the recorded "
        "cost of its rounds)."
    )


def _fastest(outputs: Sequence[Output], ahead: Sequence[Output]) -> str:
    """Who was fastest, or that lookahead was as fast up to the noise of a clock."""
    first, mine = (max(among, key=lambda o: o.tokens_per_second) for among in (outputs, ahead))
    speed = f"{mine.tokens_per_second:.1f} tokens/s"
    if mine.tokens_per_second >= first.tokens_per_second:
        return f"{label(mine.config)} was fastest here, {speed}."
    if mine.tokens_per_second > (1 - _TIE) * first.tokens_per_second:
        return f"{label(mine.config)} and {label(first.config)} were equally fast here, {speed}."
    return f"{label(first.config)} was fastest here, {first.tokens_per_second:.1f} tokens/s."


def _eight_rows(cost: RoundCost) -> float:
    from lopa.decoding.round_cost import USUAL_ROW

    return cost(8 * USUAL_ROW, (7,)) / cost(USUAL_ROW)


def _seconds_at(output: Output, cost: RoundCost) -> float:
    """What the rounds of an output would take where they cost so much."""
    rows = [[branch.end - r.start for branch in r.branches] for r in output.trace.rounds]
    return sum(cost(sum(lengths), (len(lengths) - 1,)) for lengths in rows)
