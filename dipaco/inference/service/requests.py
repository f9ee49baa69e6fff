"""From the body of a request to `Work`: every field is checked, and a mistake is one clear line."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dipaco.base.errors import ConfigurationError, nearest_name
from dipaco.inference.generate import prompt_tokens
from dipaco.inference.sampling import Sampling
from dipaco.routing.documents.chat_template import ChatTemplate, TemplateError
from dipaco.routing.tokens.chat_tokens import question_tokens, routed_tokens, special_names

from .engine import Engine
from .errors import ApiError
from .work import Event, Work

logger = logging.getLogger(__name__)

AUTO = "auto"
_PATH = "path-"
_USUAL_TOKENS = 16
_MAX_ANSWERS, _MAX_PROMPTS, _MAX_STOPS = 64, 1024, 32
_MAX_MIXED = 64

Token = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=512)]


class StreamOptions(BaseModel):
    """What is sent with a stream."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class Body(BaseModel):
    """What both kinds of requests can say."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    model: str = AUTO
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_ANSWERS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    mix: Annotated[int, Field(ge=1, le=_MAX_MIXED)] | None = None
    context_shift: bool | None = None
    # Taken when they change nothing: clients send them with their defaults.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Taken: nothing here depends on them.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def neutral(self) -> dict[str, bool]:
        """Return, for what is taken and not done, whether its value changes nothing."""
        return {
            "presence_penalty": not self.presence_penalty,
            "frequency_penalty": not self.frequency_penalty,
            "logit_bias": not self.logit_bias,
        }


class CompletionBody(Body):
    """`/v1/completions`."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]],
            Field(min_length=1, max_length=_MAX_PROMPTS),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def neutral(self) -> dict[str, bool]:
        """Return, for what is taken and not done, whether its value changes nothing."""
        known = (None, 1, self.n)
        return {**super().neutral(), "best_of": self.best_of in known, "suffix": not self.suffix}


class TextPart(BaseModel):
    """A part of a message. What else a client says of it is left alone, as other servers do."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. What other servers put into it comes back and is left alone, but for
    calls of tools, without which the chat would be another."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _answers_may_be_empty(cls, values: Any) -> Any:
        """An answer comes back as the client has it, which may be without a text."""
        if not isinstance(values, dict) or values.get("role") != "assistant":
            return values
        return values | {"content": "" if values.get("content") is None else values["content"]}

    def plain(self) -> dict[str, Any]:
        """Return what a chat template sees."""
        return self.model_dump(exclude_none=True, exclude={"tool_calls", "function_call"})


class ChatBody(Body):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    def neutral(self) -> dict[str, bool]:
        """Return, for what is taken and not done, whether its value changes nothing."""
        return {
            **super().neutral(),
            "tools": not self.tools,
            "tool_choice": self.tool_choice in (None, "none", "auto"),
            "response_format": self.response_format in (None, {"type": "text"}),
        }


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(content: bytes, kind: type[BodyT]) -> BodyT:
    """Return a request's body. Raises ApiError, naming the field that is wrong."""
    try:
        values = json.loads(content)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, 'the body is no JSON object; send {"prompt": ...}')
    values = _without_nulls(values, kind)
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _explained(error, kind) from None
    for name, is_neutral in body.neutral().items():
        if not is_neutral:
            raise ApiError(
                400, f"{name} is not supported; leave it out", parameter=name, code="unsupported"
            )
    return body


