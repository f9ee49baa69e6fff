"""A chat template, filled in by a process of its own with a limit of time and of memory.

A template came with a checkpoint, from somebody: Jinja's sandbox keeps it from the machine, and
here it can neither loop nor grow. It gives what `apply_chat_template` of transformers gives.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dipaco.base.errors import ConfigurationError

_MEMORY_BYTES = 2**30
# A template may not make a longer text of a chat: twice the longest request that `dipaco-serve`
# takes.
_MAX_LETTERS = 2**23
# For starting Python, before a template is read.
_START_S = 30.0
# A template that goes through the parts of a content; others are written for texts alone.
_LOOKS_AT_PARTS = re.compile(r"""\bin\s+\w+(\.content|\[\s*['"]content['"]\s*\])""")


class TemplateError(Exception):
    """A template refuses messages, or is too slow with them."""


class ChatTemplate:
    """A template that is ready to be filled in, by one thread at a time.

    Raises ConfigurationError for what is no template.
    """

    def __init__(self, text: str, limit_s: float = 5.0) -> None:
        self._text = text
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except TemplateError as error:
            raise ConfigurationError(f"the chat template cannot be used: {error}") from None

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        special: Mapping[str, str],
        *,
        answer_follows: bool = True,
    ) -> str:
        """Return the text of a chat, by default up to where the next answer begins.

        `special` are the names of special tokens: `bos_token` and so on. Raises TemplateError.
        """
        values = {
            "messages": [self._plain(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": answer_follows,
            **special,
        }
        if not self._lock.acquire(timeout=self._limit_s):
            raise TemplateError("others' messages are taking too long; try again")
        try:
            if self._process is None:
                self._start()
            return self._ask(values, self._limit_s)
        finally:
            self._lock.release()

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str) or _LOOKS_AT_PARTS.search(self._text):
            return dict(message)
        return {**message, "content": "".join(part["text"] for part in content)}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        # -P: nothing in the present folder takes the place of a library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._ask(None, _START_S)
            self._ask({"template": self._text}, self._limit_s)
        except TemplateError:
            self.close()
            raise

    def _ask(self, values: Mapping[str, Any] | None, limit_s: float) -> str:
        """Return the answer to some values; None waits for the process to be there."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(limit_s, process.kill)
        killer.start()
        try:
            if values is not None:
                process.stdin.write(json.dumps(values).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            killer.cancel()
        if not line.endswith(b"\n"):  # Nothing, or a part of an answer.
            self.close()
            raise TemplateError(f"it takes more than {limit_s:g} s or too much memory")
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return what templates are written for: as in transformers, where it is not Jinja's own."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = _json
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
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


def main() -> None:
    """Answer line by line: first a template, then what it is to be filled in with."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    template: jinja2.Template | None = None
    print(json.dumps({"text": ""}), flush=True)
    for line in sys.stdin.buffer:
        values = json.loads(line)
        try:
            if template is None:
                template = environment().from_string(values["template"])
                answer = {"text": ""}
            else:
                text = template.render(values)
                if len(text) > _MAX_LETTERS:
                    raise ValueError(f"it makes {len(text)} letters of them, over {_MAX_LETTERS}")
                answer = {"text": text}
        except Exception as error:  # a template may fail in any way
            answer = {"error": f"{error}"[:500] or type(error).__name__}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
