"""Reading somebody's `tokenizer.json` for the first time, in a process with bounds.

It came with a run, from somebody, and its parts can loop or fill any memory. Reading one writes and
reads texts of all kinds in it. What is done within bounds there is done within them here, since it
is the same every time.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

from dipaco.base.bounded_process import BoundedProcess, RefusedError, answer_lines
from dipaco.base.errors import ConfigurationError

from .tokenizer import Tokenizer

# One of a large model is read in three seconds, on a busy machine.
READ_LIMIT_S = 60.0
_MEMORY_BYTES = 2 * 2**30


def check_tokenizer(blob: bytes, limit_s: float = READ_LIMIT_S) -> None:
    """Read a run's tokenizer in a process of its own. Raises ConfigurationError if it is none, or
    takes more than `limit_s` or 2 GiB of memory."""
    process = BoundedProcess(
        __name__, base64.b64encode(blob).decode(), limit_s=limit_s, first_s=limit_s
    )
    try:
        process.start()
    except RefusedError as error:
        raise ConfigurationError(f"the run's tokenizer cannot be used: {error}") from None
    finally:
        process.close()


def _begin(blob: str) -> tuple[int, Callable[[None], None]]:
    return Tokenizer(base64.b64decode(blob)).vocabulary_size, lambda question: None


if __name__ == "__main__":
    answer_lines(_MEMORY_BYTES, _begin)
