"""Insiders among real peers: a peer process that trains like any other and attacks meanwhile.

`become` is called in that process before it starts. What its member wants to tell goes through the
insider first, which hears of every row that comes, and answers for the files that it gives away.
`tests/support/insiders` has the same attacks under the same numbers, for simulated swarms.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.validation import DHTRecord

from dipaco.base.errors import NetworkError
from dipaco.dht import dht_node as node_module
from dipaco.dht.directory import Directory
from dipaco.dht.record_validator import RecordValidator
from dipaco.modules.outer import OuterRule
from dipaco.modules.state import ModuleState, state_chunks
from dipaco.peer.exchange.served_run import ServedRun
from dipaco.peer.node.node import Node
from dipaco.peer.shell.messenger import Messenger
from dipaco.peer.shell.running_node import RunningNode
from dipaco.peer.shell.shell import Shell
from dipaco.protocol.chain.steps import Row, Step, sign_row
from dipaco.protocol.identity import Identity, load_or_create_identity
from dipaco.protocol.invitations import read_invitation
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.records import HeldState, ModuleRecord

# A row belongs here: of which module and round, and on which step.
Place = tuple[str, int, str]
# Of attack 3: silent identities, and how often they announce.
SILENT, ANNOUNCED_S, ANNOUNCED_FOR_S = 4, 2.0, 60.0
# Of attack 6: so many rows push all others of a peer out; so often in a round.
PUSHING, PUSHES, PUSH_S = 10, 6, 0.5


class Insider:
    """An admitted peer that attacks nobody; the attacks are made of it.

    :param notes: a file that gets the digest of every state that it forges
    """

    spoils: ClassVar[bool] = False
    """The state after a step with a row of its own is another one here."""

    def __init__(self, notes: Path, shell: Shell, node: Node) -> None:
        self._notes, self.shell, self.node = notes, shell, node
        self.lock = threading.RLock()
        self._hearing = ThreadPoolExecutor(1, thread_name_prefix="insider")
        self.rows: dict[Place, dict[str, Row]] = {}
        self.content: dict[str, tuple[bytes | memoryview, ...]] = {}
        """What it serves beside what a peer serves, by hash."""
        self.start()

    # -- what it learns

    def hear(self, event: e.Event) -> None:
        """Note the rows of an event, on a thread of its own. From any thread."""
        self._hearing.submit(self._note, event)

    def _note(self, event: e.Event) -> None:
        rows: tuple[Row, ...] = ()
        if isinstance(event, e.Told | e.Answered):
            rows = event.rows
        elif isinstance(event, e.Published):
            rows = (event.row,)
        for row in rows:
            place = row.module, row.round_index, row.parent
            with self.lock:
                known = self.rows.setdefault(place, {})
                is_new = row.peer not in known
                known.setdefault(row.peer, row)
                if is_new:
                    try:
                        self.on_rows(place, dict(known))
                    except Exception:
                        traceback.print_exc()

    # -- what an attack does

    @classmethod
    def before_joining(cls, folder: Path) -> None:
        """Make what is needed before the process joins, in a folder of its own."""

    def start(self) -> None:
        """Begin."""

    def told(self, action: a.Tell) -> a.Tell:
        """Return what is told in place of what its member wants to tell."""
        return action

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """A row was heard of, or is its own; `rows` are all of its place, by peer."""

    def gives(self, sha256: str) -> bool:
        """Tell whether a file is given away."""
        return True

    # -- what it can do

    @property
    def me(self) -> str:
        """Its peer id."""
        return self.node.me

    def trainers(self, module: str) -> frozenset[str]:
        """Return the peers that train a module, itself included."""
        return frozenset(self.shell.member.known.trainers(module)) | {self.me}

    def tell(self, module: str, rows: Iterable[Row] = (), steps: Iterable[Step] = ()) -> None:
        """Tell everybody that it knows."""
        peers = [p for p in self.node.exchange.connected_peers() if p != self.me]
        self.node.exchange.tell(peers, module, tuple(rows), tuple(steps))

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something in a while; nothing once the peer has left the network."""

        def do() -> None:
            with contextlib.suppress(NetworkError):
                work()

        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()

    def sign(self, row: Row) -> Row:
        """Return a row as its own."""
        return sign_row(replace(row, peer=self.me, signature=b""), self.node.identity.key)

    def forge(self, state: ModuleState) -> ModuleState:
        """Return a state with bytes of its choice, and note its digest."""
        noise = torch.randn(state.parameters.shape) * state.parameters.std()
        forged = replace(state, parameters=state.parameters + noise)
        with self._notes.open("a") as notes:
            notes.write(forged.digest + "\n")
        return forged