def _without_nulls(values: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Leave out unknown fields that are null: clients send what their own types have."""
    return {
        name: value
        for name, value in values.items()
        if value is not None or name in kind.model_fields
    }


def _explained(error: ValidationError, kind: type[Body]) -> ApiError:
    """Return the first mistake as one line; of several that a union gives, the first is said."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "body"
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        nearest = nearest_name(name, kind.model_fields)
        hint = f"; did you mean {nearest}?" if nearest else ""
        return ApiError(400, f"unknown field '{name}'{hint}", parameter=name)
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return ApiError(400, f"{name} is missing", parameter=name)
    where = name
    if name == "messages" and len(first["loc"]) > 1:
        where = f"messages[{first['loc'][1]}]" + "".join(f".{at}" for at in first["loc"][2:3])
        if first["type"] == "missing":
            return ApiError(400, f"{where} is missing", parameter=name)
        if first["loc"][2:3] in (("tool_calls",), ("function_call",)):
            return ApiError(400, f"{where} is not supported; leave it out", parameter=name)
    seen = json.dumps(first.get("input"), default=str)
    seen = seen if len(seen) <= 80 else f"{seen[:77]}..."
    given = _ROLE if where.endswith(".role") else None
    expected = given or _EXPECTED.get(name, first["msg"][0].lower() + first["msg"][1:])
    return ApiError(400, f"{where}: {expected}, not {seen}", parameter=name)


_ROLE = "give one of system, developer, user, assistant and tool"
_EXPECTED = {
    "prompt": (
        "give a text, a list of texts, a list of tokens, or a list of such lists, and of texts or "
        f"lists at most {_MAX_PROMPTS}"
    ),
    "stop": f"give a text, or at most {_MAX_STOPS} texts, none of them empty",
    "messages": 'give a list of {"role": ..., "content": ...} with text alone',
}


@dataclass(frozen=True)
class Request:
    """A request that can be worked on."""

    body: Body
    works: list[Work]
    prompts: list[str | None]
    """The prompts as they were given; None for tokens."""

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.body.n or 1


class RequestReader:
    """Makes `Work` of requests.

    :param template: the chat template, None where the model has none
    :param timeout_s: how long an answer may take
    """

    def __init__(self, engine: Engine, *, template: str | None, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._template: ChatTemplate | None = None
        self._no_template = "this model has no chat template, it continues texts"
        if template is not None:
            try:
                self._template = ChatTemplate(template)
            except ConfigurationError as error:  # texts are continued all the same
                self._no_template = str(error)
                logger.warning("chats are refused: %s", error)

    def close(self) -> None:
        """End the process that fills in chat templates."""
        if self._template is not None:
            self._template.close()

    @property
    def has_template(self) -> bool:
        """Whether chats can be answered."""
        return self._template is not None

    def completion(self, body: CompletionBody, emit: Callable[[int, Event], None]) -> Request:
        """Return what a completion asks for. Raises ApiError."""
        given = body.prompt
        prompts: list[str | list[int]]
        if isinstance(given, str) or isinstance(given[0], int):
            prompts = [given]  # type: ignore[list-item]
        else:
            prompts = list(given)  # type: ignore[arg-type]
        tokenizer, vocabulary = self._engine.tokenizer, self._engine.model.vocabulary_size
        for numbers in prompts:
            if not isinstance(numbers, str) and (greatest := max(numbers)) >= vocabulary:
                raise ApiError(
                    400,
                    f"prompt: token {greatest} is not one of the {vocabulary} of this model",
                    parameter="prompt",
                )
        tokens = [
            prompt_tokens(tokenizer, p) if isinstance(p, str) else tokenizer.tokens_of_numbers(p)
            for p in prompts
        ]
        works = self._works(body, tokens, emit, body.max_tokens, body.logprobs, _USUAL_TOKENS)
        if body.echo and body.logprobs is not None:
            for work in works:
                work.score_prompt = True
        return Request(body, works, [p if isinstance(p, str) else None for p in prompts])

    def chat(self, body: ChatBody, emit: Callable[[int, Event], None]) -> Request:
        """Return what a chat asks for. Raises ApiError."""
        if self._template is None:
            raise ApiError(
                400,
                f"{self._no_template}; use /v1/completions, or start dipaco-serve with "
                f"--chat-template FILE",
                code="no_chat_template",
            )
        tokenizer = self._engine.tokenizer
        messages = [message.plain() for message in body.messages]
        try:
            text = self._template.render(messages, special_names(tokenizer))
        except TemplateError as error:
            raise ApiError(
                400, f"messages: the chat template refuses them: {error}", parameter="messages"
            ) from None
        tokens = question_tokens(tokenizer, text)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", parameter="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_completion_tokens
        most = body.max_tokens if most is None else most
        works = self._works(body, [tokens], emit, most, logprobs, None)
        for work in works:
            work.routed_by = routed_tokens(tokenizer, messages)
        return Request(body, works, [None])

    def path_of(self, model: str) -> int | None:
        """Return the path of a model's name, None for `auto`. Raises ApiError for another name."""
        count = self._engine.grid.path_count
        if model == AUTO:
            return None
        number = model.removeprefix(_PATH)
        is_number = model.startswith(_PATH) and number.isascii() and number.isdecimal()
        is_number = is_number and len(number) < 10 and path_name(int(number)) == model
        if is_number and int(number) < count:
            return int(number)
        names = (AUTO, *(path_name(path) for path in range(count)))
        hint = nearest_name(model, names) or AUTO
        raise ApiError(
            404,
            f"there is no model '{model[:80]}'; did you mean '{hint}'? There are '{AUTO}' and "
            f"'{path_name(0)}' to '{path_name(count - 1)}'",
            parameter="model",
            code="model_not_found",
        )

    def _works(
        self,
        body: Body,
        prompts: list[list[int]],
        emit: Callable[[int, Event], None],
        most: int | None,
        logprobs: int | None,
        usual: int | None,
    ) -> list[Work]:
        """Return the work on some prompts; `usual` tokens are made where nothing is said."""
        path = self.path_of(body.model)
        self._check_mix(body)
        context, slide = self._engine.model.sequence_length, bool(body.context_shift)
        seed = body.seed if body.seed is not None else secrets.randbits(62)
        works = []
        for number, tokens in enumerate(prompts):
            room = context - len(tokens)
            count = most
            if count is None:
                count = max(0, room) if usual is None else min(usual, max(0, room))
                if slide:
                    count = usual or context
            if (room < count and not slide) or (room < 0 and not slide):
                raise ApiError(
                    400,
                    f"this model's context is {context} tokens, and {len(tokens)} of the prompt "
                    f"and {count} of the answer are {len(tokens) + count}; shorten one of them, or "
                    "say context_shift: true to go on from the newer half of the context",
                    parameter="max_tokens" if room >= 0 else "prompt",
                    code="context_length_exceeded",
                )
            works.append(
                Work(
                    tokens=tokens,
                    path=path,
                    sampling=Sampling(
                        max_tokens=count,
                        temperature=1.0 if body.temperature is None else body.temperature,
                        top_k=max(0, body.top_k or 0),
                        top_p=1.0 if body.top_p is None else body.top_p,
                        seed=seed,
                    ),
                    emit=lambda event, number=number: emit(number, event),  # type: ignore[misc]
                    deadline_s=time.monotonic() + self._timeout_s,
                    answers=body.n or 1,
                    stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
                    logprobs=logprobs,
                    mix=body.mix or 1,
                    slide=slide,
                )
            )
        return works

    def _check_mix(self, body: Body) -> None:
        """Raise ApiError for paths that cannot be mixed."""
        if (body.mix or 1) == 1:
            return
        most = self._engine.max_mixed
        if body.mix is not None and body.mix > most:
            raise ApiError(
                400,
                f"mix: this run has {self._engine.grid.path_count} paths, --memory-gb is for "
                f"{self._engine.capacity} and --parallel for {self._engine.limits.slots} texts; at "
                f"most {most} can be mixed",
                parameter="mix",
            )


def path_name(path: int) -> str:
    """Return the name of a path as a model."""
    return f"{_PATH}{path}"
