"""Work on what strangers wrote, in a process of its own with a limit of time and of memory.

It reads a line of JSON and answers with one. A process that computes too long, or that asks for too
much memory, is ended, and the next question starts another one. What counts is the time of its
processor: on a busy machine an answer may take long, and nobody is refused for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

# For starting Python, before anything is asked.
_START_S = 30.0
# The part of a processor that a process gets on a busy machine, or the wait for it ends.
_LEAST_SHARE = 0.05
# Each thread of a library takes addresses, which are what is limited.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_MOST_LETTERS_OF_A_REASON = 500


class RefusedError(Exception):
    """The process says why it does not answer."""


class OverBoundError(RefusedError):
    """The process was ended, because the answer takes too long or too much memory."""


class BoundedProcess:
    """The process of a module whose main program is `answer_lines`. One thread at a time asks it.

    :param first: told to each new process, whose answer is `first_answer`; it may take `first_s`
    """

    def __init__(self, module: str, first: Any, *, limit_s: float, first_s: float) -> None:
        self._module = module
        self._first = first
        self._limit_s = limit_s
        self._first_s = first_s
        self._process: subprocess.Popen[bytes] | None = None
        self.first_answer: Any = None

    def ask(self, question: Any) -> Any:
        """Return the answer. Raises RefusedError or OverBoundError."""
        self.start()
        return self._answer(question, self._limit_s)

    def start(self) -> None:
        """Start the process unless it is there. Raises as `ask` does."""
        if self._process is not None:
            return
        # -P: nothing in the present folder takes the place of a library.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **_ONE_THREAD},
        )  # fmt: skip
        try:
            self._answer(None, _START_S)
            self.first_answer = self._answer(self._first, self._first_s)
        except RefusedError:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _answer(self, question: Any, limit_s: float) -> Any:
        """Return the answer to a question; None waits for the process to be there."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(limit_s / _LEAST_SHARE, process.kill)
        killer.start()
        try:
            if question is not None:
                process.stdin.write(json.dumps([limit_s, question]).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            killer.cancel()
        if not line.endswith(b"\n"):  # nothing, or a part of an answer
            self.close()
            raise OverBoundError(f"it takes more than {limit_s:g} s or too much memory")
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["answer"]


def answer_lines(
    memory_bytes: int, begin: Callable[[Any], tuple[Any, Callable[[Any], Any]]]
) -> None:
    """Be such a process, until the input ends.

    `begin` takes what is said first; it returns the answer to that, and what answers the rest.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Ends the process; a parent may ignore it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _say({"answer": None})
    answer: Callable[[Any], Any] | None = None
    for line in sys.stdin.buffer:
        limit_s, question = json.loads(line)
        # The signal comes when the process has computed so long.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            if answer is None:
                found, answer = begin(question)
            else:
                found = answer(question)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is one of no public class
            reason = f"{error}"[:_MOST_LETTERS_OF_A_REASON] or type(error).__name__
            _say({"error": reason})
        else:
            _say({"answer": found})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


def _say(answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)
