"""Request bodies. A field that is not supported is refused, never ignored.

Fields of `DecodeConfig` have their own names; left out, they take its defaults. Unsupported fields
of OpenAI's API may be sent with their neutral value, since clients do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from lopa.config import (
    AcceptName,
    AttentionName,
    AutoName,
    CacheName,
    DecoderName,
    ObjectiveName,
    OrderName,
    RankingName,
    ScoreName,
    WindowName,
)
from lopa.errors import ConfigError
from lopa.option_checks import MAX_REGEX, schema_text
from lopa.serving.api.errors import ApiError

MAX_STOPS = 16
MAX_LENGTHS = 64  # of a gap, to choose from
StopText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
# A list stops at its first error: a megabyte of wrong items would hold all requests up for seconds.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
GapLength = Annotated[int, Field(ge=1)]
GapLengths = Annotated[list[GapLength], Field(min_length=1, max_length=MAX_LENGTHS)]
MAX_FIELDS = 256  # of a body: each that is unknown is an error of its own
StreamMode = Literal["text", "denoise"]

_NO_TOOLS = "tools are not supported"
_NO_PENALTY = "penalties are not supported"
# Field → its neutral values, and why no other is supported.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), _NO_PENALTY),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "logit_bias": (({},), "logits cannot be biased"),
    "best_of": ((1,), "choices are not ranked: use n"),
    "echo": ((False,), "the prompt is not repeated in the output"),
    "suffix": (("",), "it belongs to /v1/completions"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "modalities": ((["text"],), "the output is plain text"),
    "audio": ((), "the output is plain text"),
    "prediction": ((), "predictions are not used"),
    "store": ((False,), "nothing is stored"),
    "web_search_options": ((), _NO_TOOLS),
}
# Fields without which the answer is the same: taken whatever their value, with a note in the log.
IGNORED = frozenset(
    {
        *("metadata", "safety_identifier", "service_tier"),  # for an account
        *("reasoning_effort", "verbosity"),  # no model here has such a setting
        "prompt_cache_key",  # prefixes are shared without one
    }
)
_MESSAGE_EXTRAS = ("refusal", "tool_calls", "function_call", "audio", "annotations", "name")


def _is_neutral(name: str, value: Any) -> bool:
    neutral = UNSUPPORTED[name][0]
    return value is None or any(value == n and type(value) in _json_types(n) for n in neutral)


def _json_types(value: Any) -> tuple[type, ...]:
    """Types that are the same value in JSON: 0 and 0.0, but not 0 and false."""
    return (int, float) if type(value) is int else (type(value),)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(_Strict):
    """`name`, `description` and `strict` may be sent: the schema is always kept to."""

    name: str | None = Field(None, max_length=256)
    description: str | None = Field(None, max_length=10_000)
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class AnswerFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of_answer(self) -> str | None:
        """As JSON text; None: it may be any text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400,
                "response_format: json_schema goes with type json_schema, and only with it",
                param="response_format",
            )
        if self.json_schema is None:
            return schema_text({"type": "object"}) if self.type == "json_object" else None
        try:
            return schema_text(self.json_schema.schema_)
        except ConfigError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None


class Decoding(_Strict):
    """Fields of `DecodeConfig` but `schema`, which is `response_format` here; null: left out."""

    decoder: DecoderName | None = None
    max_new_tokens: int | None = None
    ranking: RankingName | None = None
    window: WindowName | None = None
    block_size: int | None = None
    append_at: float | None = None
    activate_at: float | None = None
    attention: AttentionName | None = None
    cache: CacheName | None = None
    threshold: float | None = None
    factor: float | None = None
    steps: int | None = None
    quota: int | None = None
    edit_threshold: float | None = None
    edit_rounds: int | None = None
    order: OrderName | None = None
    branches: int | AutoName | None = None
    objective: ObjectiveName | None = None
    accept: AcceptName | None = None
    agreement: float | None = None
    agreement_ahead: float | None = None
    merge: bool | None = None
    score: ScoreName | None = None
    score_fraction: float | None = None
    score_window: int | None = None
    creation_weight: float | None = None
    lookahead_floor: float | None = None
    lookahead_eos: bool | None = None
    early_stop: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    regex: str | None = Field(
        None, max_length=MAX_REGEX, description="The whole answer matches it."
    )
    max_rounds: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")  # synonyms


