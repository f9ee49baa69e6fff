"""From events of the model thread to the bodies of OpenAI's interface, whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from .requests import ChatBody, CompletionBody, Request, path_name
from .texts import TokenNames
from .work import Began, Ended, Event, Piece, PromptScores, ScoredToken


class Choice:
    """One answer as far as it is known."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[ScoredToken] = []
        self.paths: list[int] = []
        self.reason: str | None = None
        self.generated = 0


class Reply:
    """Gathers the events of a request, and says them in the shape that was asked for.

    Choices are numbered prompt by prompt.
    """

    def __init__(self, request: Request, reply_id: str, run: str, names: TokenNames) -> None:
        self._request = request
        self._id = reply_id
        self._run = run
        self._names = names
        self._created = int(time.time())
        self._is_chat = isinstance(request.body, ChatBody)
        body = request.body
        self._echoes = isinstance(body, CompletionBody) and bool(body.echo)
        self.choices = [Choice() for _ in range(len(request.works) * request.answers)]
        self._scores: dict[int, PromptScores] = {}
        self._began: dict[int, Began] = {}
        self._led: set[int] = set()
        self._written: tuple[int, str] | None = None
        """How many prompts had begun, and the beginning of each chunk since then."""
        self.open = len(self.choices)

    def number(self, prompt: int, index: int) -> int:
        """Return the number of a choice."""
        return prompt * self._request.answers + index

    def take(self, prompt: int, event: Event) -> None:
        """Note an event."""
        match event:
            case Began():
                self._began[prompt] = event
            case PromptScores():
                self._scores[prompt] = event
            case Piece():
                choice = self.choices[self.number(prompt, event.index)]
                choice.text.append(event.text)
                choice.tokens += event.tokens
                if tuple(choice.paths[-len(event.paths) :]) != event.paths:
                    choice.paths += event.paths
            case Ended():
                choice = self.choices[self.number(prompt, event.index)]
                choice.reason, choice.generated = event.reason, event.tokens
                self.open -= 1

    # -- what is said

    def whole(self) -> dict[str, Any]:
        """Return the body of the whole answer."""
        choices = []
        for number, choice in enumerate(self.choices):
            prompt = number // self._request.answers
            text = "".join(choice.text)
            said: dict[str, Any] = {"index": number}
            if self._is_chat:
                said["message"] = {"role": "assistant", "content": text}
            else:
                said["text"] = self._prompt_text(prompt) + text
            said["logprobs"] = self._logprobs(prompt, choice.tokens, with_prompt=True)
            said["finish_reason"] = choice.reason
            said["dipaco"] = {"paths": choice.paths or self._first_path(prompt)}
            choices.append(said)
        return {**self._head(stream=False), "choices": choices, "usage": self.usage()}

    def chunks(self, prompt: int, event: Event) -> Iterator[str]:
        """Yield the chunks of a stream that an event gives, as JSON; call `take` first."""
        if isinstance(event, Began | PromptScores):
            return
        assert isinstance(event, Piece | Ended)
        number = self.number(prompt, event.index)
        if number not in self._led:
            self._led.add(number)
            if self._is_chat:
                yield self._chunk(prompt, number, {"role": "assistant", "content": ""})
            elif self._echoes:
                logprobs = self._logprobs(prompt, [], with_prompt=True)
                yield self._chunk(prompt, number, self._prompt_text(prompt), logprobs)
        if isinstance(event, Piece):
            logprobs = self._logprobs(prompt, event.tokens, with_prompt=False)
            said = {"content": event.text} if self._is_chat else event.text
            yield self._chunk(prompt, number, said, logprobs, path=event.paths[0])
        else:
            last: Any = {} if self._is_chat else ""
            yield self._chunk(prompt, number, last, reason=event.reason)

    def usage_chunk(self) -> str:
        """Return the chunk that ends a stream with `include_usage`, as JSON."""
        return self._with_head({"choices": [], "usage": self.usage()})

    def _with_head(self, rest: dict[str, Any]) -> str:
        """Return a chunk as JSON. What all have in common is written once for many of them."""
        if self._written is None or self._written[0] != len(self._began):
            head = json.dumps(self._head(stream=True))
            self._written = len(self._began), head.removesuffix("}")
        return f"{self._written[1]}, {json.dumps(rest)[1:]}"

    def usage(self) -> dict[str, int]:
        """Return how many tokens there were."""
        read = sum(len(work.tokens) for work in self._request.works)
        made = sum(choice.generated for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def headers(self) -> dict[str, str]:
        """Return headers that say which paths spoke, one for each choice."""
        paths = [
            "+".join(map(str, choice.paths or self._first_path(number // self._request.answers)))
            for number, choice in enumerate(self.choices)
        ]
        return {"x-dipaco-paths": ",".join(paths)[:1024]}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        began = [self._began[prompt] for prompt in sorted(self._began)]
        spoke = sorted({(one.path, one.states.short) for one in began})
        shown = spoke[0] if len(spoke) == 1 else None
        fingerprint = f"dipaco-{self._run[:8]}"
        if shown is not None:
            fingerprint += f"-p{shown[0]}-{shown[1]}"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": path_name(shown[0]) if shown is not None else self._request.body.model,
            "system_fingerprint": fingerprint,
            "dipaco": {
                "prompts": [
                    {
                        "path": one.path,
                        **({"mixed": list(one.paths)} if len(one.paths) > 1 else {}),
                        "routed": one.routed,
                        "modules": list(one.states.modules),
                    }
                    for one in began
                ]
            },
        }

    def _chunk(
        self,
        prompt: int,
        number: int,
        said: Any,
        logprobs: dict[str, Any] | None = None,
        *,
        reason: str | None = None,
        path: int | None = None,
    ) -> str:
        paths = self.choices[number].paths or self._first_path(prompt)
        shown = path if path is not None else paths[-1] if paths else None
        choice = {
            "index": number,
            ("delta" if self._is_chat else "text"): said,
            "logprobs": logprobs,
            "finish_reason": reason,
            "dipaco": {"path": shown},
        }
        return self._with_head({"choices": [choice]})

    def _first_path(self, prompt: int) -> list[int]:
        return [*self._began[prompt].paths] if prompt in self._began else []

    def _prompt_text(self, prompt: int) -> str:
        if not self._echoes:
            return ""
        given = self._request.prompts[prompt]
        if given is not None:
            return given
        return self._names.decode(self._request.works[prompt].tokens)

    def _logprobs(
        self, prompt: int, tokens: list[ScoredToken], *, with_prompt: bool
    ) -> dict[str, Any] | None:
        work, names = self._request.works[prompt], self._names
        if work.logprobs is None:
            return None
        if self._is_chat:
            return {"content": [self._chat_token(token) for token in tokens]}
        listed: list[tuple[str, float | None, dict[str, float] | None, int]] = []
        start = len(self._prompt_text(prompt))
        if with_prompt and self._echoes:
            scores = self._scores.get(prompt, PromptScores([])).scores
            listed.append((names.name(work.tokens[0]), None, None, 0))
            offsets = names.offsets([work.tokens[0], *(score.token for score in scores)])
            for score, offset in zip(scores, offsets[1:], strict=True):
                shown = {names.name(token): value for token, value in score.top}
                shown[names.name(score.token)] = score.logprob
                listed.append((names.name(score.token), score.logprob, shown, min(offset, start)))
        for token in tokens:
            score = token.score
            shown = {names.name(other): value for other, value in score.top}
            shown[names.name(score.token)] = score.logprob
            listed.append((names.name(score.token), score.logprob, shown, start + token.offset))
        return {
            "tokens": [one[0] for one in listed],
            "token_logprobs": [one[1] for one in listed],
            "top_logprobs": [one[2] for one in listed],
            "text_offset": [one[3] for one in listed],
        }

    def _chat_token(self, token: ScoredToken) -> dict[str, Any]:
        def shown(number: int, logprob: float) -> dict[str, Any]:
            text = self._names.text(number)
            return {
                "token": self._names.name(number),
                "logprob": logprob,
                "bytes": list(text.encode()) if text else None,
            }

        score = token.score
        return {
            **shown(score.token, score.logprob),
            "top_logprobs": [shown(other, value) for other, value in score.top],
        }
