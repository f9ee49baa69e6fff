"""The model thread: it routes prompts, keeps paths in memory by use, and lets all answers of a path
go forward together."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dipaco.inference.decoding.adapter_decoder import AdapterDecoder, shared_decoder, step_together
from dipaco.inference.decoding.engines import TORCH, DecodingEngine
from dipaco.inference.sources import StateSource
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.layout import parameter_counts
from dipaco.protocol.config import BEGIN_TOKEN
from dipaco.routing.routers.document_routing import DocumentRouter

from .errors import ApiError
from .loader import Loaded, Loader, Looked, News, NotLoaded
from .path_batch import PathBatch
from .texts import AnswerText
from .work import Answer, Failed, Work

logger = logging.getLogger(__name__)

# Prompts that are routed together, and tokens of prompts that a path reads between two steps.
_ROUTED_AT_ONCE = 32
_READ_AT_ONCE = 512
# How long a path may be waited for before another one in use takes no more answers.
_PATIENCE_S = 1.0
_WAIT_S = 0.25
# For so long a path that works alone gives tokens before the rest is looked at again.
_SPELL_S = 0.02
_END_LIMIT_S = 10.0


@dataclass(frozen=True)
class EngineLimits:
    """What the engine may take."""

    memory_bytes: int
    """For paths and their caches."""
    slots: int
    """Answers of one path that get a token together."""
    queue: int
    """Answers that may be waiting or at work."""
    refresh_s: float


class Engine:
    """Takes `Work` from any thread. Close it with `close`.

    :param engine: gives the tokens of paths that stand alone; adapters over one base have their own
    Raises ConfigurationError as `StateSource.document_router` does.
    """

    def __init__(
        self,
        source: StateSource,
        device: torch.device,
        limits: EngineLimits,
        engine: DecodingEngine = TORCH,
    ) -> None:
        self.plan, self.model = source.plan, source.model
        self.grid = source.grid
        self.tokenizer = source.tokenizer()
        self.limits = limits
        self._engine = engine
        self._router: DocumentRouter = source.document_router(device)
        shared = None
        if self.model.adapters is not None:
            shared = shared_decoder(self._router.base_model, self.model.adapters, limits.slots)
        self.base_bytes = shared.size_bytes if shared is not None else 0
        """Of a run with adapters, what its base and the caches of texts take."""
        self.path_bytes, self.capacity = self._room()
        self._inbox: queue.SimpleQueue[Work | News | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._unrouted: deque[Work] = deque()
        # By paths: one, or several that are mixed.
        self._waiting: dict[tuple[int, ...], deque[Answer]] = {}
        self._resident: dict[tuple[int, ...], PathBatch] = {}
        self._retiring: list[PathBatch] = []
        self._loading: set[tuple[int, ...]] = set()
        self.unavailable: dict[int, str] = {}
        """Paths that could not be had when they were last asked for, and why."""
        self.troubles: tuple[str, ...] = ()
        """Why what is served may be old."""
        self._ended = threading.Event()
        self._loader = Loader(
            source,
            device,
            slots=limits.slots,
            engine=engine,
            shared=shared,
            refresh_s=limits.refresh_s,
            resident=self._digests,
            deliver=self._inbox.put,
        )
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def _room(self) -> tuple[int, int]:
        """Return the bytes of a path in memory, and how many paths there is room for."""
        model, memory_bytes = self.model, self.limits.memory_bytes
        if model.adapters is None:
            parameters = base_parameter_count(model)
            path_bytes = self._engine.size_bytes(model, parameters, self.limits.slots)
            return path_bytes, max(1, memory_bytes // path_bytes)
        # Base and caches are there in any case, once; what paths share is too.
        counts = parameter_counts(self.grid)
        if 4 * counts["total"] <= memory_bytes:
            return 4 * counts["path"], self.grid.path_count
        return 4 * counts["path"], max(1, memory_bytes // (4 * counts["path"]))

    def start(self) -> None:
        """Begin."""
        self._loader.start()
        self._thread.start()

    def close(self) -> None:
        """End, and tell those who wait. Bounded."""
        self._ended.set()
        self._inbox.put(None)
        self._thread.join(_END_LIMIT_S)
        self._loader.close()

    @property
    def max_mixed(self) -> int:
        """How many paths an answer can mix."""
        most = min(self.grid.path_count, self.capacity)
        return most if self.model.adapters is None else min(most, self.limits.slots)

    @property
    def is_alive(self) -> bool:
        """Whether answers can be expected."""
        return self._thread.is_alive() and not self._ended.is_set()

    @property
    def unfinished(self) -> int:
        """Answers that are waiting or at work."""
        return self._unfinished

    def loaded(self) -> Mapping[tuple[int, ...], PathBatch]:
        """Return what is in memory, by its paths, from any thread: only what never changes may be
        read."""
        return dict(self._resident)

    def look_again(self) -> None:
        """Look for newer states at once."""
        self._loader.look_again()

    def submit(self, works: list[Work]) -> None:
        """Have prompts continued. Raises ApiError when there are too many, or the end has come."""
        answers = sum(work.answers for work in works)
        if answers > self.limits.queue:
            raise ApiError(
                400,
                f"the request is for {answers} answers at once, and this service takes "
                f"{self.limits.queue} (--queue); ask for fewer",
                code="too_many_answers",
            )
        with self._lock:
            if not self.is_alive:
                raise ApiError(503, "the service is shutting down")
            if self._unfinished + answers > self.limits.queue:
                raise ApiError(
                    503,
                    f"{self._unfinished} answers are waiting or at work, {answers} more would be "
                    f"over the limit of {self.limits.queue} (--queue); try again in a moment",
                    code="overloaded",
                    retry_after_s=1,
                )
            self._unfinished += answers
        for work in works:
            work.open_answers = work.answers
            self._inbox.put(work)

    def _digests(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        return {paths: batch.states.digests for paths, batch in self.loaded().items()}

    # -- the model thread

    def _run(self) -> None:
        error = ApiError(503, "the service is shutting down")
        try:
            while not self._ended.is_set():
                self._receive()
                self._drop_unwanted()
                self._route()
                self._load()
                self._advance()
        except Exception:
            logger.exception("the model thread ended")
            error = ApiError(503, "the service failed; its log says why. Start it again")
        finally:
            self._ended.set()
            self._refuse_all(error)

    def _receive(self) -> None:
        """Take in what came; wait for it when there is nothing else to do."""
        busy = self._unrouted or any(
            not batch.is_idle or (self._waiting.get(batch.paths) and not batch.is_draining)
            for batch in (*self._resident.values(), *self._retiring)
        )
        wait = not busy
        while True:
            try:
                item = self._inbox.get(timeout=_WAIT_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return
            wait = False
            if item is None:
                return
            if isinstance(item, Work):
                self._unrouted.append(item)
            else:
                self._hear(item)

    def _hear(self, news: News) -> None:
        match news:
            case Loaded():
                self._loading.discard(news.paths)
                self._resident[news.paths] = PathBatch(news, time.monotonic())
            case NotLoaded():
                self._loading.discard(news.paths)
                self.unavailable[news.path] = news.reason
            case Looked():
                self.unavailable.clear()
                self.troubles = news.troubles
                for paths in news.changed & self._resident.keys():
                    # Answers at work keep the states that they began with.
                    self._retiring.append(self._resident.pop(paths))

    def _drop_unwanted(self) -> None:
        """Give up what nobody waits for any more, and what took too long."""
        now_s = time.monotonic()
        late = ApiError(
            503, "the answer took longer than the service allows (--timeout-s)", code="timeout"
        )

        def unwanted(work: Work) -> bool:
            if not work.cancelled and now_s > work.deadline_s:
                self._fail(work, late)
            return work.cancelled

        for work in [work for work in self._unrouted if unwanted(work)]:
            self._unrouted.remove(work)
            self._finished(work.open_answers)
        for waiting in self._waiting.values():
            for answer in [answer for answer in waiting if unwanted(answer.work)]:
                waiting.remove(answer)
                self._finished(1)
        for batch in (*self._resident.values(), *self._retiring):
            for answer in batch.answers():
                if unwanted(answer.work):
                    batch.drop(answer)
                    self._finished(1)

    def _route(self) -> None:
        """Find the paths of new prompts."""
        works = [self._unrouted.popleft() for _ in range(min(len(self._unrouted), _ROUTED_AT_ONCE))]
        chosen = [work for work in works if work.path is None or work.mix > 1]
        if chosen:
            try:
                rankings = self._router.nearest_paths(
                    [work.routed_by or work.tokens or [BEGIN_TOKEN] for work in chosen],
                    self.grid.path_count,
                )
            except Exception as error:
                logger.warning("prompts could not be routed: %s", error)
                for work in chosen:
                    self._fail(work, ApiError(400, f"the prompt cannot be routed: {error}"))
                    self._finished(work.open_answers)
                works = [work for work in works if work not in chosen]
            else:
                for work, ranking in zip(chosen, rankings.tolist(), strict=True):
                    work.routed, work.ranking = ranking[0], ranking
                    if work.path is not None:  # that one first, then the best others
                        work.ranking = [work.path, *(p for p in ranking if p != work.path)]
        # Also a work whose client has left meanwhile, because its answers are counted.
        for work in works:
            self._begin(work)

    def _begin(self, work: Work) -> None:
        """Let the answers to a routed prompt wait for its path."""
        model = self.model
        context = work.tokens[-model.sequence_length :]
        first = work.path if work.path is not None else work.ranking[0]
        for index in range(work.answers):
            paths: tuple[int, ...] = (first,)
            if work.mix > 1:
                paths = tuple(sorted(work.ranking[: work.mix]))
            answer = Answer(
                work=work,
                index=index,
                context=list(context),
                generator=torch.Generator().manual_seed(seed_of_answer(work.sampling.seed, index)),
                text=AnswerText(self.tokenizer, work.stop),
                paths=paths,
                waiting_since_s=time.monotonic(),
            )
            self._wait_for(answer)

    def _wait_for(self, answer: Answer) -> None:
        self._waiting.setdefault(answer.paths, deque()).append(answer)

    def _load(self) -> None:
        """See to it that the paths that are waited for come into memory."""
        self._retiring = [batch for batch in self._retiring if not batch.is_idle]
        self._waiting = {paths: waiting for paths, waiting in self._waiting.items() if waiting}
        for paths in list(self._waiting):
            if not self.unavailable.keys().isdisjoint(paths):
                for answer in self._waiting.pop(paths):
                    self._go_elsewhere(answer)
        now_s = time.monotonic()
        since_s = {paths: waiting[0].waiting_since_s for paths, waiting in self._waiting.items()}
        wanted = [p for p in self._waiting if p not in self._resident and p not in self._loading]
        # The longest wait first, or two paths that are asked for all the time starve a third.
        for paths in sorted(wanted, key=since_s.__getitem__):
            if not self._make_room(len(paths), now_s - since_s[paths] > _PATIENCE_S):
                return
            self._loading.add(paths)
            self._loader.ask(paths)
        if not wanted:
            for batch in self._resident.values():
                batch.is_draining = False

    def _make_room(self, paths: int, urgent: bool) -> bool:
        """Return whether there is room for so many paths, perhaps where others were.

        If it is `urgent` and all are in use, the one that was begun with first gets no more.
        """
        by_use = sorted(self._resident.values(), key=lambda batch: batch.used_s)
        retiring = [batch.paths for batch in self._retiring]
        while True:
            held = sum(map(len, (*self._resident, *retiring, *self._loading)))
            if held + paths <= self.capacity:
                return True
            idle = (
                batch
                for batch in by_use
                if batch.is_idle
                and (batch.is_draining or not self._waiting.get(batch.paths))
                and self._resident.get(batch.paths) is batch
            )
            victim = next(idle, None)
            if victim is None:
                break
            del self._resident[victim.paths]
        # Not before it has begun an answer: paths that all wait would drive each other out.
        served = [batch for batch in by_use if batch.has_begun]
        if urgent and served and not any(batch.is_draining for batch in by_use):
            served[0].is_draining = True
        return False

    def _go_elsewhere(self, answer: Answer) -> None:
        """Find another path for an answer whose path cannot be had."""
        work = answer.work
        missing = next(path for path in answer.paths if path in self.unavailable)
        others = [path for path in work.ranking if path not in self.unavailable]
        if others and work.path not in self.unavailable:
            answer.paths = tuple(sorted(others[: work.mix]))
            self._wait_for(answer)
            return
        self._fail(
            work,
            ApiError(503, self.unavailable[missing], code="path_unavailable", parameter="model"),
        )
        self._finished(1)

    def _advance(self) -> None:
        """Let every path read a few prompts, and give its answers a token each."""
        batches = [*self._resident.values(), *self._retiring]
        # Paths over one base take each other's room: who has waited longest comes first.
        # A mixture that waits for several places is not overtaken by paths that need one.
        batches.sort(key=self._waiting_since)
        at_work, may_begin = {}, True
        for batch in batches:
            before = len(batch.answers())
            at_work[batch] = before + self._guarded(batch, partial(self._read, batch, may_begin))
            if self.model.adapters is not None and self._takes_more(batch):
                may_begin = may_begin and batch.has_room
        together = [batch for batch in batches if isinstance(batch.decoder, AdapterDecoder)]
        self._step_together(together)
        busy = [batch for batch in batches if not batch.is_idle and batch not in together]
        for batch in busy:
            self._guarded(batch, partial(self._step, batch, is_alone=busy == [batch]))
        for batch, before in at_work.items():
            failed, batch.failed = batch.failed, []
            for answer, reason in failed:
                logger.error("an answer by path %s failed", _named(batch), exc_info=reason)
                self._fail(answer.work, _path_failed(batch, reason))
            self._finished(before - len(batch.answers()))
            if before:
                batch.used_s = time.monotonic()

    def _step(self, batch: PathBatch, is_alone: bool) -> None:
        """Give the answers of a path a token; if it is alone, tokens until something happens, or
        the rest is to be looked at again."""
        until_s = time.monotonic() + _SPELL_S
        same = batch.step()
        while same and is_alone and self._inbox.empty() and time.monotonic() < until_s:
            same = batch.step()

    def _waiting_since(self, batch: PathBatch) -> float:
        waiting = self._waiting.get(batch.paths)
        return waiting[0].waiting_since_s if waiting else math.inf

    def _step_together(self, batches: Sequence[PathBatch]) -> None:
        """Give the answers of paths over one base a token each, in one step."""
        tokens = {batch: own for batch in batches if (own := batch.next_tokens())}
        if not tokens:
            return
        decoders = [batch.decoder for batch in tokens if isinstance(batch.decoder, AdapterDecoder)]
        try:
            logits = step_together(decoders, list(tokens.values()))
        except Exception as error:
            for batch in tokens:
                self._give_up(batch, error)
            return
        for batch, found in zip(tokens, logits, strict=True):
            self._guarded(batch, partial(batch.take, found))

    def _guarded(self, batch: PathBatch, act: Callable[[], int | None]) -> int:
        """Do something with a path; one that fails must not take the others with it."""
        try:
            return act() or 0
        except Exception as error:
            self._give_up(batch, error)
            return 0

    def _give_up(self, batch: PathBatch, error: Exception) -> None:
        logger.error("path %s failed", _named(batch), exc_info=error)
        for answer in batch.answers():
            self._fail(answer.work, _path_failed(batch, error))
            batch.drop(answer)

    def _takes_more(self, batch: PathBatch) -> bool:
        """Return whether answers wait for a path that takes them as soon as it has room."""
        is_current = self._resident.get(batch.paths) is batch
        return is_current and not batch.is_draining and bool(self._waiting.get(batch.paths))

    def _read(self, batch: PathBatch, may_begin: bool) -> int:
        """Let a path read prompts, of new answers if these `may_begin`; return how many came."""
        read = begun = 0
        while batch.again and read < _READ_AT_ONCE:
            read += self._reading(batch, batch.answer_again(), batch.read_again)
        while may_begin and self._takes_more(batch) and batch.has_room and read < _READ_AT_ONCE:
            answer = self._waiting[batch.paths].popleft()
            begun += 1
            read += self._reading(batch, answer, partial(batch.begin, answer))
        return begun

    def _reading(self, batch: PathBatch, answer: Answer, read: Callable[[], int]) -> int:
        """Let a path read the context of an answer; return how many tokens were read."""
        try:
            return read()
        except Exception as error:
            logger.exception("path %s failed", _named(batch))
            self._fail(answer.work, _path_failed(batch, error))
            return 0

    def _fail(self, work: Work, error: ApiError) -> None:
        if not work.cancelled:
            work.cancelled = True
            work.emit(Failed(error))

    def _finished(self, answers: int) -> None:
        with self._lock:
            self._unfinished -= answers

    def _refuse_all(self, error: ApiError) -> None:
        works = {*self._unrouted}
        works |= {answer.work for waiting in self._waiting.values() for answer in waiting}
        for batch in (*self._resident.values(), *self._retiring):
            works |= {answer.work for answer in batch.answers()}
        with self._lock:
            while True:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if isinstance(item, Work):
                    works.add(item)
        for work in works:
            self._fail(work, error)


def seed_of_answer(seed: int, index: int) -> int:
    """Return the seed of one of several answers; the first has the seed of the request."""
    return seed if index == 0 else (seed * 1_000_003 + index * 7_919) % 2**63


def _path_failed(batch: PathBatch, error: Exception) -> ApiError:
    failed = f"path {_named(batch)} failed: {type(error).__name__}"
    return ApiError(503, f"{failed}; see the service's log")


def _named(batch: PathBatch) -> str:
    return "+".join(map(str, batch.paths))
