"""The exact averager: a process that meets the other trainers of a module and averages with them.

A peer has one for each level, for as long as it lives. Modules of a level have the same size, so
what a meeting is called says which module and round an averager serves
(`dipaco.peer.averaging.group`). How a group forms is `dipaco.peer.member.meeting`, carried out by
`meeting_room`; the all-reduce is `allreduce`, in which all members end with the same bits or with
nothing. This file is the host's side, `service` what runs in the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from dipaco.dht.admission import Gate
from dipaco.dht.guarded_dht import GuardedDHT, die_with_parent, own_future_locks
from dipaco.modules.command_line import shown_bytes
from dipaco.modules.errors import NetworkError
from dipaco.modules.outer import (
    UNKNOWN,
    AveragingRule,
    Contribution,
    Usual,
    canonical_table,
)
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.peer.member.gathering import meeting_times
from dipaco.peer.owner.uplink import Uplink
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import switch_to_uvloop

from .bounded_p2p import BoundedP2P, greatest_message_bytes
from .codec import PartCodec, is_finite
from .commitment import merkle_root, nodes_of
from .group import BadRowError, GatherRow, GroupRules, meeting_key
from .own_process import become_quiet, interrupts_held_back
from .parts import AveragingFailed, AveragingOutcome, AveragingRequest
from .service import AveragingService
from .verdicts import Signing

__all__ = ["AveragingFailed", "AveragingOutcome", "ExactAverager"]

logger = logging.getLogger(__name__)

# Of a peer whose upload nobody has measured.
DEFAULT_BANDWIDTH_MBIT = 100
# Seconds that the averager's process may take to say that it gave up in time.
_GRACE_S = 2.0
# Who is still busy with what it was told to give up so long ago is busy for ever.
HANG_S = 15.0


class ExactAverager(multiprocessing.Process):
    """Averages outer gradients of one level's modules; see the module's text.

    :param dht: this peer's DHT, already running
    :param prefix: `averager_prefix(run_id, level)`, the same on every peer
    :param size: elements of a module of this level
    :param rule: how contributions become an average, the same on every peer
    :param matchmaking_s: seconds in which a group forms, `RoundsConfig.matchmaking_s`
    :param paths_of_module: for each module of the level, the paths through it
    :param silence_s: a member that sends nothing for this long has failed
    :param replaces: `listens_at` of one that has ended without a word, whose place this one takes
    :param bandwidth_mbit: upload of this peer, in place of what the uplink says of it; members
        reduce the more, the faster they are
    :param uplink: what all processes of this peer may send
    :param signing: signs with this peer's key; without it reducers are not checked
    :param gate: of a run by invitation: who may come to a group
    :param admission: this peer's, in such a run
    :param start: start the process now; otherwise call `run_in_background`

    Create it early, before CUDA is used, on a thread that lives as long as the peer: the process
    is forked, and ends with the thread that started it. SIGINT keeps its handler in the host and
    is ignored in the averager, which ends when it is told to or when its host does.
    """

    def __init__(
        self,
        dht: GuardedDHT,
        *,
        prefix: str,
        size: int,
        rule: AveragingRule,
        matchmaking_s: float,
        paths_of_module: Mapping[str, Collection[int]],
        silence_s: float = 30.0,
        replaces: str = "",
        bandwidth_mbit: int | None = None,
        uplink: Uplink | None = None,
        signing: Signing | None = None,
        gate: Gate | None = None,
        admission: bytes = b"",
        start: bool = True,
        shutdown_timeout: float = 3.0,
    ) -> None:
        super().__init__(daemon=True)
        self.prefix = prefix
        self._dht = dht
        self._peer_id = dht.peer_id
        self._rule = rule
        self._codec = PartCodec(rule.codec)
        self._matchmaking_s = matchmaking_s
        self._silence_s = silence_s
        self._replaces = replaces
        self._paths_of_module = {name: frozenset(paths) for name, paths in paths_of_module.items()}
        self._uplink = uplink
        self._signing = signing
        self._gate, self._admission = gate, admission
        self._bandwidth_mbit = bandwidth_mbit
        self._is_foretold = False
        self._scratch = torch.zeros(size, dtype=torch.float32).share_memory_()
        self._call_lock = threading.Lock()
        self._shutdown_timeout = shutdown_timeout
        self._stopped = False
        self._pending: MPFuture | None = None
        self._gave_up_s: float | None = None
        self._together = multiprocessing.Value("i", 0)
        # What this peer sends in the reduce under way; 0 while there is none.
        self._owed_bytes = multiprocessing.RawValue("d", 0.0)
        self._ends_s = multiprocessing.RawValue("d", 0.0)
        self._inner_pipe, self._outer_pipe = multiprocessing.Pipe(duplex=True)
        self._host = os.getpid()
        self._ready = MPFuture()
        if start:
            self.run_in_background()

    # In the host process.

    @property
    def peer_id(self) -> PeerID:
        """The libp2p id of this peer."""
        return self._peer_id

    def average(
        self,
        flat: torch.Tensor,
        *,
        candidates: Sequence[str],
        close_s: float,
        end_s: float,
        latest_s: float = 0.0,
        contribution: Contribution,
        module: str,
        round_index: int,
        attempt: int,
        anchor_digest: str,
        greatest_tokens: int = 2**50,
        usual: Usual = UNKNOWN,
        awaited: Callable[[], frozenset[str] | None] | None = None,
        exclude: Collection[str] = (),
        undialable: Collection[str] = (),
    ) -> AveragingOutcome:
        """Average `flat` with the candidates that come, until `close_s`.

        Called on any one thread at a time; blocks until `end_s` at most, or until `latest_s` when
        the lines of the group, as its rows state them, need that long. `flat` is never changed.
        `candidates` are peer ids in leading order, this peer among them, the same on all members
        or nearly so; who is in `exclude` is not admitted when this peer leads. Who is `undialable`
        is not called and does not lead; if that is this peer, it reduces nothing. Times are on this
        machine's clock. All come in the `matchmaking_s` before `close_s`, which is the same
        instant for all; in a later attempt, at any time before it.
        With `awaited` (fixed steps) members come at any time and `close_s` is this peer's own
        limit: the group closes when all that it returns are there, or at the limit of who leads.
        It is asked twice a second until a group is found; None gives up. `contribution` is this
        peer's row (its `peer` is the libp2p peer id), `greatest_tokens` what no row may exceed,
        `usual` what the anchor says of contributions.

        Raises AveragingFailed, which is ordinary life: no other peer came, or one of them failed.
        Raises NetworkError when the averager's process is gone, and ValueError for arguments that
        no run can have.
        """
        can_reduce = contribution.peer not in undialable
        self._check(flat, close_s, end_s)
        nodes: tuple[bytes, ...] = ()
        if self._rule.check_pieces and self._signing is not None:
            nodes = nodes_of(self._codec, self._rule, flat)
        own = replace(
            self._row(contribution, module, round_index, anchor_digest, can_reduce),
            commitment=merkle_root(nodes) if nodes else b"",
            admission=self._admission,
        )
        paths = self._paths_of_module[module]
        rules = GroupRules(own, paths, greatest_tokens, usual, self._gate)
        # What others would refuse is found here.
        try:
            rules.check_row(own.to_bytes(), self.peer_id.to_base58())
        except BadRowError as error:
            raise AveragingFailed(f"own contribution would be refused: {error.reason}") from None
        start_s, give_up_s = meeting_times(
            close_s, end_s, attempt, self._matchmaking_s, is_awaited=awaited is not None
        )
        request = AveragingRequest(
            rules=rules,
            key=meeting_key(module, round_index, attempt, anchor_digest),
            candidates=tuple(candidates),
            window_s=self._matchmaking_s,
            start_s=start_s,
            close_s=close_s,
            give_up_s=give_up_s,
            end_s=end_s,
            latest_s=max(end_s, latest_s),
            awaited=None if awaited is None else awaited() or frozenset(),
            exclude=frozenset(exclude),
            undialable=frozenset(undialable),
            nodes=nodes,
        )
        if not self._call_lock.acquire(blocking=False):
            raise RuntimeError("an averager serves one call at a time")
        if self._uplink is not None and awaited is None:
            self._uplink.expect_reduce(close_s - time.time())
        try:
            future = self._send(request, flat)
            answer = self._wait(future, end_s, awaited, module)
            rows, matchmaking_s, reduce_s, notices, culprits = answer
            average = self._scratch.clone()
        except AveragingFailed as failure:
            self._log(module, round_index, failure.notices)
            level = logging.WARNING if failure.culprits else logging.DEBUG
            logger.log(level, "%s, round %d: %s", module, round_index, failure)
            raise
        finally:
            self._call_lock.release()
        self._log(module, round_index, notices)
        table = canonical_table(Contribution(*row) for row in rows)
        return AveragingOutcome(average, table, matchmaking_s, reduce_s, culprits)

    @property
    def listens_at(self) -> str:
        """Where p2pd reaches the process; empty while it is not ready."""
        is_ready = self._ready.done() and not self._ready.exception()
        return str(self._ready.result()) if is_ready else ""

    @property
    def hangs(self) -> bool:
        """Whether the process still does what it was told to give up `HANG_S` ago, or nothing."""
        is_pending = self._pending is not None and not self._pending.done()
        since_s = self._gave_up_s
        return is_pending and since_s is not None and time.monotonic() - since_s > HANG_S

    @property
    def members_together(self) -> int:
        """Members of the group that forms, as far as this peer knows; 0 when there is none."""
        return self._together.value

    def run_in_background(self, await_ready: bool = True, timeout: float = 60.0) -> None:
        """Start the process, from any thread, without touching the host's SIGINT handler.

        Raises NetworkError when it is not ready within `timeout` seconds.
        """
        with interrupts_held_back():
            self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the process serves. Raises NetworkError when it does not."""
        until = time.monotonic() + timeout
        try:
            while not self._ready.done() and self.is_alive() and time.monotonic() < until:
                concurrent.futures.wait([self._ready], 0.5)
            self._ready.result(timeout=0.5)
        except concurrent.futures.TimeoutError:
            ended = not self.is_alive()
            self.shutdown()
            if ended:
                raise NetworkError(f"the averager {self.prefix} ended while it started") from None
            raise NetworkError(
                f"the averager {self.prefix} did not start within {timeout:g} s; "
                "is this machine overloaded? Try again"
            ) from None
        except Exception as error:
            self.shutdown()
            raise NetworkError(f"the averager {self.prefix} could not start: {error}") from error

    def shutdown(self) -> None:
        """Stop the process, in little more than `shutdown_timeout` seconds. May be repeated."""
        self._stopped = True
        if not self.is_alive():
            return
        self._tell("shutdown")
        self.join(self._shutdown_timeout)
        if self.is_alive():
            self.terminate()
            self.join(1.0)
        if self.is_alive():
            self.kill()
            self.join(1.0)

    def __del__(self) -> None:
        if getattr(self, "_host", None) == os.getpid() and self.is_alive():
            self.shutdown()

    def _row(
        self,
        contribution: Contribution,
        module: str,
        round_index: int,
        anchor_digest: str,
        can_reduce: bool,
    ) -> GatherRow:
        if module not in self._paths_of_module:
            raise ValueError(f"{module} is not a module of {self.prefix}")
        return GatherRow(
            protocol=PROTOCOL_VERSION,
            module=module,
            round_index=round_index,
            anchor=anchor_digest,
            path=contribution.path,
            peer=contribution.peer,
            tokens=contribution.tokens,
            bandwidth_mbit=self._upload_mbit() if can_reduce else 0,
        )

    def _upload_mbit(self) -> int:
        stated = self._uplink.stated_mbit_per_s if self._uplink is not None else None
        return max(1, int(self._bandwidth_mbit or stated or DEFAULT_BANDWIDTH_MBIT))

    def _check(self, flat: torch.Tensor, close_s: float, end_s: float) -> None:
        if flat.shape != self._scratch.shape or flat.dtype != torch.float32 or flat.is_cuda:
            raise ValueError(
                f"{self.prefix} averages {self._scratch.numel()} fp32 numbers in memory, "
                f"not {tuple(flat.shape)} of {flat.dtype} on {flat.device}"
            )
        if close_s >= end_s:
            raise ValueError(f"the group closes {close_s - end_s:.1f} s after the end")
        if not is_finite(flat):
            raise AveragingFailed("own outer gradient is not finite")

    def _send(self, request: AveragingRequest, flat: torch.Tensor) -> MPFuture:
        if not self.is_alive():
            raise self._death()
        if self._pending is not None and not self._pending.done():
            raise AveragingFailed("the previous averaging has not ended yet")
        # The process is idle, so nobody reads the scratch copy.
        self._scratch.copy_(flat)
        self._owed_bytes.value = self._ends_s.value = 0.0
        future: MPFuture = MPFuture()
        self._tell("begin", request, future)
        self._pending, self._gave_up_s = future, None
        return future

    def _tell(self, command: str, *arguments: Any) -> None:
        """Have the process do something; when it is gone, whoever waits for it notices."""
        with contextlib.suppress(OSError, ValueError):
            self._outer_pipe.send((command, *arguments))

    def _wait(
        self,
        future: MPFuture,
        end_s: float,
        awaited: Callable[[], frozenset[str] | None] | None,
        module: str,
    ) -> Any:
        """Wait for the process's answer, and notice when it dies."""
        reducing_s = None
        while True:
            end_s = max(end_s, self._ends_s.value)
            if reducing_s is None and self._owed_bytes.value:
                reducing_s = time.time()
            if reducing_s is not None:
                self._foretell(module, end_s - reducing_s)
            if awaited is not None:
                self._tell("expect", awaited())
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if not self.is_alive():
                    raise self._death() from None
                if time.time() > end_s + _GRACE_S:
                    self._tell("give_up")
                    self._gave_up_s = time.monotonic()
                    raise AveragingFailed("the averager does not answer") from None
            except concurrent.futures.CancelledError:
                raise AveragingFailed("the averager was stopped") from None

    def _foretell(self, module: str, time_s: float) -> None:
        """Say once that a reduce of `time_s` cannot end in time, as soon as that is known."""
        known = self._uplink.known_mbit_per_s if self._uplink is not None else None
        owed_bytes = int(self._owed_bytes.value)
        if self._is_foretold or known is None or 8e-6 * owed_bytes <= known * time_s:
            return
        self._is_foretold = True
        logger.warning(
            "%s: this outer step sends %s in %.0f s, and this line carries %s (%.2g Mbit/s, "
            "if no slower member holds it up): it will hardly end in time, and its work waits. "
            "Stop other uploads, %s, or ask the operator for longer rounds%s",
            module,
            shown_bytes(owed_bytes),
            time_s,
            shown_bytes(int(known * time_s / 8e-6)),
            known,
            self._remedy(known),
            "" if self._codec.codec.value_bytes == 1 else " or codec = blockwise8bit",
        )

    def _remedy(self, known_mbit_per_s: float) -> str:
        if self._uplink is not None and self._uplink.max_mbit_per_s is not None:
            return "raise --max-upload-mbps"
        # A line that is full makes what is said in a meeting wait.
        return f"give --max-upload-mbps {0.9 * known_mbit_per_s:.2g} to keep room for steps"

    def _death(self) -> Exception:
        if self._stopped:
            return AveragingFailed("the averager was stopped")
        return NetworkError(f"the averager {self.prefix} died; restart the peer")

    def _log(self, module: str, round_index: int, notices: Collection[str]) -> None:
        for notice in notices:
            logger.warning("%s, round %d: %s", module, round_index, notice)

    # In the averager's process.

    def run(self) -> None:
        """Serve as long as the host lives: quietly, and on one thread for arithmetic."""
        become_quiet()
        die_with_parent()
        own_future_locks()
        torch.set_num_threads(1)
        # A thread of its own has a pool of threads of its own: that of the host, which was forked
        # with it, may be unusable.
        thread = threading.Thread(target=self._serve_forever, daemon=True)
        thread.start()
        thread.join()

    def _serve_forever(self) -> None:
        switch_to_uvloop().run_until_complete(self._serve())

    async def _serve(self) -> None:
        """Do what the host says until it says to stop, or is gone."""
        loop = asyncio.get_running_loop()
        try:
            p2p = await self._dht.replicate_p2p(BoundedP2P)
            p2p.replaced = self._replaces
            p2p.limit_bytes = greatest_message_bytes(self._codec, self._rule.part_bytes)
            p2p.uplink = self._uplink
            service = AveragingService(
                p2p,
                self.prefix,
                self._scratch,
                rule=self._rule,
                codec=self._codec,
                silence_s=self._silence_s,
                tell=self._note_together,
                owe=self._note_owed,
                signing=self._signing,
            )
            await service.open()
        except Exception as error:
            logger.debug("the averager does not start", exc_info=True)
            self._ready.set_exception(error)
            return
        commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        loop.add_reader(self._inner_pipe.fileno(), self._receive, commands)
        self._ready.set_result(p2p.listens_at)
        while True:
            command, *arguments = await commands.get()
            if command == "shutdown":
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(service.close(), self._shutdown_timeout)
                return
            getattr(service, command)(*arguments)

    def _receive(self, commands: asyncio.Queue[tuple[Any, ...]]) -> None:
        """Take what the host has sent."""
        try:
            while self._inner_pipe.poll():
                commands.put_nowait(self._inner_pipe.recv())
        except (EOFError, OSError):
            commands.put_nowait(("shutdown",))

    def _note_together(self, members: int) -> None:
        self._together.value = members

    def _note_owed(self, count: int, limit_s: float) -> None:
        if self._uplink is not None:
            self._uplink.begin_reduce(count, limit_s)
        self._ends_s.value = time.time() + limit_s if count else 0.0
        self._owed_bytes.value = count