class Request(Decoding):
    """Fields of both endpoints."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_mode: StreamMode | None = None
    response_format: AnswerFormat | None = None
    user: str | None = Field(None, max_length=256, description="Written to the server's log.")

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _drop_neutral(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, Mapping):
            return handler(given)
        if len(given) > MAX_FIELDS:
            raise ApiError(400, f"the body has {len(given)} fields: send those that you need")
        kept, ignored = {}, []
        for name, value in given.items():
            if name in UNSUPPORTED and name not in cls.model_fields and _is_neutral(name, value):
                continue
            if name in IGNORED:
                ignored.append(name)
                continue
            kept[name] = value
        request = handler(kept)
        request._ignored = ignored
        return request

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and change nothing, for the log."""
        return self._ignored

    @property
    def denoise(self) -> bool:
        return self.stream_mode == "denoise"

    def options(self) -> dict[str, Any]:
        """The fields of DecodeConfig that were given, without max_new_tokens (see `limit`)."""
        found = {name: getattr(self, name) for name in Decoding.model_fields}
        found = {name: value for name, value in found.items() if value is not None}
        found.pop("max_new_tokens", None)
        schema = self.response_format and self.response_format.schema_of_answer()
        if schema is not None:
            found["schema"] = schema
        if "stop" in found:
            found["stop"] = [found["stop"]] if isinstance(found["stop"], str) else found["stop"]
        return found

    def limit(self) -> int | None:
        """Maximum new tokens, by whichever name it was given."""
        given = {n: getattr(self, n, None) for n in _LIMITS if getattr(self, n, None) is not None}
        if len(set(given.values())) > 1:
            names = " and ".join(given)
            raise ApiError(400, f"{names} differ: give one of them", param=next(iter(given)))
        limit = next(iter(given.values()), None)
        if limit is not None and limit < 1:
            raise ApiError(400, f"{next(iter(given))} must be at least 1", param=next(iter(given)))
        return limit

    def check(self, max_choices: int, prompts: int) -> None:
        """Checks that concern several fields."""
        if self.stream_mode is not None and not self.stream:
            raise ApiError(400, "stream_mode needs stream: true", param="stream_mode")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream: true", param="stream_options")
        choices = prompts * (self.n or 1)
        if choices > max_choices:
            raise ApiError(
                400,
                f"{choices} choices are too many: ask for {max_choices} or fewer",
                param="n" if prompts == 1 else "prompt",
            )
        if self.denoise and choices > 1:
            raise ApiError(
                400, "stream_mode denoise takes one choice: give one prompt and n = 1", param="n"
            )


class CompletionRequest(Request):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    suffix: str | TokenIds | None = Field(
        None, description="The text behind a gap, or its token ids: the response fills the gap."
    )
    gap_tokens: GapLength | GapLengths | None = Field(
        None,
        description="How many tokens the gap has, or lengths to choose from. Left out, lengths up "
        "to max_tokens are tried.",
    )
    logprobs: Literal[0] | None = Field(
        None, description="0: the probability of each token when it was filled. No alternatives."
    )

    def check(self, max_choices: int, prompts: int) -> None:
        super().check(max_choices, prompts)
        if self.gap_tokens is None:
            return
        if not self.suffix:
            raise ApiError(400, "gap_tokens needs a suffix: give one", param="gap_tokens")
        if isinstance(self.gap_tokens, int) and self.limit() not in (None, self.gap_tokens):
            raise ApiError(
                400, "gap_tokens and max_tokens differ: give one of them", param="gap_tokens"
            )

    def prompts(self) -> list[Any]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {k: v for k, v in given.items() if not (k in _MESSAGE_EXTRAS and v in (None, []))}

    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        # OpenAI's newer name of the role, which these models' chat templates do not know.
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(
        None, description="The probability of each token when it was filled."
    )
    top_logprobs: Literal[0] | None = Field(None, description="Alternatives are not kept.")

    def prompts(self) -> list[Any]:
        return [[message.plain() for message in self.messages]]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Pydantic's errors as one error of the API: one field, and what to do."""
    field = errors[0]["loc"][:2]
    # Every arm of a union reports an error: the one that got furthest was meant.
    error = max(
        (e for e in errors if e["loc"][:2] == field),
        key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])),
    )
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path", "header"):
        location = location[1:]
    param = _path(location)
    kind = error["type"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON ({reason})", code="invalid_json")
    if kind == "model_attributes_type" and not location:
        return ApiError(
            400,
            "the body must be a JSON object, sent with Content-Type: application/json",
            code="invalid_json",
        )
    if kind == "extra_forbidden":
        name = str(location[-1])
        if len(location) == 1 and name in UNSUPPORTED:
            return ApiError(
                400,
                f"{name} is not supported: {UNSUPPORTED[name][1]}; leave it out",
                param=param,
                code="unsupported_parameter",
            )
        return ApiError(
            400, f"unknown field {param}: leave it out", param=param, code="unknown_parameter"
        )
    if kind == "missing" and location:
        return ApiError(400, f"{param} is missing: give it", param=param, code="missing_parameter")
    if param in ("logprobs", "top_logprobs") and kind == "literal_error":
        return ApiError(
            400,
            f"{param}: alternatives to the chosen tokens are not kept; leave it out"
            if param == "top_logprobs"
            else "logprobs: alternatives to the chosen tokens are not kept; use 0",
            param=param,
            code="unsupported_value",
        )
    if param and param.endswith("].type") and kind == "literal_error":
        return ApiError(
            400,
            f"{param} is {error['input']!r:.40}, and the model reads text only: send parts of "
            "type text",
            param=param,
            code="unsupported_value",
        )
    # Arms of the same level, as of `int | Literal["auto"]`, are all named.
    siblings = [e for e in errors if e["loc"][:-1] == error["loc"][:-1] and len(location) > 1]
    expected = " or ".join(dict.fromkeys(str(e["msg"]) for e in siblings or [error]))
    message = f"{param}: {expected}" if param else expected
    return ApiError(400, message, param=param, code="invalid_value")


def _path(location: list[Any]) -> str | None:
    """messages[0].content, without pydantic's names for the arms of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _FIELD_NAMES:
            path += f".{part}" if path else part
        elif not path:
            return str(part)[:64]
        elif location[-1] == part and part.isidentifier() and part not in ("str", "int"):
            path += f".{part[:64]}"
    return path or None


_FIELD_NAMES = {
    *CompletionRequest.model_fields,
    *ChatRequest.model_fields,
    *StreamOptions.model_fields,
    *AnswerFormat.model_fields,
    *("name", "description", "schema", "strict"),
    *Message.model_fields,
    *TextPart.model_fields,
}
