"""Where paths come from: one thread that alone touches the source, so that neither requests nor
the model wait while a path is read from disk or fetched."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dipaco.inference.sources import StateSource, assemble_path, path_states
from dipaco.modules.transformer import PathModel

from .packed import pack

logger = logging.getLogger(__name__)

_END_LIMIT_S = 5.0


@dataclass(frozen=True)
class PathStates:
    """Which states a path was put together from: what a client is shown of it."""

    digests: tuple[str, ...]
    """Of its modules' states."""
    modules: tuple[Mapping[str, Any], ...]
    """For each module its name, and version and digest of the state."""

    @property
    def short(self) -> str:
        """Twelve digits that name these states."""
        return "".join(digest[: max(1, 12 // len(self.digests))] for digest in self.digests)[:12]


@dataclass(frozen=True)
class Loaded:
    """A path was put together."""

    path: int
    model: PathModel
    states: PathStates


@dataclass(frozen=True)
class NotLoaded:
    """A path cannot be had."""

    path: int
    reason: str


@dataclass(frozen=True)
class Looked:
    """The source was looked at again; these paths have other states now."""

    changed: frozenset[int]
    troubles: tuple[str, ...] = ()
    """Why what is served may be old."""


News = Loaded | NotLoaded | Looked


class Loader:
    """Loads paths one after the other, and looks at the source again every `refresh_s` seconds.

    :param resident: which paths are in memory, with their digests; asked for in this thread
    :param deliver: gets the news; called in this thread
    :param refresh_s: 0 is never
    """

    def __init__(
        self,
        source: StateSource,
        device: torch.device,
        *,
        refresh_s: float,
        resident: Callable[[], Mapping[int, tuple[str, ...]]],
        deliver: Callable[[News], None],
    ) -> None:
        self._source = source
        self._device = device
        self._refresh_s = refresh_s
        self._resident = resident
        self._deliver = deliver
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._told: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="path loader", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self, path: int) -> None:
        """Have a path loaded; the news says what came of it."""
        self._asked.put(path)

    def look_again(self) -> None:
        """Look at the source at once."""
        self._asked.put(_LOOK)

    def close(self) -> None:
        """End, and close the source; a fetch under way is not waited for longer than seconds."""
        self._ended.set()
        self._asked.put(None)
        self._thread.join(_END_LIMIT_S)
        self._source.close()

    def _run(self) -> None:
        next_look_s = time.monotonic() + self._refresh_s
        while not self._ended.is_set():
            wait_s = max(0.0, next_look_s - time.monotonic()) if self._refresh_s else None
            try:
                asked = self._asked.get(timeout=wait_s)
            except queue.Empty:
                asked = _LOOK
            if asked is None:
                return
            if asked != _LOOK:
                self._load(asked)
                continue
            self._look()
            next_look_s = time.monotonic() + self._refresh_s

    def _load(self, path: int) -> None:
        try:
            news: News = Loaded(path, *self._assembled(path))
        except Exception as error:  # whatever it is, those who wait for the path must hear of it
            logger.warning("path %d cannot be served: %s", path, error)
            news = NotLoaded(path, " ".join(str(error).split()) or type(error).__name__)
        finally:
            self._source.drop_states()
        self._deliver(news)

    def _assembled(self, path: int) -> tuple[PathModel, PathStates]:
        source = self._source
        model = assemble_path(source, path, device=self._device)
        modules = [
            {"module": module, "version": state.version, "digest": state.digest}
            for module, state in path_states(source, path).items()
        ]
        return pack(model), PathStates(source.digests(path), tuple(modules))

    def _look(self) -> None:
        """Read what is newest and say which paths in memory have other states now."""
        changed = set()
        troubles: tuple[str, ...] = ()
        try:
            self._source.look_again()
            for path, digests in self._resident().items():
                if self._source.digests(path) != digests:
                    changed.add(path)
                self._source.drop_states()
            troubles = self._source.troubles()
        except Exception as error:  # what is in memory is served on
            troubles = (f"the states could not be looked at again: {error}",)
        for line in set(troubles) - set(self._told):
            logger.warning("%s", line)
        self._told = troubles
        self._deliver(Looked(frozenset(changed), troubles))


_LOOK = -1
