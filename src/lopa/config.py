"""How to decode: `DecodeConfig`, and the only place where its defaults are written.

`DecodeConfig` is frozen and checked on construction, so every part that receives one may rely on
it. An option that the chosen decoder does not use is an error, never ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lopa.errors import ConfigError
from lopa.option_checks import (
    NUMBERS,
    check_choice,
    check_flag,
    check_names,
    check_number,
    check_texts,
    plain_number,
    schema_text,
)
from lopa.option_help import FIELDS
from lopa.presets import PAPER, preset_options

DecoderName = Literal["vanilla", "fast-dllm", "sdar", "llada2", "d2f", "lopa"]
WindowName = Literal["canvas", "blocks", "pipeline"]
RankingName = Literal["max_prob", "margin", "neg_entropy"]
ScoreName = Literal["mean", "window", "segment", "fills"]
AcceptName = Literal["score", "agreed", "exact"]
AttentionName = Literal["full", "block"]
CacheName = Literal["none", "prefix", "dual"]
OrderName = Literal["confidence", "sequential"]
AutoName = Literal["auto"]
ObjectiveName = Literal["speed", "tpf"]
_CHOICES: dict[str, Any] = {  # beside decoder and window, which are checked before
    "ranking": RankingName,
    "objective": ObjectiveName,
    "accept": AcceptName,
    "score": ScoreName,
    "attention": AttentionName,
    "cache": CacheName,
    "order": OrderName,
}

_COLDEST = 1e-3  # temperature: logits divided by less overflow
RANK_TIMEOUT = 10.0  # seconds until a rank that says nothing counts as lost
AUTO_BRANCHES = (0, 1, 3, 7, 15)  # what `auto` chooses from: rows double from one to the next
# Where somebody waits for the answer (`lopa generate`, `chat` and `serve`) and does not say how
# many. `DecodeConfig` has a number: programs, evaluations and studies come out the same anywhere.
WAITING_BRANCHES: AutoName = "auto"

# Stands for "the decoder's own default", which `DecodeConfig` puts in its place on construction.
_OWN: Any = None

# What each window and each decoder adds to the options that every decoder has.
_WINDOW_OPTIONS: dict[WindowName, dict[str, Any]] = {
    "canvas": {},
    "blocks": {"block_size": 32, "cache": "dual"},
    "pipeline": {
        "block_size": 32,
        "append_at": 0.1,
        "activate_at": 0.95,
        "attention": "full",
        "quota": 1,
        "steps": None,
        "edit_threshold": None,
        "edit_rounds": 16,  # only with an edit_threshold
    },
}
_LOOKAHEAD_OPTIONS: dict[str, Any] = {
    "branches": 7,
    "objective": "speed",
    "accept": "agreed",
    "merge": True,
    "score": "fills",
    "score_fraction": 1.0,
    "score_window": 8,
    "lookahead_floor": 0.0,
    "lookahead_eos": False,
}
# What `agreed` asks of the anchor: least probability of the token, in the block of the first mask
# and in those behind it. Under block attention a token there is out of sight of the blocks before
# it, so that they go on as if it were not there: only a confident one is worth it.
_AGREEMENT = {"agreement": 0.1, "agreement_ahead": 0.1}
_AHEAD_UNDER_BLOCK = 0.8
_CREATION_WEIGHTS: dict[str, float] = {"mean": 0.0, "window": 0.0, "segment": 0.0, "fills": 0.5}
_AGREED_WEIGHTS = {"fills": 0.25}
_DECODER_OPTIONS: dict[DecoderName, dict[str, Any]] = {
    # `steps` of vanilla is max_new_tokens unless given: one token a step.
    "vanilla": {"window": "canvas", "ranking": "neg_entropy", "steps": None},
    # One of threshold, factor and steps; threshold unless another is given.
    "fast-dllm": {
        "window": "blocks",
        "ranking": "max_prob",
        "threshold": 0.9,
        "factor": None,
        "steps": None,
    },
    # A pipeline of one active block (see _FIXED); `steps` a block is block_size unless given.
    "sdar": {
        "window": "pipeline",
        "ranking": "max_prob",
        "block_size": 4,
        "threshold": 0.85,
        "steps": None,
        "order": "confidence",
    },
    # The same with LLaDA2's defaults. Its `steps` are fewer where there is little to generate; with
    # an edit_threshold, which makes it LLaDA2.1's, every round has the same quota.
    "llada2": {"window": "pipeline", "ranking": "max_prob", "threshold": 0.95},
    "d2f": {"window": "pipeline", "ranking": "neg_entropy", "threshold": 0.9},
    "lopa": {
        "window": "pipeline",
        "ranking": "neg_entropy",
        "threshold": 0.9,
        **_LOOKAHEAD_OPTIONS,
        **_AGREEMENT,
        "creation_weight": None,  # the score's own
    },
}
# Options of a branch score that other scores do not use.
_UNSCORED: dict[str, tuple[str, ...]] = {
    "mean": ("score_window",),
    "window": ("score_fraction",),
    "segment": ("score_fraction", "score_window"),
    "fills": ("score_fraction", "score_window"),
}
# Options of lookahead that another way to accept a branch does not use.
_UNACCEPTED: dict[str, tuple[str, ...]] = {
    "score": ("agreement", "agreement_ahead", "merge"),
    "agreed": (),
    "exact": (
        "merge",
        "agreement",
        "agreement_ahead",
        "score",
        "score_fraction",
        "score_window",
        "creation_weight",
        "lookahead_floor",
        "lookahead_eos",
    ),
}
# Options of its window that a decoder is defined by, and does not leave to choose.
_ONE_BLOCK = {"append_at": 1.0, "activate_at": 1.0, "attention": "block"}
_FIXED: dict[str, dict[str, Any]] = {
    "sdar": {**_ONE_BLOCK, "quota": 1},
    "llada2": _ONE_BLOCK,
    "d2f": {"quota": 1, "steps": None, "edit_threshold": None, "edit_rounds": None},
}
# Decoders that always have a schedule: one token a round, in at most so many rounds.
_STEPS: dict[str, int] = {"vanilla": sys.maxsize, "sdar": sys.maxsize, "llada2": 32}
# What an option the decoder does not use reads as: the value under which it does nothing.
_NEUTRAL: dict[str, Any] = {
    "branches": 0,
    "attention": "full",
    "cache": "none",
    "accept": "score",
    "merge": False,
    "score": "mean",
    "score_fraction": 1.0,
    "creation_weight": 0.0,
    "lookahead_floor": 0.0,
    "lookahead_eos": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One request's decoding settings. Fields left out take the decoder's own defaults.

    {fields}
    """

    decoder: DecoderName = "lopa"
    max_new_tokens: int = 256
    ranking: RankingName = _OWN  # orders forced fills and lookaheads, and makes the branch score
    window: WindowName = _OWN  # lopa alone may choose: lookahead works on every window

    # Where a window of blocks is cut, and how D2F's pipeline moves.
    block_size: int = _OWN
    append_at: float = _OWN  # τ_add: decoded share of the last block that appends the next
    activate_at: float = _OWN  # τ_act: decoded share that fully activates the right neighbour
    attention: AttentionName = _OWN
    cache: CacheName = _OWN  # Fast-dLLM's

    # What is filled in a round.
    threshold: float = _OWN  # τ_conf, compared with max_prob
    factor: float | None = None  # Fast-dLLM's other rule
    # vanilla's schedule; Fast-dLLM's fixed count; in a pipeline the rounds that a block is shared
    # out over
    steps: int | None = None
    quota: int = _OWN  # least tokens that a round fills in a block, without such a schedule
    edit_threshold: float | None = None  # replace a filled token by one above this; None: never
    edit_rounds: int = _OWN  # most rounds of a block after its last mask
    order: OrderName = _OWN  # SDAR's: the most confident first, or from left to right

    # Lookahead.
    # k lookahead branches beside the anchor; 0 is the plain decoder; auto chooses every round.
    branches: int | AutoName = _OWN
    objective: ObjectiveName = _OWN  # what auto makes most of: tokens a second, or a forward
    accept: AcceptName = _OWN  # which branches may win: any, those the anchor agrees with, exact
    agreement: float = _OWN  # least probability that the anchor gives a lookahead token
    agreement_ahead: float = _OWN  # the same in blocks behind that of the first mask
    merge: bool = _OWN  # whether the winner takes along the tokens of branches that agree with it
    score: ScoreName = _OWN
    score_fraction: float = _OWN  # of the masks, the least confident that `mean` averages
    score_window: int = _OWN  # masks in the sliding window of `window`
    creation_weight: float = _OWN  # α: weight of the lookahead token's own confidence
    lookahead_floor: float = _OWN  # least max_prob of a lookahead token
    lookahead_eos: bool = _OWN  # whether a lookahead may place EOS, or look behind it

    # False is parity with the published loops: decode on behind EOS, look ahead at EOS
    # tokens, score by `mean`, cut max_new_tokens down to whole blocks without a word, and take
    # confidences from the tempered distribution.
    early_stop: bool = True
    stop: str | Sequence[str] = ()  # kept as a tuple
    # What the answer has to fit: one of them at most.
    schema: str | Mapping[str, Any] | bool | None = None  # a JSON Schema; kept as its JSON text
    regex: str | None = None  # matched as a whole
    max_rounds: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("decoder", self.decoder, DecoderName)
        own = dict(_DECODER_OPTIONS[self.decoder])
        if self.window is not None:
            check_choice("window", self.window, WindowName)
            if self.decoder == "lopa":
                own["window"] = self.window
        own = _WINDOW_OPTIONS[own["window"]] | own
        fixed = _FIXED.get(self.decoder, {})
        unscored: tuple[str, ...] = ()
        if self.decoder == "lopa":
            if self.early_stop is False:
                own |= PAPER  # parity
            own["accept"] = self._asked("accept")
            if self.attention == "block":
                own["agreement_ahead"] = _AHEAD_UNDER_BLOCK
            own["score"] = self._asked("score")
            weights = _CREATION_WEIGHTS | (_AGREED_WEIGHTS if own["accept"] == "agreed" else {})
            own["creation_weight"] = weights.get(own["score"], 0.0)
            unscored = _UNSCORED.get(own["score"], ()) + _UNACCEPTED.get(own["accept"], ())
        own = {k: v for k, v in own.items() if k not in fixed and k not in unscored}
        if self.branches != "auto":
            own.pop("objective", None)
        if self.edit_threshold is None:
            own.pop("edit_rounds", None)
        elif self.decoder == "llada2":
            own.pop("steps")
        if self.decoder == "fast-dllm" and (self.factor is not None or self.steps is not None):
            own["threshold"] = None  # the other two rules take its place
        for name in _OPTIONAL:
            self._apply_default(name, own, _NEUTRAL | fixed)
        if self.decoder in _STEPS and self.steps is None and "steps" in own:
            every = self.max_new_tokens if self.decoder == "vanilla" else self.block_size
            object.__setattr__(self, "steps", min(every, _STEPS[self.decoder]))
        stop: object = self.stop  # a lone string is welcome too
        if not isinstance(stop, str | list | tuple):
            raise ConfigError("stop must be one or more non-empty strings")
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "schema", schema_text(self.schema))
        for name in NUMBERS:
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        self._check_each()
        self._check_together()

    def _apply_default(self, name: str, own: dict[str, Any], unused: dict[str, Any]) -> None:
        """Put the decoder's default in place of a missing value; refuse an unused option."""
        given = getattr(self, name)
        if given is None:
            object.__setattr__(self, name, own.get(name, unused.get(name)))
        elif name not in own and given != unused.get(name):
            users = [d for d in get_args(DecoderName) if name in options_of(d)]
            hint = f"; it belongs to {', '.join(users)}" if users else ""
            if self.decoder in users:
                hint = " with edit_threshold" if self.edits else " without edit_threshold"
            raise ConfigError(
                f"{name} is not used by the {self.decoder} decoder"
                + (self._lopa_hint(name, own) if self.decoder == "lopa" else hint)
                + ": leave it out"
            )
        elif name == "window" and given != own["window"]:
            raise ConfigError(
                f"the {self.decoder} decoder always uses the {own['window']} window: "
                "choose another window with decoder lopa"
            )

    def _asked(self, name: Literal["accept", "score"]) -> str:
        asked: str | None = getattr(self, name)  # None until the default is applied
        usual = _LOOKAHEAD_OPTIONS if self.early_stop else PAPER
        return asked or str(usual[name])

    def _lopa_hint(self, name: str, own: dict[str, Any]) -> str:
        if name in _UNACCEPTED.get(self._asked("accept"), ()):
            return f" with accept {self._asked('accept')}"
        if name in _UNSCORED.get(self._asked("score"), ()):
            return f" with score {self._asked('score')}"
        if name == "objective":
            return " unless branches is auto"
        if name == "edit_rounds" and own["window"] == "pipeline":
            return " without edit_threshold"
        return f" on the {own['window']} window"

    def _check_each(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), kind)
        for name in NUMBERS:
            check_number(name, getattr(self, name))
        for name in ("early_stop", "lookahead_eos", "merge"):
            check_flag(name, getattr(self, name))
        check_texts(self.stop, self.regex)

    def _check_together(self) -> None:
        if self.schema is not None and self.regex is not None:
            raise ConfigError("schema and regex both say what the answer has to fit: give one")
        if 0 < self.temperature < _COLDEST:
            raise ConfigError(f"temperature must be 0 or at least {_COLDEST}")
        if self.temperature == 0 and (self.top_p != 1.0 or self.top_k != 0):
            raise ConfigError("top_p and top_k need a temperature above 0: at 0 nothing is sampled")
        if self.top_p == 0 or self.score_fraction == 0:
            raise ConfigError("top_p and score_fraction must be above 0")
        rules = [n for n in ("threshold", "factor", "steps") if getattr(self, n) is not None]
        if self.decoder == "fast-dllm" and len(rules) > 1:
            raise ConfigError(f"{' and '.join(rules)} are different fill rules: give one of them")
        if self.decoder != "llada2" and self.steps is not None and (self.quota or 1) > 1:
            raise ConfigError("steps and quota both say how many to fill: give one of them")
        if self.window == "canvas":
            return
        whole, rest = divmod(self.max_new_tokens, self.block_size)
        rounds_down = self.window == "pipeline" and whole > 0
        by_blocks = "append_at" in _FIXED.get(self.decoder, ())  # always as many as are needed
        if rest and not self.early_stop and not rounds_down and not by_blocks:
            sizes = [n for n in (whole * self.block_size, (whole + 1) * self.block_size) if n]
            raise ConfigError(
                f"block_size {self.block_size} does not divide max_new_tokens "
                f"{self.max_new_tokens}, which parity mode needs: use "
                f"{' or '.join(map(str, sizes))} new tokens, or another block size"
            )
        if self.window == "blocks" and self.steps is not None and self.steps % self.blocks:
            raise ConfigError(
                f"steps {self.steps} is not a multiple of the {self.blocks} blocks: "
                f"use a multiple of {self.blocks}"
            )

    @property
    def blocks(self) -> int:
        """How many blocks are generated; the canvas is one.

        max_new_tokens is rounded up to whole blocks, and the answer cut; parity mode rounds down.
        """
        if self.window == "canvas":
            return 1
        whole, rest = divmod(self.max_new_tokens, self.block_size)
        return whole + (rest > 0 and self.early_stop)

    @property
    def block_steps(self) -> int | None:
        """Rounds that a block of the pipeline is shared out over; None: by `quota`."""
        if self.steps is None or self.decoder != "llada2":
            return self.steps
        return max(1, min(self.steps, self.max_new_tokens // self.quota))

    @property
    def edits(self) -> bool:
        """Whether filled tokens may be replaced."""
        return self.edit_threshold is not None

    @property
    def cuts_answer(self) -> bool:
        """Whether an answer ends with its EOS, or max_new_tokens, and not with a block.

        Parity mode gives whole blocks, where the published loop does.
        """
        return self.early_stop or self.decoder == "llada2"

    @property
    def is_constrained(self) -> bool:
        """Whether the answer has to fit a schema or a regex."""
        return self.schema is not None or self.regex is not None

    @property
    def most_branches(self) -> int:
        """How many lookahead branches a round may have."""
        return AUTO_BRANCHES[-1] if self.branches == "auto" else self.branches

    @property
    def needs_fp64(self) -> bool:
        """Fast-dLLM is published with a softmax in fp64: at 1 − 1e-9, fp32 sees only ties."""
        return self.decoder == "fast-dllm"

    @property
    def tempers_confidence(self) -> bool:
        """Parity mode: confidences are of the distribution that temperature and top-p shape."""
        return self.temperature > 0 and not self.early_stop

    def settings(self) -> dict[str, Any]:
        """The options in force, by name, without those the decoder does not use."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["stop"] = list(self.stop)
        used = options_of(self.decoder, self.window) - {*_UNACCEPTED.get(self.accept, ())}
        return {
            name: value
            for name, value in values.items()
            if value is not None and (name not in _OPTIONAL or name in used)
        }

    @classmethod
    def preset(cls, task: str, **changes: Any) -> DecodeConfig:
        """The settings published with the paper for a task, with changes on top."""
        return cls(**with_changes(preset_options(task), changes))

    def changed(self, **changes: Any) -> DecodeConfig:
        """The same settings with some of them changed.

        Another decoder, window or score takes of the others what it can use.
        """
        check_names(changes)
        return DecodeConfig(**with_changes(self.settings(), changes)) if changes else self


def options_of(
    decoder: DecoderName, window: WindowName | None = None, score: ScoreName | None = None
) -> frozenset[str]:
    """The names of the options that this decoder uses beside those that all of them have."""
    own = _DECODER_OPTIONS.get(decoder, {"window": "canvas"})
    names = frozenset(own) | frozenset(_WINDOW_OPTIONS[window or own["window"]])
    return names - frozenset(_FIXED.get(decoder, ())) - frozenset(_UNSCORED.get(score or "", ()))


_OPTIONAL = tuple(
    dict.fromkeys(
        name
        for options in (*_DECODER_OPTIONS.values(), *_WINDOW_OPTIONS.values())
        for name in options
    )
)


def with_changes(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes on top, less what the changes make meaningless."""
    dropped: set[str] = set()
    if changes.keys() & {"accept", "early_stop"}:  # each has its own defaults
        dropped |= {*PAPER, *_UNACCEPTED["exact"]}
    if "score" in changes:
        dropped |= {"creation_weight", "score_fraction", "score_window"}
    if "attention" in changes:
        dropped |= {"agreement", "agreement_ahead"}
    if changes.keys() & {"decoder", "window"}:
        decoder = changes.get("decoder", settings.get("decoder", "lopa"))
        dropped |= set(_OPTIONAL) - options_of(decoder, changes.get("window"))
        dropped |= {"window", "steps"}
    if changes.get("edit_threshold", 0) is None:
        dropped.add("edit_rounds")
    elif "edit_threshold" in changes and settings.get("decoder") == "llada2":
        dropped.add("steps")
    if changes.get("branches", "auto") != "auto":
        dropped.add("objective")
    for name, other in (("schema", "regex"), ("regex", "schema")):  # one takes the other's place
        if changes.get(name) is not None:
            dropped.add(other)
    kept = {name: value for name, value in settings.items() if name not in dropped}
    return {**kept, **changes}


def with_waiting_branches(
    given: Mapping[str, Any], usual_decoder: DecoderName, preset: str | None
) -> dict[str, Any]:
    """Options with `WAITING_BRANCHES` where the decoder looks ahead and nobody says how far.

    usual_decoder: where the options name none
    """
    looks_ahead = given.get("decoder", usual_decoder) == "lopa"
    if not looks_ahead or "branches" in given or preset is not None:
        return dict(given)
    return {**given, "branches": WAITING_BRANCHES}


DecodeConfig.__doc__ = (DecodeConfig.__doc__ or "").format(
    fields="\n    ".join(f"{name}: {line}." for name, (_, line) in FIELDS.items())
)

# How lookahead is done by default, against PAPER; docs/results.md has the reasons.
USUAL: dict[str, Any] = {name: getattr(DecodeConfig(), name) for name in PAPER}
