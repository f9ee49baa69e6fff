"""Choosing the path anew every W tokens while a text is generated (section 2.4.3).

Only the modules of paths that are chosen are read or fetched, each once, as `StateSource` keeps
them. The key-value cache of one path means nothing to another (section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from dipaco.modules.errors import DipacoError
from dipaco.modules.transformer import PathModel

from .assemble import assemble_path
from .rerouter import Rerouter
from .sources import StateSource


class PathChooser:
    """Decides at the end of the prompt, but not before the tokens that the run's router sees, and
    then after every `window` tokens.

    `path` is the path in use, which begins as the rerouter's choice for the prompt. `say` gets a
    line for each change. Called by `dipaco-generate`.
    """

    def __init__(
        self,
        source: StateSource,
        rerouter: Rerouter,
        routed: int,
        prompt: Sequence[int],
        window: int,
        say: Callable[[str], None],
    ) -> None:
        self.path = routed
        self._source = source
        self._rerouter = rerouter
        self._routed = routed
        self._window = window
        self._say = say
        self._allowed = np.ones(rerouter.path_count, dtype=bool)
        self._tokens = len(prompt)
        self._next = max(self._tokens, source.plan.routing.prefix_tokens)
        if self._tokens == self._next:
            self.path = self._choice(prompt)
            self._next += window

    def of(self, model: PathModel) -> Callable[[Sequence[int]], bool]:
        """Return what `generate_tokens` asks before every token about `model`, which must hold the
        present path: whether it was given another one."""
        self._tokens -= 1  # the first question is about the prompt

        def reroute(context: Sequence[int]) -> bool:
            self._tokens += 1
            if self._tokens < self._next:
                return False
            self._next = self._tokens + self._window
            return self._move(model, self._choice(context))

        return reroute

    def _choice(self, context: Sequence[int]) -> int:
        return self._rerouter.next_path(
            context, self._routed, self.path, self._window, self._allowed
        )

    def _move(self, model: PathModel, path: int) -> bool:
        """Put a path into the model if it is another one and can be had."""
        if path == self.path:
            return False
        try:
            assemble_path(self._source, path, model=model)
        except DipacoError as error:
            self._allowed[path] = False
            self._say(f"token {self._tokens}: staying on path {self.path}; {error}")
            return False
        self._say(f"token {self._tokens}: path {self.path} -> path {path}")
        self.path = path
        return True
