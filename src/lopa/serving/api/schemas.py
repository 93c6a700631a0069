"""What a request may say. A field that is not honoured here is refused, never ignored.

Fields of `DecodeConfig` go under their own names; left out, they take its defaults. Fields of
OpenAI's API that a diffusion model or this server cannot honour may be sent with the value that
asks for nothing, since clients do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lopa.config import (
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
from lopa.serving.api.errors import ApiError

MAX_STOPS = 16
StopText = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
StreamMode = Literal["text", "denoise"]

_NO_TOOLS = "this server calls no tools"
_NO_PENALTY = "tokens are not penalised here"
# Field → values that ask for nothing, and why another cannot be honoured.
UNHONOURED: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), _NO_PENALTY),
    "frequency_penalty": ((0,), _NO_PENALTY),
    "logit_bias": (({},), "logits are not biased here"),
    "best_of": ((1,), "answers are not ranked against each other here: ask for n of them"),
    "echo": ((False,), "the prompt is not repeated here: put it before the answer yourself"),
    "suffix": (("",), "this server does not write towards a suffix"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "answers are plain text here"),
    "modalities": ((["text"],), "answers are plain text here"),
    "audio": ((), "answers are plain text here"),
    "prediction": ((), "predictions are not used here"),
    "reasoning_effort": ((), "this model has no such setting"),
    "verbosity": ((), "this model has no such setting"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored here"),
    "metadata": (({},), "nothing is stored here"),
    "prompt_cache_key": ((), "prompts share what they can by themselves"),
    "safety_identifier": ((), "nothing is stored here"),
    "web_search_options": ((), _NO_TOOLS),
}
_MESSAGE_EXTRAS = ("refusal", "tool_calls", "function_call", "audio", "annotations", "name")


def _asks_nothing(name: str, value: Any) -> bool:
    neutral = UNHONOURED[name][0]
    return value is None or any(value == n and type(value) in _kinds(n) for n in neutral)


def _kinds(value: Any) -> tuple[type, ...]:
    """Types that stand for the same value in JSON: 0 and 0.0, but not 0 and false."""
    return (int, float) if type(value) is int else (type(value),)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Decoding(_Strict):
    """Fields of `DecodeConfig`; null is the same as leaving one out."""

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
    order: OrderName | None = None
    branches: int | AutoName | None = None
    objective: ObjectiveName | None = None
    score: ScoreName | None = None
    score_fraction: float | None = None
    score_window: int | None = None
    creation_weight: float | None = None
    lookahead_floor: float | None = None
    lookahead_eos: bool | None = None
    early_stop: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_rounds: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")  # three names of one thing


class Request(Decoding):
    """What both endpoints take."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_mode: StreamMode | None = None
    user: str | None = Field(None, max_length=256, description="Written to the server's log.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothings(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kept = {}
        for name, value in given.items():
            if name in UNHONOURED and name not in cls.model_fields and _asks_nothing(name, value):
                continue
            kept[name] = value
        return kept

    @property
    def denoise(self) -> bool:
        return self.stream_mode == "denoise"

    def options(self) -> dict[str, Any]:
        """The fields of DecodeConfig that were given, less the room for the answer."""
        found = {name: getattr(self, name) for name in Decoding.model_fields}
        found = {name: value for name, value in found.items() if value is not None}
        found.pop("max_new_tokens", None)
        if "stop" in found:
            found["stop"] = [found["stop"]] if isinstance(found["stop"], str) else found["stop"]
        return found

    def limit(self) -> int | None:
        """Tokens of the answer, by whichever name it was given."""
        given = {n: getattr(self, n, None) for n in _LIMITS if getattr(self, n, None) is not None}
        if len(set(given.values())) > 1:
            names = " and ".join(given)
            raise ApiError(400, f"{names} differ: give one of them", param=next(iter(given)))
        limit = next(iter(given.values()), None)
        if limit is not None and limit < 1:
            raise ApiError(400, f"{next(iter(given))} must be at least 1", param=next(iter(given)))
        return limit

    def check(self, most_choices: int, prompts: int) -> None:
        """What no single field shows to be wrong."""
        if self.stream_mode is not None and not self.stream:
            raise ApiError(400, "stream_mode needs stream: true", param="stream_mode")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream: true", param="stream_options")
        answers = prompts * (self.n or 1)
        if answers > most_choices:
            raise ApiError(
                400,
                f"{answers} answers are asked for: ask for {most_choices} or fewer at once",
                param="n" if prompts == 1 else "prompt",
            )
        if self.denoise and answers > 1:
            raise ApiError(
                400, "stream_mode denoise shows one answer: give one prompt and n = 1", param="n"
            )


class CompletionRequest(Request):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Literal[0] | None = Field(
        None, description="0: the probability of each token when it was filled. No alternatives."
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
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothings(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {k: v for k, v in given.items() if not (k in _MESSAGE_EXTRAS and v in (None, []))}

    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        # OpenAI's newer name for the same thing, which no template of these models knows.
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = Field(
        None, description="The probability of each token when it was filled."
    )
    top_logprobs: Literal[0] | None = Field(None, description="Alternatives are not known.")

    def prompts(self) -> list[Any]:
        return [[message.plain() for message in self.messages]]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


def refusal(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Pydantic's errors in the words of the API: one field, and what to do."""
    field = errors[0]["loc"][:2]
    # Of a union every arm complains: the one that got furthest is the one that was meant.
    error = max(
        (e for e in errors if e["loc"][:2] == field),
        key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])),
    )
    place = list(error["loc"])
    if place and place[0] in ("body", "query", "path", "header"):
        place = place[1:]
    param = _path(place)
    kind = error["type"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON ({reason})", code="invalid_json")
    if kind == "model_attributes_type" and not place:
        return ApiError(
            400,
            "the body must be a JSON object, sent with Content-Type: application/json",
            code="invalid_json",
        )
    if kind == "extra_forbidden":
        name = str(place[-1])
        if len(place) == 1 and name in UNHONOURED:
            return ApiError(
                400,
                f"{name} cannot be honoured: {UNHONOURED[name][1]}; leave it out",
                param=param,
                code="unsupported_parameter",
            )
        return ApiError(
            400, f"unknown field {param}: leave it out", param=param, code="unknown_parameter"
        )
    if kind == "missing" and place:
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
    # Arms that stand side by side, as of `int | Literal["auto"]`, are all worth naming.
    beside = [e for e in errors if e["loc"][:-1] == error["loc"][:-1] and len(place) > 1]
    wishes = " or ".join(dict.fromkeys(str(e["msg"]) for e in beside or [error]))
    message = f"{param}: {wishes}" if param else wishes
    return ApiError(400, message, param=param, code="invalid_value")


def _path(place: list[Any]) -> str | None:
    """messages[0].content, without pydantic's names for the arms of a union."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NAMES:
            path += f".{part}" if path else part
        elif not path:
            return str(part)[:64]
        elif place[-1] == part and part.isidentifier() and part not in ("str", "int"):
            path += f".{part[:64]}"
    return path or None


_NAMES = {
    *CompletionRequest.model_fields,
    *ChatRequest.model_fields,
    *StreamOptions.model_fields,
    *Message.model_fields,
    *TextPart.model_fields,
}
