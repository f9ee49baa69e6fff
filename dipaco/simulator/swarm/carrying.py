"""What a machine does for its member, and for the machines that call it.

Work that takes time is a generator. It yields what it waits for and is sent the answer; its outcome
is an event. All bytes come over the simulated network, from machines that really hold them.

Two things are simpler than in a real peer. Nothing is signed, because nobody can sign for another.
A file is either whole or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.member import actions, events
from dipaco.protocol.records import ProgressEntry
from dipaco.protocol.view import is_plausible_row
from dipaco.protocol.wire_sizes import ROW_BYTES

from .network import STALL_S
from .world import FILE_BYTES, SHARD_BYTES, SOUND_LOSS, STATE_BYTES

# `machine.Machine`, which stands on this file.
Machine = Any
Wait = Callable[[Callable[[Any], None]], None]
"""Something to wait for: it is begun with the function that is to hear the answer."""
Work = Generator[Wait, Any, None]
_ASK_LIMIT_S, _RETRY_S = 3.0, 2.0
# Bytes of a name in a locator on the wire.
_NAME_BYTES = 33
_HOLDERS_OF_SHARD = 4


class Carrying:
    """Carries out the actions of one machine, in one of its lives."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._world, self._network = machine, machine.world, machine.world.network
        self._between = self._world.engine.between
        self._coming: set[str] = set()
        """States that are on their way."""
        self._sources: dict[str, dict[str, None]] = {}
        """By row whose file is wanted: the peers that may have the file."""
        self._gathered: set[str] = set()
        """Rows of which the member was told that their files are here."""
        self._handlers = self._table()

    def do(self, action: actions.Action) -> None:
        """Carry an action out, or begin to."""
        handler = self._handlers.get(type(action))
        assert handler is not None, f"nobody carries out {action}"
        work = handler(action)
        if work is not None:
            self._go(work)

    def _table(self) -> Mapping[type[actions.Action], Callable[[Any], Work | None]]:
        """Return what carries out each action. As in a real shell, an action without an entry is an
        error."""
        return {
            actions.Say: self._say,
            actions.Warn: lambda action: None,  # The log has it.
            actions.Watch: self._watch,
            actions.Look: self._look,
            actions.Tell: self._tell,
            actions.Ask: self._ask,
            actions.Put: self._put,
            actions.Gather: self._gather,
            actions.Serve: self._serve,
            actions.FetchPath: self._fetch_path,
            actions.StartPath: self._start_path,
            actions.Begun: self._begun,
            actions.Move: lambda action: None,  # Coming back needs nothing that is kept.
            actions.Pause: self._pause,
            actions.Publish: self._publish,
            actions.Compute: self._compute,
            actions.FetchState: self._fetch_state,
            actions.Score: self._score,
            actions.Check: self._check,
            actions.Adopt: self._adopt,
            actions.Forget: self._forget,
            actions.CarryOn: self._carry_on,
            actions.Discard: self._discard,
            actions.Drop: self._drop,
            actions.EndRound: self._end_round,
            actions.SaveAll: self._save_all,
        }

    def _go(self, work: Work) -> None:
        """Run work from one wait to the next, to its end."""

        def hear(answer: Any) -> None:
            try:
                wait = work.send(answer)
            except StopIteration:
                return
            wait(hear)

        hear(None)

    def _sleep(self, seconds: float) -> Wait:
        return lambda hear: self._machine.later(seconds, hear, None)

    def _ask_peer(self, peer: str, verb: str, content: Any, **how: Any) -> Wait:
        """Call a peer. The answer is None if none comes in time."""
        return lambda hear: self._network.call(self._machine.peer, peer, verb, content, hear, **how)

    def _answer(self, delay_s: float, event: events.Event) -> None:
        self._machine.later(delay_s, self._machine.deliver, event)

    def _wrong(self, what: str, invariant: str = "contract") -> None:
        self._world.watch.wrong(self._machine, what, invariant)

    # -- the swarm

    def _say(self, action: actions.Say) -> None:
        self._machine.claim = action
        self._machine.publishing.publish()

    def _watch(self, action: actions.Watch) -> None:
        self._machine.scope = action.scope

    def _look(self, action: actions.Look) -> None:
        machine, conditions = self._machine, self._network.conditions
        machine.publishing.publish()
        if self._world.engine.chance(conditions.look_fails):
            self._answer(30.0, events.Failed(action, "the DHT did not answer"))
        else:
            machine.later(self._between(*conditions.look_s), machine.read, True, action.further)

    # -- the wire

    def _tell(self, action: actions.Tell) -> None:
        self.take(action.rows, action.steps)
        size_bytes = ROW_BYTES * (len(action.rows) + sum(len(step.rows) for step in action.steps))
        for peer in action.peers:
            if peer != self._machine.peer:
                self._network.tell(self._machine.peer, peer, action, size_bytes)

    def take(self, rows: Iterable[Row], steps: Iterable[Step]) -> None:
        """Keep rows, which others may ask for, and put steps into the world's book."""
        self._machine.store.add_rows(rows)
        for step in steps:
            self._world.add(step)

    def _plausible(
        self, rows: Iterable[Row], steps: Iterable[Step]
    ) -> tuple[tuple[Row, ...], tuple[Step, ...]]:
        """Check what others say, as a real shell does; keep and return what may be true."""
        plan, now_s = self._world.plan, self._machine.believed_s
        revoked = self._world.revoked

        def counts(row: Row) -> bool:
            return is_plausible_row(row, plan, now_s) and row.peer not in revoked

        kept = tuple(filter(counts, rows))
        found: list[Step] = []
        for step in steps:
            if not all(map(counts, step.rows)):
                break
            found.append(step)
        self.take(kept, found)
        return kept, tuple(found)

    def _hear(self, sender: str, said: actions.Tell) -> None:
        rows, steps = self._plausible(said.rows, said.steps)
        if rows or steps:
            keep = said.keep and steps == said.steps
            self._machine.deliver(events.Told(sender, said.module, rows, steps, keep))

    def _ask(self, action: actions.Ask) -> Work:
        content, size_bytes = (action.module, action.locator), _NAME_BYTES * len(action.locator)
        answer = yield self._ask_peer(
            action.peer, "ask", content, size_bytes=size_bytes, limit_s=_ASK_LIMIT_S
        )
        if answer is None:
            self._machine.deliver(events.Failed(action, "it does not answer"))
            return
        steps, rows, has_more, held, trains = answer
        rows, found = self._plausible(rows, steps)
        has_more = has_more and len(found) == len(steps)
        self._machine.deliver(
            events.Answered(action.peer, action.module, found, rows, has_more, held, trains)
        )

    def _put(self, action: actions.Put) -> None:
        left = iter(action.peers)
        for _ in range(action.copies):
            self._go(self._put_once(left, action.row))

    def _put_once(self, left: Iterable[str], row: Row) -> Work:
        """Have one more peer take the file; `left` is shared by all that are to."""
        for peer in left:
            if (yield self._ask_peer(peer, "put", row, size_bytes=FILE_BYTES)):
                return

    def _gather(self, action: actions.Gather) -> None:
        """Fetch files. Each is tried for a round, because its owner may not have it yet."""
        until_s = self._world.now_s + self._world.plan.rounds.duration_s
        for row in action.rows:
            if row.file in self._machine.store.files:
                self._machine.later(0.02, self._came, row)
            elif row.name in self._sources:
                self._sources[row.name].update(dict.fromkeys(action.others))
            else:
                self._sources[row.name] = dict.fromkeys((row.peer, *action.others))
                self._go(self._get(row, until_s))

    def _get(self, row: Row, until_s: float) -> Work:
        wait_s = _RETRY_S
        while row.file not in self._machine.store.files:
            answer = yield from self._first(self._sources[row.name], "get", row.file)
            # Its owner may have put it here meanwhile.
            if answer is not None or row.file in self._machine.store.files:
                break
            if self._world.now_s >= until_s:
                reason = f"none of {len(self._sources.pop(row.name))} peers gave it"
                self._machine.deliver(events.Failed(actions.Gather(row.module, (row,)), reason))
                return
            yield self._sleep(wait_s)
            wait_s *= 2
        self._came(row)

    def _came(self, row: Row) -> None:
        """Check a file that has come, and tell the member."""
        machine, module, file = self._machine, row.module, row.file
        self._sources.pop(row.name, None)
        made = self._world.files[file]
        if made.content == "garbage" or made.row.mark != row.mark or made.row.bytes != row.bytes:
            wanted = actions.Gather(module, (row,))
            machine.deliver(events.Failed(wanted, "it is no contribution", is_final=True))
            return
        machine.store.files.add(file)
        self._gathered.add(row.name)
        machine.deliver(events.Gathered(module, row))

    def _first(self, peers: Iterable[str], verb: str, content: Any) -> Generator[Wait, Any, Any]:
        """Ask one peer after the other. Return the first answer, or None if there is none."""
        left = [peer for peer in dict.fromkeys(peers) if peer != self._machine.peer]
        if not left:
            yield self._sleep(0.1)
        while left:
            answer = yield self.fetch(left, verb, content)
            if answer is not None:
                return answer
        return None

    def fetch(self, left: list[str], verb: str, content: Any) -> Wait:
        """Take one of the peers that are left off the list, and ask it."""
        return self._ask_peer(left.pop(0), verb, content)

    def _serve(self, action: actions.Serve) -> None:
        store = self._machine.store
        if not store.serve(action.module, action.step, action.steps):
            self._wrong(f"serves a chain of {action.module} that stands on nothing here")
        elif action.steps:
            store.prune(action.module, action.steps[-1].round_index)

    # -- a path

    def _fetch_path(self, action: actions.FetchPath) -> Work:
        path, machine = action.path, self._machine
        is_here = path in machine.store.shards
        if is_here:
            yield self._sleep(self._between(0.05, 0.5))
        elif self._world.engine.chance(self._network.conditions.path_fails):
            yield self._sleep(self._between(1.0, STALL_S))
        else:
            is_here = yield from self._first(self._holders_of_shard(path), "shard", path)
        if is_here:
            machine.store.shards.add(path)
            machine.deliver(events.PathReady(path))
        else:
            reason = f"could not fetch the shard of path {path}"
            machine.deliver(events.Failed(action, reason))

    def _holders_of_shard(self, path: int) -> list[str]:
        holders = [
            machine.peer
            for machine in self._world.machines.values()
            if machine is not self._machine and path in machine.store.shards
        ]
        self._world.engine.random.shuffle(holders)
        # Peers that can be called come first: a real peer knows who they are.
        links = self._network.links
        holders.sort(key=lambda peer: not links[peer].can_be_called)
        return holders[:_HOLDERS_OF_SHARD]

    def _start_path(self, action: actions.StartPath) -> None:
        machine = self._machine
        if tuple(h.module for h in action.heads) != self._world.grid.modules_of_path(action.path):
            self._wrong(f"path {action.path} starts with states of other modules")
            return
        machine.lose_all("move")
        machine.path = action.path
        for head in action.heads:
            if machine.store.find(head.module, head.step) is None:
                self._wrong(f"starts from a state of {head.module} that is not here")
            machine.start_work(head.module, head.step)
            machine.store.hold(head, save=False)
            self._world.watch.holds(machine, head)
        self._world.watch.started(machine)
        machine.publishing.publish()

    def _carry_on(self, action: actions.CarryOn) -> None:
        self._world.watch.carried_on(self._machine)

    def _pause(self, action: actions.Pause) -> None:
        self._machine.lose_all("pause")

    def _begun(self, action: actions.Begun) -> None:
        self._machine.round_index = action.round_index

    def _publish(self, action: actions.Publish) -> Work:
        machine, module, path = self._machine, action.module, self._machine.path
        work = machine.works.get(module)
        if work is None or path is None or work.anchor != action.parent:
            self._wrong(f"publishes {module}, which it does not train from {action.parent[:8]}")
            return
        work.snapshot = machine.tokens
        delay_s = self._between(0.05, 0.5)
        if work.snapshot == work.base:
            self._answer(delay_s, events.Failed(action, "nothing was trained"))
            return
        row = machine.contribute(action, path, work)
        yield self._sleep(delay_s)
        machine.store.files.add(row.file)
        self._gathered.add(row.name)
        machine.deliver(events.Published(module, row))

    # -- states

    def _compute(self, action: actions.Compute) -> Work:
        machine, store, module = self._machine, self._machine.store, action.module
        chain = [action.base.step, *(step.name for step in action.steps)]
        if chain[:-1] != [step.parent for step in action.steps]:
            self._wrong(f"computes steps of {module} that do not follow each other")
            return
        rows = [row for step in action.steps for row in step.rows]
        if not self._gathered.issuperset(row.name for row in rows):
            self._wrong(f"computes a step of {module} without its files", "files")
        base = store.find(module, action.base.step)
        if base is None and action.base.version == 0:
            base = self._world.head(action.base.step)
        states = [] if base is None else self._states_after(base, action.steps)
        if len(states) <= len(action.steps):
            reason = "the base is not here, or another state comes out than rows name"
        elif not all(row.file in store.files for row in rows):
            reason = "a file has expired"
        else:
            yield self._sleep(self._between(0.05, 0.4) * len(action.steps))
            made = states[-1]
            store.at_hand[made.step], store.computed_from[made.step] = made, states[-2]
            machine.deliver(events.StateHere(module, made))
            return
        self._answer(0.1, events.Failed(action, reason))

    def _states_after(self, base: Head, steps: tuple[Step, ...]) -> list[Head]:
        """Return `base` and the state after each step, up to the first step whose rows name another
        state than the one before it."""
        states = [base]
        for step in steps:
            if step.state != states[-1].digest:
                break
            self.take((), (step,))
            after = self._world.head_after(step.name, states[-1])
            states.append(self._machine.seen_digest(after))
        return states

    def _fetch_state(self, action: actions.FetchState) -> Work:
        machine, wanted, store = self._machine, action.head, self._machine.store
        found = store.find(wanted.module, wanted.step)
        if wanted.version == 0:
            found = self._world.head(self._world.book.genesis(wanted.module))
        if found is not None and wanted.digest in ("", found.digest):
            store.at_hand[found.step] = found
            self._answer(self._between(0.02, 0.2), events.StateHere(wanted.module, found))
            return
        place = f"{wanted.step}/{wanted.digest}"
        if place in self._coming:
            return
        self._coming.add(place)
        found = yield from self._first(action.holders, "state", wanted)
        self._coming.discard(place)
        if found is None:
            reason = f"none of {len(action.holders)} holders could serve it"
            machine.deliver(events.Failed(action, reason))
            return
        store.at_hand[found.step] = found
        machine.deliver(events.StateHere(wanted.module, found))

    def _score(self, action: actions.Score) -> None:
        machine, world = self._machine, self._world
        found = {head.module: machine.store.find(head.module, head.step) for head in action.heads}
        losses = {module: world.loss(head) for module, head in found.items() if head is not None}
        if losses.keys() != found.keys():
            self._wrong(f"scores states of path {action.path} that are not here")
            return
        with_genesis = {m: max({**losses, m: SOUND_LOSS}.values()) for m in action.modules}
        loss = max(losses.values())
        machine.answers.append(events.Scored(action.heads, loss, with_genesis))

    def _check(self, action: actions.Check) -> None:
        machine, world = self._machine, self._world
        checked = machine.store.find(action.module, action.step)
        anchor = machine.store.held.get(action.module)
        if checked is None or anchor is None or action.module not in machine.works:
            self._wrong(f"checks a state of {action.module} that is not here, or not in training")
            return
        losses = world.loss(anchor), world.loss(checked), SOUND_LOSS
        machine.answers.append(events.Checked(action.module, action.step, *losses))

    def _adopt(self, action: actions.Adopt) -> None:
        machine, head = self._machine, action.head
        work, found = machine.works.get(head.module), machine.store.find(head.module, head.step)
        if found is None or found.digest != head.digest:
            self._wrong(f"adopts a state of {head.module} that is not at hand", "files")
            return
        machine.store.hold(head, save=True)
        self._world.watch.holds(machine, head)
        if work is not None:
            work.anchor, work.base = head.step, work.snapshot
            self._world.watch.adopted(machine, action)
        machine.publishing.publish()

    def _forget(self, action: actions.Forget) -> None:
        self._machine.store.at_hand.pop(action.step, None)

    def _discard(self, action: actions.Discard) -> None:
        machine, work = self._machine, self._machine.works.get(action.module)
        if work is not None:
            self._world.watch.ended(machine, action.module, "discard")
            machine.start_work(action.module, work.anchor)
            self._world.watch.started(machine)

    def _drop(self, action: actions.Drop) -> None:
        self._machine.store.drop(action.module)
        self._machine.publishing.publish()

    def _end_round(self, action: actions.EndRound) -> None:
        machine = self._machine
        machine.round_index = action.next_round
        if machine.path is not None:
            machine.progress[machine.path] = ProgressEntry.model_construct(
                path=machine.path,
                last_round=action.round_index,
                tokens=machine.tokens,
                validation_nll=3.0,
                validation_tokens=1,
                train_loss=3.0,
            )
        machine.publishing.publish()

    def _save_all(self, action: actions.SaveAll) -> None:
        for head in list(self._machine.store.held.values()):
            self._machine.store.save(head)

    # -- being called

    def serve(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        """Answer a call."""
        store = self._machine.store
        if verb == "tell":
            self._hear(caller, content)
        if verb == "ask":
            answer = store.answer(*content)
            rows = len(answer[1]) + sum(len(step.rows) for step in answer[0])
            return (*answer, content[0] in self._machine.works), ROW_BYTES * rows
        if verb == "get" and content in store.files:
            return content, FILE_BYTES
        if verb == "state":
            head = store.served_state(content.module, content.step)
            if head is not None and content.digest in ("", head.digest):
                return head, STATE_BYTES
        if verb == "shard" and content in store.shards:
            return True, SHARD_BYTES
        if verb == "put":
            return self._put_here(caller, content), 0
        return None, 0

    def _put_here(self, caller: str, row: Row) -> bool:
        """Take in the file of another peer, and its row."""
        store = self._machine.store
        rows, _ = self._plausible((row,), ())
        if rows and row.file not in store.files:
            store.files.add(row.file)
            self._machine.deliver(events.Told(caller, row.module, rows))
        return bool(rows)
