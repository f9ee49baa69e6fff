"""Keeps this peer's records in the DHT fresh and its view of the swarm new.

One background thread publishes what this peer is and holds (`own_records`), reads what the member
wants to see of the others (its scope), looks after the `neighbours`, and sleeps for the refresh
period. Changes are published at once. All decisions read `view`, an immutable snapshot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from dipaco.base.errors import AdmissionError, DipacoError, NetworkError
from dipaco.base.patience import looks, since_start_s
from dipaco.dht.directory import Directory
from dipaco.peer.background import Background
from dipaco.peer.node.node import Node
from dipaco.protocol.coverage import Scope, bucket_count, home_bucket, scope_of
from dipaco.protocol.records import record_life_s, refresh_period_s
from dipaco.protocol.view import SwarmView

from .neighbours import Neighbours
from .own_records import OwnRecords
from .own_status import PeerStatus

logger = logging.getLogger("dipaco.peer.presence.refresher")

_STOP_TIMEOUT_S = 3.0
_DHT_LIMIT_S = 30.0
# The oldest view that is good enough while a peer waits for others.
_LOOK_OFTEN_S = 2.0
# After a refresh that failed, the next one waits so long.
_AGAIN_S = 1.0
# How often it is checked whether a refresh is due: a single long wait would not count the time of a
# sleep.
LOOK_AT_CLOCK_S = 5.0


class Refresher:
    """The background thread, see the module's docstring. Used by peers and bootstrap nodes."""

    def __init__(self, node: Node, status: PeerStatus, background: Background) -> None:
        self._node, self._background = node, background
        self._directory, self._clock = node.directory, node.clock
        self._further_records: list[Callable[[Directory], None]] = []
        self._listeners: list[Callable[[SwarmView], None]] = []
        self.period_s = refresh_period_s(node.plan.rounds)
        self._own_records = OwnRecords(node, status, record_life_s(self.period_s))
        self._neighbours = Neighbours(node, background)
        home = home_bucket(node.me, None, bucket_count(node.grid.path_count))
        self._scope = scope_of((), (home,), node.grid)
        self._further: set[int] = set()
        self._wide_view: SwarmView | None = None
        self._changed = threading.Event()
        self._wants_to_read = True
        self._read_at = since_start_s()
        self._stopping = threading.Event()
        self._refreshed = threading.Condition()
        self._refresh_count = 0
        self._failure: DipacoError | None = None
        """The error of the last refresh, if it failed."""
        self._refreshing = False
        self._withdrawing = False
        self._is_node_new = threading.Event()
        """Set when the DHT process was started again, so that it holds nothing and knows nobody."""
        self._view: SwarmView | None = None
        self._thread = background.thread("refresher", self._run)
        background.on_failure(self._wake_waiting)

    def start(self) -> None:
        """Start the thread."""
        self._node.dht.on_restart(self._on_restart)
        self._thread.start()

    def refresh_too(self, read: Callable[[Directory], None]) -> None:
        """Call `read` after each refresh, on the refresher's thread, for further records."""
        self._further_records.append(read)

    def on_view(self, listener: Callable[[SwarmView], None]) -> None:
        """Call `listener` with every new view, on the refresher's thread."""
        self._listeners.append(listener)

    @property
    def view(self) -> SwarmView:
        """Return the newest view. `refresh` has to have succeeded once."""
        if self._view is None:
            raise NetworkError("the swarm has not been read yet")
        return replace(self._view, now_s=self._clock.now())

    def watch(self, scope: Scope) -> None:
        """Read this part of the swarm from the next time on."""
        self._scope = scope

    def announce(self) -> None:
        """Publish soon, because something changed.

        With fixed steps a round may take a fraction of a second. The swarm is read again with every
        change, because a view that is several rounds old does not show whom to wait for.
        """
        if self._node.schedule.fixed_steps:
            with self._refreshed:
                self._wants_to_read = True
        self._changed.set()

    def look_often(self) -> None:
        """Read the swarm again if the view is not quite new, because something in it is awaited."""
        if since_start_s() - self._read_at > _LOOK_OFTEN_S:
            with self._refreshed:
                self._want_to_read()

    def _want_to_read(self, further: Collection[int] = ()) -> None:
        self._further.update(further)
        self._wants_to_read = True
        self._changed.set()

    def refresh(self, further: Collection[int] = ()) -> SwarmView:
        """Publish and read now, and return a view that is newer than this call.

        It covers the buckets `further` too, which `view` does not. Raises `NetworkError` when the
        DHT does not answer in time or this is stopped, what publishing or reading came to nothing
        with, and what ended the thread when it has ended.
        """
        with self._refreshed:
            # A refresh under way may have read before the caller's change: wait for the next.
            wanted = self._refresh_count + (2 if self._refreshing else 1)
            self._want_to_read(further)
            while (seen := self._refresh_count) < wanted:
                self._background.check()
                if self._stopping.is_set():
                    raise NetworkError("this peer is leaving and no longer reads the swarm")
                # A wait that ends just when it is notified says that it was not.
                if not any(
                    self._refreshed.wait(look_s) or self._refresh_count > seen
                    for look_s in looks(_DHT_LIMIT_S)
                ):
                    raise NetworkError(
                        f"the DHT did not answer for {_DHT_LIMIT_S:.0f} s; check the network and "
                        "start again"
                    )
                if self._refresh_count < wanted and not self._refreshing:
                    self._want_to_read(further)
            if self._failure is not None:
                raise self._failure
            wide = self._wide_view
        return self.view if wide is None else replace(wide, now_s=self._clock.now())

    def announce_blobs(self) -> None:
        """Publish the blobs held here at the next refresh."""
        self._own_records.announce_blobs()
        self._changed.set()

    def stop(self, *, withdraw: bool) -> None:
        """End the thread and, when leaving cleanly, say goodbye in every record. Bounded."""
        self._withdrawing = withdraw
        self._node.dht.forget(self._on_restart)
        self._stopping.set()
        self._changed.set()
        self._wake_waiting()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.info("the DHT did not take this peer's goodbye in time; its records expire")

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._refreshed:
                self._changed.clear()
                is_due = since_start_s() - self._read_at >= self.period_s
                self._refreshing = is_due or self._wants_to_read
                self._wants_to_read = False
                further, self._further = self._further, set()
            try:
                failure = None
                if self._is_node_new.is_set():
                    self._begin_anew()
                self._own_records.publish()
                if self._refreshing:
                    self._read(further)
            except AdmissionError:
                raise
            except DipacoError as error:
                failure = error
                logger.warning("could not refresh the view of the swarm: %s", error)
                if (reason := self._directory.failure) is not None:
                    raise NetworkError(
                        f"{reason}; start again to rejoin from the cache folder"
                    ) from error
            if self._refreshing:
                with self._refreshed:
                    self._refreshing, self._failure = False, failure
                    self._refresh_count += 1
                    self._refreshed.notify_all()
                self._read_at = since_start_s()
                if failure is not None:
                    # Waiting callers ask again at once, and a DHT can fail at once.
                    self._stopping.wait(_AGAIN_S)
                if not self._stopping.is_set():
                    self._neighbours.look_after(self._view)
            self._wait_until_due()
        if self._withdrawing:
            self._own_records.say_goodbye()

    def _wait_until_due(self) -> None:
        """Wait until something has changed or is to be read again: at once after a sleep, as this
        peer's records have expired."""
        while (left_s := self._read_at + self.period_s - since_start_s()) > 0.0:
            if self._changed.wait(min(left_s, LOOK_AT_CLOCK_S)):
                return

    def _on_restart(self) -> None:
        self._is_node_new.set()
        with self._refreshed:
            self._want_to_read()

    def _begin_anew(self) -> None:
        """Find the others from a node that knows nobody, and publish everything again."""
        self._is_node_new.clear()
        self._directory.say_all_again()
        self._own_records.announce_blobs()
        self._neighbours.call_again(self._view)

    def _wake_waiting(self) -> None:
        with self._refreshed:
            self._refreshed.notify_all()

    def _read(self, further: Collection[int]) -> None:
        directory, scope = self._directory, self._scope
        wide = directory.read_view(
            self._node.plan, self._node.grid, self._clock.now(), scope.with_buckets(further)
        )
        self._wide_view = wide if further else None
        self._view = wide.narrowed(scope, self._node.grid)
        self._neighbours.note_contributors(wide)
        for listener in self._listeners:
            listener(self._view)
        for read in self._further_records:
            read(directory)