class ForgedState(Insider):
    """Attack 1: it proposes first with honest rows and its own, gives its file to nobody, and
    serves a state of that step with bytes of its choice."""

    spoils = True

    def told(self, action: a.Tell) -> a.Tell:
        """Keep the own rows back."""
        return replace(action, rows=tuple(row for row in action.rows if row.peer != self.me))

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Propose with every row beyond half of the group."""
        is_enough = 2 * len(rows) > len(self.trainers(place[0]))
        if self.me in rows and is_enough and len({row.state for row in rows.values()}) == 1:
            self.tell(place[0], steps=(Step.of(rows.values()),))

    def gives(self, sha256: str) -> bool:
        """Not what it has made."""
        with self.lock:
            own = [rows[self.me].file for rows in self.rows.values() if self.me in rows]
        return sha256 not in own


class _SignsForAll(RecordValidator):
    """Signs the records of further identities, too."""

    def __init__(self, key: Ed25519PrivateKey, others: Sequence[Ed25519PrivateKey]) -> None:
        super().__init__(key)
        self._others = [RecordValidator(other) for other in others]

    def sign_value(self, record: DHTRecord) -> bytes:
        """Sign with the key of the record's owner, if it is here."""
        signed = (other.sign_value(record) for other in self._others)
        return next((s for s in signed if s != record.value), super().sign_value(record))


class FalseDigests(Insider):
    """Attack 3: it and silent identities announce the newest step that it has with another digest,
    and it serves a state of that digest."""

    _identities: ClassVar[list[Identity]] = []

    @classmethod
    def before_joining(cls, folder: Path) -> None:
        """Make the identities, for which the DHT process signs."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"silent-{number}.key" for number in range(SILENT)]
        cls._identities = [load_or_create_identity(file) for file in files]
        keys = [identity.key for identity in cls._identities]
        node_module.record_validators = lambda own: [_SignsForAll(own.key, keys)]

    def start(self) -> None:
        """Let the identities come in."""
        self._silent: list[tuple[str, Directory]] = []
        node, text = self.node, self.node.plan.admission
        assert text is not None, "the run is open"
        invitation = read_invitation(text)
        for identity in self._identities:
            directory = Directory(node.dht, identity, node.run_id, node.gate)
            directory.admission = invitation.admit(identity.key, node.clock.now())
            self._silent.append((identity.peer_id, directory))
        self._forged: dict[str, ModuleState] = {}
        self.later(ANNOUNCED_S, self._announce)

    def _announce(self) -> None:
        try:
            for head in self.node.held.all():
                state = self.node.held.find(head.module, head.step) if head.version else None
                if state is None:
                    continue
                if head.step not in self._forged:
                    self._forged[head.step] = self.forge(state)
                forged = self._forged[head.step]
                self.content[forged.digest] = tuple(state_chunks(forged))
                held = HeldState.of(replace(head, digest=forged.digest))
                own = [(self.me, self.node.directory)]
                for peer, directory in (*self._silent, *own):
                    record = ModuleRecord(
                        peer_id=peer,
                        module=head.module,
                        state="serving",
                        path=None,
                        since_s=0.0,
                        round=max(0, head.round_index),
                        pinned=False,
                        reachable="direct",
                        held=held,
                    )
                    said = directory.entry("modules", record.module, record, ANNOUNCED_FOR_S)
                    if not directory.store([said]):
                        print(f"{peer}: nobody stores what it announces", flush=True)
        finally:
            self.later(ANNOUNCED_S, self._announce)


class ForeignFiles(Insider):
    """Attack 4: its rows of one module name its newest file of an earlier module, which those who
    train both have checked already. In the steps that it proposes stands its right row."""

    def may_name(self, other: str, module: str) -> bool:
        """Tell whether rows of a module name files of another."""
        return other < module

    def told(self, action: a.Tell) -> a.Tell:
        """Name another file in the own rows."""
        changed = tuple(self._changed(r) if r.peer == self.me else r for r in action.rows)
        return replace(action, rows=changed)

    def _changed(self, row: Row) -> Row:
        with self.lock:
            own = [rows[self.me] for rows in self.rows.values() if self.me in rows]
        others = [other for other in own if self.may_name(other.module, row.module)]
        found = max(others, key=lambda other: other.round_index, default=row)
        return self.sign(replace(row, file=found.file, bytes=found.bytes))


class AllForeignFiles(ForeignFiles):
    """The same, of all modules: so it tells two rows of the one that all share, too."""

    def may_name(self, other: str, module: str) -> bool:
        """Any other module."""
        return other != module


class BareQuorum(Insider):
    """Attack 5: it tells a step of its own row and of as few others as are enough, never the
    victim's, as soon as it has heard of them, every round."""

    victim = ""

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Propose as soon as there are enough."""
        module = place[0]
        others = sorted(peer for peer in rows if peer != self.me)
        if self.me not in rows or not others:
            return
        if module.startswith("L0"):
            self.victim = self.victim or others[0]
        enough = len(self.trainers(module)) // 2 + 1
        own = rows[self.me]
        chosen = [rows[p] for p in others if p != self.victim and rows[p].state == own.state]
        if len(chosen) + 1 >= enough:
            step = Step.of([own, *chosen[: enough - 1]])
            self.tell(module, rows=(own,), steps=(step,))


class PushedOut(Insider):
    """Attack 6: it tells rows of its own that name the files of honest rows, then many more, so
    that members forget the first ones; its own row comes late."""

    def told(self, action: a.Tell) -> a.Tell:
        """Tell the own row late, so that nobody has all rows early."""
        own = tuple(row for row in action.rows if row.peer == self.me)
        if own:
            gather_s = self.node.plan.rounds.gather_limit_s
            self.later(0.9 * gather_s, partial(self.tell, action.module, own))
        return replace(action, rows=tuple(row for row in action.rows if row.peer != self.me))

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Begin with the second row of a round."""
        if len(rows) == 2 and self.me in rows:
            for number in range(PUSHES):
                self.later(number * PUSH_S, partial(self._push, place, number))

    def _push(self, place: Place, push: int) -> None:
        module, round_index, _ = place
        with self.lock:
            honest = [row for peer, row in self.rows[place].items() if peer != self.me]
        naming = [
            self._on_nothing(row, round_index - 1, f"{push}{number}")
            for number, row in enumerate(honest)
            if round_index
        ]
        more = [self._on_nothing(honest[0], round_index, f"{push}x{n}") for n in range(PUSHING)]
        self.tell(module, rows=(*naming, *more))

    def _on_nothing(self, honest: Row, round_index: int, salt: str) -> Row:
        """Return an own row that names the file of an honest one, on an invented step."""
        parent = salt.encode().hex().ljust(64, "0")
        return self.sign(replace(honest, round_index=round_index, parent=parent))


