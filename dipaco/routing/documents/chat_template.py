"""A chat template, filled in by a process of its own with a limit of time and of memory.

A template came with a checkpoint, from somebody: Jinja's sandbox keeps it from the machine, and
here it can neither loop nor grow. It gives what `apply_chat_template` of transformers gives.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dipaco.base.bounded_process import (
    BoundedProcess,
    OverBoundError,
    RefusedError,
    answer_lines,
)
from dipaco.base.errors import ConfigurationError

_MEMORY_BYTES = 2**30
# A template may not make a longer text of a chat: twice the longest request that `dipaco-serve`
# takes.
_MAX_LETTERS = 2**23
# What a template is told of today, in training and where a model is asked: the day that Llama 3.2
# takes where it is told none. Else its text would depend on the day on which a run is prepared.
_TODAY = datetime.datetime(2024, 7, 26)
# A template that goes through the parts of a content; others are written for texts alone.
_LOOKS_AT_PARTS = re.compile(r"""\bin\s+\w+(\.content|\[\s*['"]content['"]\s*\])""")


class TemplateError(Exception):
    """A template refuses messages."""


class SlowTemplateError(TemplateError):
    """A template takes too long or too much memory with messages."""


class ChatTemplate:
    """A template that is ready to be filled in, by one thread at a time.

    Raises ConfigurationError for what is no template.
    """

    def __init__(self, text: str, limit_s: float = 5.0) -> None:
        self._text = text
        self._process = BoundedProcess(
            __name__, {"template": text}, limit_s=limit_s, first_s=limit_s
        )
        try:
            self._process.start()
        except RefusedError as error:
            raise ConfigurationError(f"the chat template cannot be used: {error}") from None

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        special: Mapping[str, str],
        *,
        answer_follows: bool = True,
        tools: Any = None,
    ) -> str:
        """Return the text of a chat, by default up to where the next answer begins.

        `special` are the names of special tokens: `bos_token` and so on. Raises TemplateError.
        """
        values = {
            "messages": [self._plain(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": answer_follows,
            **special,
        }
        try:
            return str(self._process.ask(values))
        except OverBoundError as error:
            raise SlowTemplateError(str(error)) from None
        except RefusedError as error:
            raise TemplateError(str(error)) from None

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str) or _LOOKS_AT_PARTS.search(self._text):
            return dict(message)
        return {**message, "content": "".join(part["text"] for part in content)}

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return what templates are written for: as in transformers, where it is not Jinja's own."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = _json
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = _TODAY.strftime
    return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what is in it, which other programs mark as the answer."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return a block that says its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body)
        return block.set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _begin(first: Mapping[str, str]) -> tuple[None, Callable[[Mapping[str, Any]], str]]:
    """Read a template; return what fills it in with values."""
    template = _environment().from_string(first["template"])

    def filled(values: Mapping[str, Any]) -> str:
        text = template.render(values)
        if len(text) > _MAX_LETTERS:
            raise ValueError(f"it makes {len(text)} letters of them, over {_MAX_LETTERS}")
        return text

    return None, filled


if __name__ == "__main__":
    answer_lines(_MEMORY_BYTES, _begin)
