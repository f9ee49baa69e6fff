"""A conversation in a terminal: each line is answered in sight of all before it, until Ctrl+D."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import sys

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.inference import generate_command
from dipaco.inference.conversation import Conversation
from dipaco.inference.sources import DiskSource, SourceSettings
from support.runs.chat_runs import asked_tokens, chat_rows, write_chats
from support.runs.chat_templates import CHATML
from support.runs.prepared_run import on_cpu, prepare
from support.runs.tiny_run import make_tiny_run
from support.waiting import wait_until

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    prepare(write_chats(folder, chat_rows(10), CHATML), folder / "out", on_cpu())
    return folder / "out"


@pytest.fixture(scope="module")
def tokenizer(run):
    return DiskSource(run, SourceSettings(allow_genesis=True)).tokenizer()


class Terminal:
    """`dipaco-generate` in a terminal of its own: what that shows, and keys for it."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "dipaco.inference.generate_command", *map(str, words)]
        self.pid, self._keys = pty.fork()
        if self.pid == 0:
            # Tests that a shell runs in the background ignore Ctrl+C, and so would this program.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(command[0], command)
        self._shown, self._code = "", None

    def type(self, keys):
        """Press keys; what was shown before them is forgotten."""
        self._shown = ""
        os.write(self._keys, keys.encode())

    def shows(self, pattern):
        """Wait until the terminal shows a pattern, and return the match."""
        return wait_until(lambda: re.search(pattern, self._seen(), re.DOTALL), 120, lambda: self._shown)

    def ended(self):
        """Wait until the program has ended, and return its exit code."""

        def code():
            self._seen()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return [os.waitstatus_to_exitcode(status)] if pid else None

        [self._code] = wait_until(code, 120, lambda: self._shown)
        return self._code

    def close(self):
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._keys)

    def _seen(self):
        # A terminal whose program has ended cannot be read.
        with contextlib.suppress(OSError):
            while select.select([self._keys], [], [], 0)[0] and (found := os.read(self._keys, 4096)):
                self._shown += found.decode(errors="replace")
        return self._shown


@contextlib.contextmanager
def talk(run, *words):
    words = ["--state-dir", run, "--allow-genesis", "--threads", "1", "--chat", *words]
    terminal = Terminal(*words)
    try:
        yield terminal
    finally:
        terminal.close()


def test_two_turns_in_a_terminal_end_with_ctrl_d(run):
    with talk(run, "--max-tokens", "6") as terminal:
        terminal.shows(r"Ctrl\+D.*> $")
        terminal.type("ba du\n")
        terminal.shows(r"path \d \(.*\n> $")
        terminal.type("\n")
        terminal.shows(r"\n> $")
        terminal.type("de ba\n")
        assert "path" not in terminal.shows(r"de ba.*\n> $")[0]
        terminal.type(CTRL_D)
        assert terminal.ended() == 0


def test_a_model_that_only_continues_texts_holds_no_conversation(tmp_path, capsys):
    run = make_tiny_run(tmp_path / "run")
    assert generate_command.main(["--state-dir", str(run.path), "--chat"]) == 3
    assert capsys.readouterr().err.startswith("error: this model has no chat template")


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(run):
    """Greedily, this model repeats itself for ever."""
    with talk(run, "--max-tokens", str(10**9), "--temperature", "0") as terminal:
        terminal.shows("> $")
        for message in ("ba du", "de ba"):
            terminal.type(f"{message}\n")
            terminal.shows(f"{message}.*[^\n]{{200}}")
            terminal.type(CTRL_C)
            terminal.shows(r"\n> $")
        terminal.type(CTRL_C)
        assert terminal.ended() == 130


def test_an_answer_is_asked_for_in_sight_of_what_was_said(tokenizer):
    with contextlib.closing(Conversation(tokenizer)) as conversation:
        first = conversation.ask("ba du")
        routed_by = conversation.routed_by()
        conversation.answered("di <|im_end|>")
        second = conversation.ask("do")
        assert first == asked_tokens(tokenizer, "ba du")
        assert second[: len(first)] == first
        text = tokenizer.decode(second)
        assert text.index("ba du") < text.index("di <|im_end|>") < text.index("do")
        assert conversation.routed_by() == routed_by


def test_messages_of_a_pipe_are_answered_one_by_one(run, capsys, monkeypatch):
    read, write = os.pipe()
    os.write(write, b"ba du\n\xff\n")
    os.close(write)
    with open(read) as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        words = ["--state-dir", run, "--allow-genesis", "--chat", "--max-tokens", "0"]
        assert generate_command.main([*map(str, words)]) == 0
    assert capsys.readouterr().out == "\n\n"


def test_a_text_is_needed_to_continue_one(run, capsys):
    assert generate_command.main(["--state-dir", str(run)]) == ConfigurationError.exit_code
    assert "--chat" in capsys.readouterr().err


def test_an_answer_commands_no_terminal(monkeypatch):
    """Strangers have made the model, and the operator has made the tokens: it could set the clipboard."""
    for is_terminal, shown in ((True, "a?]52;c;eA==??]0;b?\té\n"), (False, "a\x1b]52;c;eA==\x07\x9b]0;b\r\té\n")):
        screen = io.StringIO()
        screen.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stdout", screen)
        generate_command._show("a\x1b]52;c;eA==\x07\x9b]0;b\r\té\n")
        assert screen.getvalue() == shown