INSIDERS: dict[str, type[Insider]] = {
    "1": ForgedState,
    "3": FalseDigests,
    "4": ForeignFiles,
    "4 all": AllForeignFiles,
    "5": BareQuorum,
    "6": PushedOut,
}


def become(attack: str, notes: str) -> None:
    """Make an insider of this process, whose peer was not started yet."""
    kind, found = INSIDERS[attack], list[Insider]()
    kind.before_joining(Path(notes).parent / "insider")
    start, report, tell = Shell.__init__, Shell.report, Messenger._tell
    lookup, step = ServedRun.lookup, OuterRule.step

    def started(shell: Shell, running: RunningNode, *given: Any, **options: Any) -> None:
        start(shell, running, *given, **options)
        found.append(kind(Path(notes), shell, running.node))

    def reported(shell: Shell, event: e.Event) -> None:
        for insider in found:
            insider.hear(event)
        report(shell, event)

    def told(messenger: Messenger, action: a.Tell) -> None:
        changed = found[0].told(action)
        if changed.rows or changed.steps:
            tell(messenger, changed)

    def looked_up(run: ServedRun, sha256: str) -> Any:
        for insider in found:
            if sha256 in insider.content:
                return insider.content[sha256]
            if not insider.gives(sha256):
                return None
        return lookup(run, sha256)

    def stepped(rule: OuterRule, state: ModuleState, files: Any, rows: Any, *more: Any) -> Any:
        made = step(rule, state, files, rows, *more)
        is_own = bool(found) and kind.spoils and any(r.peer == found[0].me for r in rows)
        return found[0].forge(made) if is_own else made

    Shell.__init__, Shell.report = started, reported  # type: ignore[method-assign, assignment]
    Messenger._tell, ServedRun.lookup = told, looked_up  # type: ignore[method-assign]
    OuterRule.step = stepped  # type: ignore[method-assign]
