"""Where paths come from: one thread that alone touches the source, so that neither requests nor
the model wait while a path is read from disk or fetched."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dipaco.inference.decoding.adapter_decoder import SharedDecoder
from dipaco.inference.decoding.engines import DecodingEngine
from dipaco.inference.decoding.mixing import MixedDecoder
from dipaco.inference.decoding.text_decoder import TextDecoder
from dipaco.inference.sources import StateSource, assemble_path, path_states
from dipaco.modules.state import ModuleState

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
    """A path was put together, or several to be mixed."""

    paths: tuple[int, ...]
    decoder: TextDecoder
    states: PathStates


@dataclass(frozen=True)
class NotLoaded:
    """A path cannot be had."""

    paths: tuple[int, ...]
    """What was asked for."""
    path: int
    """Which of them it is."""
    reason: str


@dataclass(frozen=True)
class Looked:
    """The source was looked at again; these have other states now."""

    changed: frozenset[tuple[int, ...]]
    troubles: tuple[str, ...] = ()
    """Why what is served may be old."""


News = Loaded | NotLoaded | Looked


class Loader:
    """Loads paths one after the other, and looks at the source again every `refresh_s` seconds.

    :param slots: how many texts a path gives a token together
    :param engine: makes decoders of whole paths
    :param shared: of a run with adapters, the base that paths are put on
    :param resident: what is in memory, with its digests; asked for in this thread
    :param deliver: gets the news; called in this thread
    :param refresh_s: 0 is never
    """

    def __init__(
        self,
        source: StateSource,
        device: torch.device,
        *,
        slots: int,
        engine: DecodingEngine,
        shared: SharedDecoder | None = None,
        refresh_s: float,
        resident: Callable[[], Mapping[tuple[int, ...], tuple[str, ...]]],
        deliver: Callable[[News], None],
    ) -> None:
        self._source = source
        self._device = device
        self._slots = slots
        self._engine = engine
        self._shared = shared
        self._refresh_s = refresh_s
        self._resident = resident
        self._deliver = deliver
        self._asked: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._told: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="path loader", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self, paths: tuple[int, ...]) -> None:
        """Have a path loaded, or several to be mixed; the news says what came of it."""
        self._asked.put(paths)

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

    def _load(self, paths: tuple[int, ...]) -> None:
        decoders = []
        news: News
        try:
            for path in paths:
                decoders.append(self._decoder(path))
            states = PathStates(self._digests(paths), tuple(self._shown(paths)))
            decoder = decoders[0] if len(decoders) == 1 else MixedDecoder(decoders)
            news = Loaded(paths, decoder, states)
        except Exception as error:  # whatever it is, those who wait for the path must hear of it
            logger.warning("path %d cannot be served: %s", path, error)
            reason = " ".join(str(error).split()) or type(error).__name__
            news = NotLoaded(paths, path, reason)
        finally:
            self._source.drop_states()
        self._deliver(news)

    def _decoder(self, path: int) -> TextDecoder:
        if self._shared is not None:
            return self._shared.path(path_states(self._source, path))
        model = assemble_path(self._source, path, device=self._device)
        return self._engine.decoder(model, self._slots)

    def _digests(self, paths: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(digest for path in paths for digest in self._source.digests(path))

    def _shown(self, paths: tuple[int, ...]) -> Iterator[Mapping[str, Any]]:
        """Yield what is shown of the states of some paths, once of each."""
        states: dict[str, ModuleState] = {}
        for path in paths:
            states |= path_states(self._source, path)
        for module, state in states.items():
            yield {"module": module, "version": state.version, "digest": state.digest}

    def _look(self) -> None:
        """Read what is newest and say which paths in memory have other states now."""
        changed = set()
        troubles: tuple[str, ...] = ()
        try:
            self._source.look_again()
            for paths, digests in self._resident().items():
                if self._digests(paths) != digests:
                    changed.add(paths)
                self._source.drop_states()
            troubles = self._source.troubles()
        except Exception as error:  # what is in memory is served on
            troubles = (f"the states could not be looked at again: {error}",)
        for line in set(troubles) - set(self._told):
            logger.warning("%s", line)
        self._told = troubles
        self._deliver(Looked(frozenset(changed), troubles))


_LOOK = ()
