"""Which parts of a request are passed on to llama.cpp, and within which bounds.

llama.cpp checks values. Here is what it does not bound: fields that only its own parts set, or that
choose another adapter, are left out, and so is every field that is not named below. What could cost
much before anything is generated has a limit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from dipaco.base.bounded_process import RefusedError
from dipaco.routing.documents.chat_template import (
    ChatTemplate,
    SlowTemplateError,
    TemplateError,
)
from dipaco.routing.tokens.run_tokens import RunTokens

from .api_error import ApiError

AUTO: Final = "auto"
_PATH: Final = "path-"
_MOST_STOPS, _MOST_TOOLS, _MOST_BIASES, _MOST_SAMPLERS = 32, 128, 1024, 16
_MOST_LIKELY = 20
_MOST_MESSAGES = 1024
# llama.cpp reads a grammar by calling itself: one of a megabyte ends it.
_MOST_GRAMMAR = 2**14
_MOST_SCHEMA = 2**16
_MOST_LETTERS_OF_A_FIELD = 512
# Digits of a number: more than any number of 64 bits has.
_MOST_DIGITS = 20
# So short a text costs nothing, however small the model's context is.
_SHORT_LETTERS = 4096

_SAMPLING = frozenset({
    "max_tokens", "n_predict", "temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "repeat_penalty",
    "repeat_last_n", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "seed",
    "ignore_eos", "stream", "n", "logprobs", "top_logprobs", "n_probs", "cache_prompt",
    "timings_per_token", "return_progress",
})  # fmt: skip
_CHAT = frozenset({
    "max_completion_tokens", "tool_choice", "parallel_tool_calls", "reasoning_format",
    "reasoning_effort", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
_EMBEDDING = frozenset({"encoding_format", "dimensions"})
# What a message may have beside its role and content, and has to be a text.
_TEXTS_OF_A_MESSAGE = ("name", "reasoning_content", "tool_call_id")
_REASONING_FORMATS = (None, "auto", "none", "deepseek", "deepseek-legacy")
# What would change the answer and cannot be done, with the values that change nothing.
_NOT_DONE: Final = {
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "context_shift": (None, False),
}


@dataclass(frozen=True)
class PathRequest:
    """A request as it is passed on, once its path is known."""

    body: dict[str, Any]
    path: int | None
    """None: the router chooses."""
    routed_by: list[list[int]]
    """The run's tokens that each prompt is routed by."""
    answers: int
    """How many of its answers are computed together."""
    is_whole: bool = False
    """The client wants a text that is streamed here in one piece."""

    def content(self, model: str) -> bytes:
        """Return the body for llama.cpp, with the name of the model that answers."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        changes = streamed if self.is_whole else {}
        return json.dumps(self.body | changes | {"model": model}).encode()


@dataclass(frozen=True)
class RequestReader:
    """Reads the bodies of requests, by one thread at a time. Close it.

    Raises ConfigurationError if the chat template is none. Its methods raise ApiError for what
    cannot be passed on, with the field that is wrong.
    """

    tokens: RunTokens
    chat_template: str
    paths: int
    context: int
    most_answers: int
    """How many answers one request may ask for."""
    _bias: list[list[Any]] = field(init=False)
    _template: ChatTemplate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_template", ChatTemplate(self.chat_template))
        # llama.cpp's way to say that a token is never chosen.
        never = [[token, False] for token in self.tokens.never_chosen]
        object.__setattr__(self, "_bias", never)

    def close(self) -> None:
        """End the processes that cut texts into tokens and fill in the template."""
        self.tokens.close()
        self._template.close()

    def completion(self, content: bytes) -> PathRequest:
        """Return a request for `/v1/completions`."""
        given = _object(content)
        prompts = self._prompts(given, "prompt")
        body = self._passed(given, _SAMPLING)
        numbers = [self._numbers(prompt, "prompt") for prompt in prompts]
        body["prompt"] = numbers if len(numbers) > 1 else numbers[0]
        return self._request(given, body, numbers)

    def embedding(self, content: bytes) -> PathRequest:
        """Return a request for `/v1/embeddings`. Vectors of two paths have nothing in common, so
        the path must be named."""
        given = _object(content)
        prompts = self._prompts(given, "input")
        if self.path_of(given.get("model")) is None and self.paths > 1:
            _refuse(
                "model",
                f"embeddings of two paths cannot be compared; name one of '{path_name(0)}' to "
                f"'{path_name(self.paths - 1)}'",
            )
        body = _scalars(given, _EMBEDDING)
        body["input"] = [self._numbers(prompt, "input") for prompt in prompts]
        return self._request(given, body, body["input"])

    def chat(self, content: bytes) -> PathRequest:
        """Return a request for `/v1/chat/completions`."""
        given = _object(content)
        messages = given.get("messages")
        if not isinstance(messages, list) or not 0 < len(messages) <= _MOST_MESSAGES:
            _refuse("messages", f"give a list of 1 to {_MOST_MESSAGES} messages")
        plain = [_plain(message, number) for number, message in enumerate(messages)]
        self._check_letters(len(json.dumps(messages, ensure_ascii=False)), "messages")
        body = self._passed(given, _SAMPLING | _CHAT)
        try:
            body["messages"] = [self._told(*pair) for pair in zip(messages, plain, strict=True)]
        except RecursionError:
            _refuse("messages", "they are nested too deeply")
        for name, most in (("tools", _MOST_SCHEMA), ("chat_template_kwargs", _MOST_SCHEMA)):
            # Clients write the empty list as a text, too.
            if given.get(name) not in (None, "", "[]", "{}"):
                said = _short(given[name], name, most)
                said = _functions(said, name) if name == "tools" else said
                try:
                    body[name] = _without_names(said, self.tokens.control_names)
                except RecursionError:
                    _refuse(name, "it is nested too deeply")
        if isinstance(given.get("tool_choice"), dict):
            body["tool_choice"] = _short(given["tool_choice"], "tool_choice", _MOST_SCHEMA)
        if isinstance(body.get("tools"), list) and len(body["tools"]) > _MOST_TOOLS:
            _refuse("tools", f"give at most {_MOST_TOOLS} tools")
        if body.get("reasoning_format") not in _REASONING_FORMATS:
            known = ", ".join(map(str, _REASONING_FORMATS[1:]))
            _refuse("reasoning_format", f"give one of {known}")
        request = self._request(given, body, None)
        self._check_filled(body, plain)
        routed_by = []
        if request.path is None:
            routed_by = [_bounded("messages", self.tokens.routed_by_chat, plain)]
        return dataclasses.replace(request, routed_by=routed_by)

    def _check_filled(self, body: Mapping[str, Any], plain: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a chat of which the template makes too much: nothing bounds it in llama.cpp."""
        messages = [
            {**message, "content": own["content"]}
            for message, own in zip(body["messages"], plain, strict=True)
        ]
        try:
            text = self._template.render(
                messages, self.tokens.special_names, tools=body.get("tools")
            )
        except SlowTemplateError as error:
            _refuse("messages", f"the chat template refuses them: {error}")
        except TemplateError:
            return  # llama.cpp says why, or its template engine can do more than ours
        self._check_letters(len(text), "messages")

    def _told(self, message: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as llama.cpp and the template take it, without what is null."""
        message = _said(message)
        if message.get("tool_calls"):
            message["tool_calls"] = _functions(message["tool_calls"], "messages")
            message.setdefault("content", None)
        else:
            message.pop("tool_calls", None)
            message.setdefault("content", plain["content"])
        if message["role"] == "developer" and "developer" not in self.chat_template:
            message = message | {"role": "system"}
        return {
            key: value if key == "role" else _without_names(value, self.tokens.control_names)
            for key, value in message.items()
        }

    def path_of(self, model: Any) -> int | None:
        """Return the path of a model's name, None for `auto`."""
        if model in (None, "", AUTO):
            return None
        if isinstance(model, str):
            number = model.removeprefix(_PATH)
            if number.isascii() and number.isdecimal() and len(number) < 10:
                path = int(number)
                if path_name(path) == model and path < self.paths:
                    return path
        raise ApiError(
            404,
            f"there is no model '{str(model)[:80]}'; give '{AUTO}', or one of '{path_name(0)}' to "
            f"'{path_name(self.paths - 1)}'",
            parameter="model",
            code="model_not_found",
        )

    def _request(
        self, given: Mapping[str, Any], body: dict[str, Any], prompts: list[list[int]] | None
    ) -> PathRequest:
        """Return a request for the answers to prompts; None is a chat, which is routed later."""
        each = 1 if prompts is None else len(prompts)
        answers = body.get("n", 1)
        if not isinstance(answers, int) or not 0 < answers * each <= self.most_answers:
            _refuse("n", f"a request may be for 1 to {self.most_answers} answers (--parallel)")
        path = self.path_of(given.get("model"))
        routed_by = prompts if path is None else None
        is_whole = "input" not in body and not body.get("stream")
        return PathRequest(body, path, routed_by or [], answers * each, is_whole)

    def _passed(self, given: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """Return the fields that both kinds of text have in common, except the text."""
        for name, neutral in _NOT_DONE.items():
            if given.get(name) not in neutral:
                raise ApiError(
                    400, f"{name} is not supported; leave it out", parameter=name,
                    code="unsupported",
                )  # fmt: skip
        body = _scalars(given, names)
        for name in ("logprobs", "top_logprobs", "n_probs"):
            if name in body and not 0 <= _number(body[name], name) <= _MOST_LIKELY:
                _refuse(name, f"at most {_MOST_LIKELY} tokens are shown beside each")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            # llama.cpp takes memory for as many tokens as it is told to look back at.
            if name in body and _number(body[name], name) > self.context:
                body[name] = self.context
        if not body.get("logprobs") and not body.get("top_logprobs"):
            # Clients say in both ways that they want none.
            body.pop("logprobs", None)
            body.pop("top_logprobs", None)
        checks: dict[str, Callable[[Any], Any]] = {
            "stop": _stops,
            "samplers": lambda value: _texts(value, "samplers", _MOST_SAMPLERS),
            "stream_options": lambda value: _short(value, "stream_options", 256),
            "grammar": lambda value: _short(value, "grammar", _MOST_GRAMMAR),
            "json_schema": lambda value: _short(value, "json_schema", _MOST_SCHEMA),
            "response_format": lambda value: _short(value, "response_format", _MOST_SCHEMA),
        }
        for name, check in checks.items():
            if given.get(name) is not None:
                body[name] = check(given[name])
        body["logit_bias"] = [*self._bias, *_biases(given.get("logit_bias"))]
        return body

    def _prompts(self, given: Mapping[str, Any], name: str) -> list[str | list[int]]:
        """Return the prompts of a request, texts or tokens."""
        value = given.get(name)
        prompts: list[Any] = value if isinstance(value, list) else [value]
        if prompts and all(type(one) is int for one in prompts):
            prompts = [prompts]
        if not 0 < len(prompts) <= self.most_answers:
            _refuse(name, f"give 1 to {self.most_answers} texts (--parallel)")
        for one in prompts:
            if isinstance(one, str):
                self._check_letters(len(one), name)
            elif isinstance(one, list) and one and all(type(token) is int for token in one):
                self._check_tokens(len(one), name)
                if not 0 <= min(one) <= max(one) < self.tokens.rows:
                    _refuse(name, f"a token is not one of the {self.tokens.rows} of this model")
            else:
                _refuse(name, "give a text, a list of tokens, or a list of these")
        return prompts

    def _numbers(self, prompt: str | list[int], name: str) -> list[int]:
        if isinstance(prompt, str):
            numbers = _bounded(name, self.tokens.of_text, prompt)
        else:
            numbers = prompt
        self._check_tokens(len(numbers), name)
        return numbers

    def _check_letters(self, letters: int, name: str) -> None:
        """Refuse what cannot fit, before it is cut into tokens."""
        if letters > max(_SHORT_LETTERS, self.context * self.tokens.longest):
            self._refuse_length(f"{letters} characters are more", name)

    def _check_tokens(self, tokens: int, name: str) -> None:
        if tokens > self.context:
            self._refuse_length(f"{tokens} tokens are more", name)

    def _refuse_length(self, found: str, name: str) -> NoReturn:
        raise ApiError(
            400,
            f"{found} than this model's context of {self.context} tokens holds; shorten {name}",
            parameter=name,
            code="context_length_exceeded",
        )


def _bounded(name: str, cut: Callable[[Any], list[int]], text: Any) -> list[int]:
    """Return the tokens of a text. Raises ApiError for one that takes too long to cut."""
    try:
        return cut(text)
    except RefusedError as error:
        _refuse(name, f"this text cannot be cut into tokens: {error}")


def path_name(path: int) -> str:
    """Return the name of a path as a model."""
    return f"{_PATH}{path}"


def _object(content: bytes) -> dict[str, Any]:
    """Return the body as an object of JSON."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number that can be read")

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits[:40])

    def whole(digits: str) -> int:
        return int(digits) if len(digits) <= _MOST_DIGITS else refuse(f"{digits[:40]}...")

    try:
        given = json.loads(content, parse_constant=refuse, parse_float=finite, parse_int=whole)
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, 'the body is no JSON object; send {"model": ..., ...}')
    return given


def _scalars(given: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the named fields that are numbers or short texts, without those that are null."""
    found = {}
    for name in names & given.keys():
        value = given[name]
        if isinstance(value, str) and len(value) > _MOST_LETTERS_OF_A_FIELD:
            _refuse(name, f"at most {_MOST_LETTERS_OF_A_FIELD} characters")
        if value is not None and not isinstance(value, list | dict):
            # JSON has one kind of numbers: 4.0 is 4.
            found[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return found


def _plain(message: Any, number: int) -> dict[str, Any]:
    """Return what routing and the bounds need from a message: its role and its text."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        _refuse("messages", f'{where}: give {{"role": ..., "content": ...}}')
    for name in _TEXTS_OF_A_MESSAGE:
        if not isinstance(message.get(name), str | None):
            _refuse("messages", f"{where}.{name}: give a text")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        texts: list[Any] = [p.get("text") if isinstance(p, dict) else None for p in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        _refuse("messages", f"{where}.content: give a text, or parts that are texts")
    return {"role": message["role"], "content": content}


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _functions(given: Any, name: str) -> list[dict[str, Any]]:
    """Return tools, or calls of them, without what is null. For those that llama.cpp cannot read it
    would say that it has failed itself."""
    found = []
    for one in given if isinstance(given, list) else [None]:
        tool = _said(one) if isinstance(one, dict) else {}
        function = tool.get("function")
        if not isinstance(function, dict) or tool.get("type") != "function":
            _refuse(name, 'a tool, or a call of one, is {"type": "function", "function": {...}}')
        said = _said(function)
        texts = (said.get("name"), said.get("description", ""), tool.get("id", ""))
        if not all(isinstance(text, str) for text in texts):
            _refuse(name, "the name, the description and the id of a function are texts")
        if not isinstance(said.get("arguments", ""), str | dict):
            _refuse(name, "the arguments of a call are a text")
        found.append({**tool, "function": said})
    return found


def _without_names(value: Any, names: Sequence[str]) -> Any:
    """Return what a message says with a zero-width space in each name of a special token: llama.cpp
    would take it for the token, and so for the template's own."""
    if isinstance(value, str):
        for name in names:
            value = value.replace(name, f"{name[0]}\u200b{name[1:]}")
        return value
    if isinstance(value, list):
        return [_without_names(one, names) for one in value]
    if isinstance(value, dict):
        return {_without_names(k, names): _without_names(one, names) for k, one in value.items()}
    return value


def _stops(value: Any) -> list[str]:
    return _texts([value] if isinstance(value, str) else value, "stop", _MOST_STOPS)


def _texts(value: Any, name: str, most: int) -> list[str]:
    is_list = isinstance(value, list) and len(value) <= most
    if not is_list or not all(
        isinstance(one, str) and 0 < len(one) <= _MOST_LETTERS_OF_A_FIELD for one in value
    ):
        _refuse(name, f"give at most {most} texts, none of them empty")
    return list(value)


def _short(value: Any, name: str, most: int) -> Any:
    if len(json.dumps(value)) > most:
        _refuse(name, f"at most {most} bytes")
    return value


def _biases(value: Any) -> list[list[Any]]:
    """Return OpenAI's biases, or llama.cpp's, as llama.cpp's."""
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if not isinstance(pairs, list) or len(pairs) > _MOST_BIASES:
        _refuse("logit_bias", f"give at most {_MOST_BIASES} tokens with a number for each")
    try:
        found = [[int(token), bias if bias is False else float(bias)] for token, bias in pairs]
        if all(math.isfinite(bias) for _, bias in found):
            return found
        raise ValueError
    except (TypeError, ValueError):
        _refuse("logit_bias", 'give {"token": number}')


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float):
        _refuse(name, "give a number")
    return float(value)


def _refuse(name: str, reason: str) -> NoReturn:
    raise ApiError(400, f"{name}: {reason}", parameter=name)
