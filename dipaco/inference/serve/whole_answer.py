"""An answer in one piece, put together from the events of its stream.

llama.cpp is always asked for a stream: only of one does it notice at once that nobody reads it any
more. While others' answers are computed, it computes the rest of a whole one for nobody, in a place
that others wait for.
"""

from __future__ import annotations

import json
from typing import Any, Final

from .api_error import ApiError

# Each event has the next part of these.
_JOINED: Final = frozenset({"text", "content", "reasoning_content", "arguments"})


class WholeAnswer:
    """Takes a stream as it comes."""

    def __init__(self) -> None:
        self._rest = b""
        """The beginning of an event that is not complete."""
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, part: bytes) -> None:
        """Take a part of the stream. Raises ApiError if it says that the answer failed."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))

    def body(self) -> bytes:
        """Return the answer as llama.cpp gives a whole one."""
        choices = [choice for _, choice in sorted(self._choices.items())]
        for choice in choices:
            if "delta" in choice:
                message = choice["message"] = choice.pop("delta")
                message["content"] = message.get("content") or ""
                for call in message.get("tool_calls", ()):
                    del call["index"]
        kind = str(self._answer.get("object", "")).removesuffix(".chunk")
        return json.dumps({**self._answer, "object": kind, "choices": choices}).encode()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ApiError(503, str(event["error"].get("message")), code="path_failed")
        for choice in event.pop("choices", ()):
            _join(self._choices.setdefault(choice["index"], {}), choice)
        self._answer |= event


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add what an event says about a choice, or about something in it."""
    for key, value in part.items():
        own = whole.get(key)
        if own is None:
            whole[key] = value
        elif value is None:
            continue
        elif isinstance(own, dict):
            _join(own, value)
        elif key == "tool_calls":
            for call in value:
                known = next((one for one in own if one["index"] == call["index"]), None)
                if known is None:
                    own.append(call)
                else:
                    _join(known, call)
        elif key in _JOINED:
            whole[key] = own + value  # of texts, and of lists of log-probabilities
        else:
            whole[key] = value
