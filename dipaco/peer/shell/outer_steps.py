"""An outer round, from the boundary to the new anchor: publish, gather, step.

See design 4.2, publish, and design 4.3, gather and step:

    publish   a snapshot, between two inner steps; encoded, signed and stored meanwhile
    gather    the files of others' rows, each checked before the member hears of it
    compute   the state after a step, from the one before it and the files; or
    fetch     the state itself, where more than a few steps are missing
    check     what held-out documents say of it, where it comes from elsewhere
    adopt     it becomes the anchor, under what was trained since the snapshot

The member says which of these is due, and when. A node that trains nothing does the same for the
copies that it keeps, but for the first and the last. Everything but snapshots, checks and adoption
is done by workers, while the inner loop goes on; each reports its outcome as an event.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dipaco.base.errors import (
    ConfigurationError,
    CorpusError,
    DipacoError,
    IntegrityError,
    MachineError,
    NetworkError,
    StorageError,
)
from dipaco.base.repetition import Complaints
from dipaco.modules.contributions import MAX_SCALE, pieces
from dipaco.modules.layout import layout_of
from dipaco.modules.memory import is_out_of_memory
from dipaco.modules.state import ModuleState
from dipaco.peer.exchange.files.contribution_files import mapped
from dipaco.peer.keeping.path_files import PathFiles
from dipaco.peer.node.node import Node
from dipaco.peer.node.states import Named, head_of
from dipaco.peer.reporting.event_log import EventLog
from dipaco.protocol.chain.steps import MARK_BYTES, Head, Row, sign_row
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.taking import is_much_worse
from dipaco.protocol.view import claimed_tokens
from dipaco.training.interruption import PassInterrupted
from dipaco.training.trainer import PathTrainer, Snapshot

from .handlers import Handlers

logger = logging.getLogger("dipaco.peer.shell.outer_steps")

# Rows that a state is scored with before it is believed.
_CHECKED_ROWS = 8
# States that are fetched at the same time, copies for others included.
_FETCHED_AT_ONCE = 4
# Seconds between two complaints that there is no memory.
_COMPLAIN_AGAIN_S = 600.0
# The limit for fetching a contribution; the member does not wait for it.
_GATHER_LIMIT_S = 600.0
# How long the shell waits for what is being written when it stops.
_SAVING_LIMIT_S = 30.0
# Errors that another try does not help: a peer that cannot begin because of one ends.
_PERMANENT = (StorageError, CorpusError, ConfigurationError)


class OuterSteps:
    """Called by a shell, on its thread and the model's; reports from others.

    `files` has the run's genesis and held-out rows. `fail` hears of what keeps a path from being
    begun for good, such as a full disk. Without a `trainer` nothing is published or adopted.
    """

    def __init__(
        self,
        node: Node,
        files: PathFiles,
        events: EventLog,
        report: Callable[[e.Event], None],
        *,
        announce: Callable[[], None],
        trainer: PathTrainer | None = None,
        fail: Callable[[DipacoError], None] = lambda error: None,
    ) -> None:
        self._node, self._files, self._trainer = node, files, trainer
        self._events, self._report, self._announce, self._fail = events, report, announce, fail
        # One after the other, so that one state at a time is made, and in the order of the steps.
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="outer")
        self._fetching = ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="states")
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="saving")
        # Short writes, which do not wait for states.
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="telling")
        self._boundary_s: dict[str, float] = {}
        """When the last published round of each module ended."""
        self._coming: set[Head] = set()
        self._stopping = threading.Event()
        self._complaints = Complaints(_COMPLAIN_AGAIN_S, 1)

    def stop(self) -> None:
        """Begin nothing more; what is under way is reported to nobody."""
        self._stopping.set()
        for workers in (self._computing, self._fetching):
            workers.shutdown(wait=False, cancel_futures=True)
        # What was begun to be written is on the disk before the process ends.
        last = [workers.submit(lambda: None) for workers in (self._saving, self._telling)]
        for workers in (self._saving, self._telling):
            workers.shutdown(wait=False)
        wait(last, _SAVING_LIMIT_S)

    def handlers(self) -> Handlers:
        """Return what carries out which action, while the model may be at work."""
        return {
            a.Gather: self._gather,
            a.Compute: self._begin_to_compute,
            a.FetchState: self._begin_to_fetch,
            a.Drop: self._drop,
            a.Serve: self._begin_to_serve,
            a.Forget: self._forget,
            a.SaveAll: self._save_all,
        }

    def model_handlers(self) -> Handlers:
        """Return what carries out the actions that read or change the model."""
        return {
            a.Publish: self._take_snapshot,
            a.Score: self._score,
            a.Check: self._check,
            a.Adopt: self._adopt,
        }

    # -- publish

    def _take_snapshot(self, action: a.Publish) -> e.Event | None:
        assert self._trainer is not None
        snapshot = self._trainer.snapshot(action.module)
        self._boundary_s[action.module] = action.boundary_s
        if snapshot.anchor.digest != action.state:
            # Its gradient would belong to another state than its row says. The next step ends this.
            reason = f"the anchor is not the state after {action.parent[:12]}"
            logger.warning("%s: %s; nothing is published", action.module, reason)
            return e.Failed(action, reason)
        if not snapshot.tokens:
            return e.Failed(action, "nothing was trained")
        self._events.emit(
            "outer_round",
            module=action.module,
            round=action.round_index,
            tokens=snapshot.tokens,
            late_s=round(self._node.clock.now() - action.boundary_s, 3),
        )
        self._submit(self._computing, lambda: self._publish(action, snapshot), action)
        return None

    def _publish(self, action: a.Publish, snapshot: Snapshot) -> None:
        node, module = self._node, action.module
        gradient = snapshot.outer_gradient()
        if not all(_are_numbers(gradient[begin:end]) for begin, end in pieces(gradient.numel())):
            reason = "the local parameters are no longer numbers"
            self._report(e.Failed(action, reason, is_final=True))
            return
        data = snapshot.encode(node.rule.codec)
        unnamed = Row(
            module,
            action.round_index,
            action.parent,
            action.state,
            snapshot.path,
            node.me,
            claimed_tokens(node.plan, snapshot.tokens, action.round_index),
            "",
            MARK_BYTES + len(data),
            has_own_texts=self._files.own_texts is not None,
        )
        hasher = hashlib.sha256(unnamed.mark)
        hasher.update(data)
        row = sign_row(replace(unnamed, file=hasher.hexdigest()), node.identity.key)
        node.contributions.add(row, (row.mark, data))
        node.chains.note_rows((row,))
        self._report(e.Published(module, row))

    # -- gather

    def _gather(self, action: a.Gather) -> None:
        def done(row: Row, reason: str, is_refused: bool) -> None:
            if not reason:
                self._report(e.Gathered(row.module, row))
                return
            logger.debug("file %s of %s: %s", row.file[:12], row.module, reason)
            self._report(e.Failed(a.Gather(row.module, (row,)), reason, is_refused))

        self._node.exchange.gather(
            action.rows,
            action.others,
            check=self._check_file,
            on_done=done,
            timeout_s=min(_GATHER_LIMIT_S, self._node.plan.rounds.duration_s),
        )

    def _check_file(self, row: Row, file: Path) -> None:
        """Raise `IntegrityError` when a file is no contribution to its module."""
        node = self._node
        values = layout_of(node.grid, row.module).size
        node.rule.codec.check(mapped(file)[MARK_BYTES:], values)

    # -- compute

    def _begin_to_compute(self, action: a.Compute) -> None:
        self._submit(self._computing, lambda: self._compute(action), action)

    def _compute(self, action: a.Compute) -> None:
        node, module = self._node, action.module
        base = action.base
        state = node.held.find(module, base.step)
        if state is None and base.version == 0:
            state = self._files.genesis_state(module)
        if state is None:
            raise StorageError(f"the state after {base.step[:12]} is not here any more")
        self._tell_what_is_gone(action)
        paths, before = node.grid.paths_of_module(module), state
        for number, step in enumerate(action.steps, 1):
            if step.state != state.digest:
                raise IntegrityError(
                    f"step {step.name[:12]} stands on another state than this peer has"
                )
            files = [self._contribution(row) for row in step.rows]
            before = state
            try:
                state = node.rule.step(before, files, step.outer_rows, step.round_index, paths)
            except (IntegrityError, ValueError) as error:
                # The files have their hashes, so everybody who computes the step comes to this.
                logger.warning("%s: step %s cannot be computed: %s", module, step.name[:12], error)
                failed = replace(action, steps=action.steps[:number])
                self._report(e.Failed(failed, str(error), is_final=True))
                return
        step, weight = action.steps[-1], base.weight
        weight += sum(len(taken.rows) for taken in action.steps)
        place_before = base.step, base.weight, base.round_index
        if len(action.steps) > 1:
            last = action.steps[-2]
            place_before = last.name, weight - len(step.rows), last.round_index
        node.held.put(step.name, state, Named(head_of(before, *place_before), before))
        self._report(e.StateHere(module, head_of(state, step.name, weight, step.round_index)))

    def _tell_what_is_gone(self, action: a.Compute) -> None:
        """Report the rows whose files are gone from the disk, so that they are fetched again.

        Raises `StorageError` when there are some.
        """
        find, rows = self._node.contributions.find, [row for s in action.steps for row in s.rows]
        gone = [row for row in rows if find(row.file) is None]
        for row in gone:
            reason = f"the file of {row.peer} is not here any more"
            self._report(e.Failed(a.Gather(row.module, (row,)), reason))
        if gone:
            raise StorageError(f"{len(gone)} files of the step are not here any more")

    def _contribution(self, row: Row) -> memoryview:
        """Return the bytes of a file, which stay there when it is removed meanwhile."""
        path = self._node.contributions.find(row.file)
        if path is None:
            raise StorageError(f"the file of {row.peer} is not here any more")
        return mapped(path)[MARK_BYTES:]

    # -- fetch

    def _begin_to_fetch(self, action: a.FetchState) -> None:
        if action.head not in self._coming:
            self._coming.add(action.head)
            self._submit(self._fetching, lambda: self._fetch(action), action)

    def _fetch(self, action: a.FetchState) -> None:
        wanted, node = action.head, self._node
        module = wanted.module
        try:
            if wanted.version == 0:
                state = self._files.genesis_state(module)
            else:
                here = node.held.find(module, wanted.step)
                if here is None or here.digest != wanted.digest:
                    here = node.fetcher.state(wanted, action.holders)
                state = here
        except DipacoError as error:
            if self._trainer is not None and isinstance(error, _PERMANENT):
                self._fail(error)
            raise
        finally:
            self._coming.discard(wanted)
        if state.version != wanted.version:
            raise IntegrityError(f"it has version {state.version}, not {wanted.version}")
        node.held.put(wanted.step, state)
        head = head_of(state, wanted.step, wanted.weight, wanted.round_index)
        self._report(e.StateHere(module, head))

    # -- check

    def _score(self, action: a.Score) -> e.Scored | None:
        """Score what a path is about to begin with, beside the genesis of each module. Costs about
        an inner step. None if the peer leaves meanwhile."""
        trainer, path = self._trainer, action.path
        rows = self._files.held_out_of(path)[:_CHECKED_ROWS]
        found = {head.module: self._node.held.find(head.module, head.step) for head in action.heads}
        states = {module: state for module, state in found.items() if state is not None}
        if trainer is None or not len(rows) or states.keys() != found.keys():
            return e.Scored(action.heads, None, {})
        with_genesis = {}
        try:
            loss = trainer.loss_of(path, states, rows).loss
            for module in action.modules:
                others = {**states, module: self._files.genesis_state(module)}
                with_genesis[module] = trainer.loss_of(path, others, rows).loss or 0.0
        except PassInterrupted:
            return None
        except (NetworkError, IntegrityError) as error:
            logger.warning("what was fetched of path %d is not scored: %s", path, error)
            return e.Scored(action.heads, None, {})
        return e.Scored(action.heads, loss, with_genesis)

    def _check(self, action: a.Check) -> e.Checked | None:
        """Score a state that waits beside the anchors. None if the peer leaves meanwhile."""
        nothing = e.Checked(action.module, action.step, None, None)
        trainer, state = self._trainer, self._node.held.waiting(action.module, action.step)
        rows = self._files.validation[:_CHECKED_ROWS]
        if trainer is None or trainer.path is None or state is None or not len(rows):
            return nothing
        anchors, path = trainer.anchors(), trainer.path
        try:
            before = trainer.loss_of(path, anchors, rows).loss
            after = trainer.loss_of(path, {**anchors, action.module: state}, rows).loss
            loss_of_genesis = None
            if is_much_worse(after, before):
                # Made only now, because it takes the whole base in memory.
                genesis = self._files.genesis_state(action.module)
                others = {**anchors, action.module: genesis}
                loss_of_genesis = trainer.loss_of(path, others, rows).loss
        except PassInterrupted:
            return None
        return e.Checked(action.module, action.step, before, after, loss_of_genesis)

    # -- adopt

    def _adopt(self, action: a.Adopt) -> None:
        head, node, trainer = action.head, self._node, self._trainer
        try:
            state = node.held.hold(head)
        except KeyError:
            logger.info("%s: a copy is not kept, a newer one came at once", head.module)
            return
        self._announce()
        if trainer is not None and head.module in trainer.anchors():
            trainer.adopt(head.module, state)
            self._tell(action, state)
        else:
            self._events.emit("kept", module=head.module, version=head.version, digest=head.digest)
        # A genesis can be made of the base model again.
        keep = node.held.save if head.version else node.held.lay_down
        self._submit(self._saving, partial(keep, state))

    def _tell(self, action: a.Adopt, state: ModuleState) -> None:
        """Write to the log what was adopted: the step that ends a round, or what others made."""
        head, node = action.head, self._node
        told = {
            "module": head.module,
            "version": head.version,
            "step": head.step,
            "weight": head.weight,
            "digest": head.digest,
            "tokens": state.tokens,
        }
        if not action.is_round:
            self._events.emit("adopt", **told, is_own_in=action.is_own_in)
            return
        rows = action.step.rows if action.step is not None else ()
        late_s = node.clock.now() - self._boundary_s.get(head.module, math.inf)
        self._events.emit(
            "outer_step",
            **told,
            round=head.round_index,
            group=[row.peer for row in rows],
            paths=sorted({row.path for row in rows}),
            rows=len(rows),
            expected=action.expected,
            is_own_in=action.is_own_in,
            own_tokens=sum(row.tokens for row in rows if row.peer == node.me),
            seconds_after_boundary=round(max(0.0, late_s), 3),
        )

    # -- what is held

    def _begin_to_serve(self, action: a.Serve) -> None:
        self._submit(self._telling, lambda: self._serve(action))

    def _serve(self, action: a.Serve) -> None:
        self._node.held.serve(action.module, action.step, action.steps)
        if action.steps:
            self._node.contributions.kept.prune(action.module, action.steps[-1].round_index)

    def _forget(self, action: a.Forget) -> None:
        self._node.held.forget(action.module, action.step)

    def _save_all(self, action: a.SaveAll) -> None:
        self._submit(self._saving, self._node.held.save_all)

    def _drop(self, action: a.Drop) -> None:
        logger.info("others keep copies of %s: dropped here", action.module)
        self._node.held.drop(action.module)
        self._announce()
        self._submit(self._saving, lambda: self._node.held.remove_dropped(action.module))

    def hold(self, heads: tuple[Head, ...]) -> dict[str, ModuleState]:
        """Return the states that a path begins with, by module. Raises KeyError."""
        return {head.module: self._node.held.hold(head) for head in heads}

    # -- workers

    def _submit(
        self,
        workers: ThreadPoolExecutor,
        work: Callable[[], None],
        action: a.Action | None = None,
    ) -> None:
        def run() -> None:
            try:
                work()
                return
            except MachineError as error:
                self._fail(error)
                return
            except DipacoError as error:
                reason = str(error)
            except Exception as error:
                # Nothing that another peer sends ends this one, and the member must not wait.
                logger.debug("an outer step failed", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                if is_out_of_memory(error):
                    logger.log(
                        self._complaints.level("memory"),
                        "no memory is left for an outer step, which is left out; end other "
                        "programs, or give this peer more (ulimit, container, machine)",
                    )
            logger.info("%s: %s", getattr(action, "module", "states"), reason)
            if action is not None and not self._stopping.is_set():
                self._report(e.Failed(action, reason))

        if not self._stopping.is_set():
            workers.submit(run)


def _are_numbers(values: torch.Tensor) -> bool:
    """Tell whether values can be in a contribution; those that are no number cannot."""
    return bool((values.abs_() <= MAX_SCALE).all())
