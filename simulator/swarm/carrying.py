"""What a machine does for its member, and for the machines that call it.

Each action has a method; what takes time is answered later by an event. All bytes come over the
simulated network, from machines that really hold them.

What is simplified: a certificate is checked by comparing signatures with the one that the signer
would make. Held-out losses are those of a sound state or of an invented one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dipaco.dht.certificates import Certificate
from dipaco.dht.records import ProgressEntry
from dipaco.modules.outer import Contribution, Usual, bounded_table
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions, events

from .averaging import Averaging
from .fetching import Fetching
from .network import CALL_BYTES, Reply
from .signing import CERTIFICATE_BYTES, Signing
from .work import Content, ModuleWork, SimulatedState, signature
from .world import Body

SHARD_BYTES = 4_000_000
ASK_LIMIT_S = 3.0
HONEST_LOSS, INVENTED_LOSS = 3.0, 11.0


class Carrying:
    """Of one life of one machine."""

    def __init__(self, machine: Body) -> None:
        self._machine = machine
        self._world = machine.world
        self.averaging = Averaging(machine, self._averaged)
        self.fetching = Fetching(machine)
        self.signing = Signing(machine)
        self._unheard: set[str] = set()
        """Digests of offers that the member has not been told of yet."""
        self._averages: dict[
            tuple[str, int], tuple[tuple[Contribution, ...], dict[str, Content]]
        ] = {}
        self._computed: dict[str, SimulatedState] = {}
        self._offers: dict[str, list[Reply]] = {}
        self._methods: dict[type, Callable[[Any], None]] = {
            actions.Say: self._say,
            actions.Watch: self._watch,
            actions.Look: self._look,
            actions.FetchPath: self.fetching.path,
            actions.FetchState: self.fetching.state,
            actions.FetchChain: self.fetching.chain,
            actions.StartPath: self._start_path,
            actions.TakeSnapshot: self._take_snapshot,
            actions.ForgetSnapshot: self._forget_snapshot,
            actions.JoinParts: self._join_parts,
            actions.DropPart: self._drop_part,
            actions.Average: self.averaging.begin,
            actions.Await: self.averaging.await_peers,
            actions.Ask: self._ask,
            actions.Call: self._call,
            actions.TakeOuterStep: self._take_outer_step,
            actions.Commit: self._commit,
            actions.Discard: self._discard,
            actions.CheckState: self._check_state,
            actions.Adopt: self._adopt,
            actions.Keep: self._keep,
            actions.Drop: self._drop,
            actions.Offer: self._offer,
            actions.EndRound: self._end_round,
            actions.Begun: self._begun,
            actions.Pause: self._pause,
            actions.SaveAll: self._save_all,
        }

    def do(self, action: actions.Action) -> None:
        """Carry an action out, or begin to."""
        method = self._methods.get(type(action))
        if method is not None:
            method(action)

    def end(self) -> None:
        """The machine is down."""
        self.averaging.end()

    def _answer(self, delay_s: float, event: events.Event) -> None:
        self._machine.later(delay_s, self._machine.deliver, event)

    def _wrong(self, what: str) -> None:
        self._world.watch.wrong(self._machine, what)

    def _between(self, least: float, most: float) -> float:
        return self._world.engine.between(least, most)

    # -- the swarm

    def _say(self, action: actions.Say) -> None:
        self._machine.claim = action
        self._machine.publish()

    def _watch(self, action: actions.Watch) -> None:
        self._machine.scope = action.scope

    def _look(self, action: actions.Look) -> None:
        machine, conditions = self._machine, self._world.conditions
        machine.publish()
        if self._world.engine.chance(conditions.look_fails):
            self._answer(30.0, events.LookFailed("the DHT did not answer for 30 s"))
        else:
            machine.later(self._between(*conditions.look_s), machine.read, True, action.further)

    def _ask(self, action: actions.Ask) -> None:
        found: dict[str, StateReference | None] = {}

        def finish() -> None:
            held = dict(sorted(found.items()))
            self._machine.deliver(events.Answered(action.module, action.round_index, held))

        def heard(peer: str, answer: Any) -> None:
            if answer is not None:
                found[peer] = answer[0]

        self._call_all(action.peers, "holdings", action.module, heard, finish)

    def _call(self, action: actions.Call) -> None:
        found: list[str] = []

        def finish() -> None:
            self._machine.deliver(events.CallAnswered(action.peers, tuple(sorted(found))))

        def heard(peer: str, answer: Any) -> None:
            if answer is not None:
                found.append(peer)

        self._call_all(action.peers, "ping", None, heard, finish)

    def _call_all(
        self,
        peers: tuple[str, ...],
        what: str,
        content: Any,
        heard: Callable[[str, Any], None],
        finish: Callable[[], None],
    ) -> None:
        """Call several peers at once; `finish` when each has answered or failed."""
        left = len(peers)

        def one(peer: str, answer: Any) -> None:
            nonlocal left
            heard(peer, answer)
            left -= 1
            if left == 0:
                finish()

        if not peers:
            self._machine.later(0.0, finish)
        for peer in peers:
            self._world.network.call(
                self._machine.peer,
                peer,
                what,
                content,
                functools.partial(one, peer),
                limit_s=ASK_LIMIT_S,
            )

    # -- training

    def _start_path(self, action: actions.StartPath) -> None:
        machine, world = self._machine, self._world
        modules = world.grid.modules_of_path(action.path)
        if tuple(state.module for state in action.states) != modules:
            self._wrong(f"path {action.path} starts with states of other modules")
            return
        machine.count_steps()
        for module in list(machine.works):
            world.watch.lost(machine, module, f"it went to path {action.path}")
        machine.works = {}
        machine.path = action.path
        self.averaging.end()
        for reference in action.states:
            state = self.fetching.find(reference.digest)
            if state is None:
                self._wrong(f"starts from a state of {reference.module} that it has not fetched")
                return
            machine.works[reference.module] = ModuleWork(state, machine.steps)
            self._hold(state, save=False)
        self.fetching.fetched.clear()
        world.watch.started(machine)

    def _pause(self, action: actions.Pause) -> None:
        machine = self._machine
        if machine.path != action.path:
            self._wrong(f"pauses path {action.path} while it trains path {machine.path}")
        machine.count_steps()
        for module in list(machine.works):
            self._world.watch.lost(machine, module, "it paused")
        machine.works, machine.path = {}, None
        self.averaging.end()

    def _begun(self, action: actions.Begun) -> None:
        self._machine.round_index = action.round_index

    def _work(self, module: str) -> ModuleWork | None:
        self._machine.count_steps()
        return self._machine.works.get(module)

    def _take_snapshot(self, action: actions.TakeSnapshot) -> None:
        work = self._work(action.module)
        if work is None:
            self._wrong(f"takes a snapshot of {action.module}, which it does not train")
            return
        tokens = self._machine.claimed_tokens(work, action.round_index)
        is_finite = not self._world.engine.chance(self._world.conditions.not_finite)
        work.cut(action.round_index, tokens)
        self._machine.answers.append(
            events.SnapshotTaken(action.module, action.round_index, tokens, is_finite)
        )

    def _forget_snapshot(self, action: actions.ForgetSnapshot) -> None:
        work = self._work(action.module)
        if work is not None:
            work.forget(action.round_index, keeps_part=action.keeps_part)

    def _join_parts(self, action: actions.JoinParts) -> None:
        work = self._work(action.module)
        try:
            if work is not None:
                work.join(action.older, action.newer)
        except KeyError as error:
            self._wrong(f"joins parts of {action.module}, but {error} is not remembered")

    def _drop_part(self, action: actions.DropPart) -> None:
        work = self._work(action.module)
        try:
            if work is not None:
                work.drop(action.part)
        except KeyError as error:
            self._wrong(f"drops a part of {action.module}, but {error} is not remembered")

    def _averaged(
        self,
        action: actions.Average,
        table: tuple[Contribution, ...],
        shifts: dict[str, Content],
    ) -> None:
        """A reduce has ended here with an average."""
        self._averages[action.module, action.round_index] = (table, shifts)

    def _take_outer_step(self, action: actions.TakeOuterStep) -> None:
        module, round_index = action.module, action.round_index
        work = self._work(module)
        snapshot = work.snapshots.get(round_index) if work is not None else None
        if snapshot is None:
            self._wrong(f"steps {module} of round {round_index} without a snapshot")
            return
        delay_s = self._between(0.05, 0.4)
        if action.alone:
            me, path = self._machine.peer, self._machine.path
            assert path is not None
            anchor = snapshot.anchor
            usual = Usual.of(anchor.progress, anchor.reference.version)
            table = bounded_table([Contribution(path, me, max(1, snapshot.tokens))], usual)
            shifts = {me: snapshot.shift}
        elif (module, round_index) in self._averages:
            table, shifts = self._averages.pop((module, round_index))
        else:
            failed = events.OuterStepFailed(module, round_index, "there is no average")
            self._answer(delay_s, failed)
            return
        state = self._world.stock.step(snapshot.anchor, table, shifts, round_index)
        self._computed[module] = state
        self._machine.later(delay_s, self._outer_stepped, state)

    def _outer_stepped(self, state: SimulatedState) -> None:
        me, statement = self._machine.peer, state.statement
        assert statement is not None
        certificate = Certificate(statement, {me: signature(me, statement)})
        certificate = self.signing.with_early(certificate)
        self._machine.deliver(events.OuterStepped(statement.module, state.reference, certificate))

    def _commit(self, action: actions.Commit) -> None:
        work, machine = self._work(action.module), self._machine
        state = self._computed.pop(action.module, None)
        if work is None or state is None or state.reference != action.reference:
            self._wrong(f"commits a state of {action.module} that was not computed")
            return
        if action.round_index not in work.snapshots:
            self._wrong(f"commits {action.module} without the snapshot of its round")
            return
        if state.parent != work.anchor.reference.digest:
            self._wrong(f"commits a state of {action.module} that is not of its anchor")
        self._world.watch.committed(machine, action, state)
        work.commit(state, action.round_index)
        self._hold(state, save=action.save)
        self.signing.share(state)

    def _discard(self, action: actions.Discard) -> None:
        work = self._work(action.module)
        if work is not None:
            self._world.watch.lost(self._machine, action.module, "it went back to its anchor")
            work.discard()

    def _check_state(self, action: actions.CheckState) -> None:
        work, state = self._work(action.module), self.fetching.find(action.digest)
        losses: tuple[float | None, float | None] = (None, None)
        if work is not None and state is not None:
            before, after = (
                HONEST_LOSS if scored.is_sound else INVENTED_LOSS for scored in (work.anchor, state)
            )
            losses = (before, after)
        self._machine.answers.append(events.Checked(action.module, action.digest, *losses))

    def _adopt(self, action: actions.Adopt) -> None:
        work, state = self._work(action.module), self.fetching.find(action.reference.digest)
        if work is None or state is None:
            self._wrong(f"adopts a state of {action.module} that is not at hand")
            return
        self._world.watch.adopted(self._machine, action, work.anchor)
        try:
            work.adopt(state, action.on_top)
        except KeyError as error:
            self._wrong(f"adopts {action.module}, but part {error} is not remembered")
        self._hold(state, save=action.save)

    def _end_round(self, action: actions.EndRound) -> None:
        machine = self._machine
        machine.round_index = action.next_round
        if action.save:
            machine.have_shard(machine.path or 0)
        if machine.path is None:
            return
        counted = [work.anchor.progress.get(machine.path) for work in machine.works.values()]
        machine.progress[machine.path] = ProgressEntry.model_construct(
            path=machine.path,
            last_round=action.round_index,
            tokens=max((entry.tokens for entry in counted if entry), default=0),
            validation_nll=3.0,
            validation_tokens=1,
            train_loss=3.0,
            best_sha256="",
            best_nll=0.0,
            best_tokens=0,
            best_round=0,
        )
        machine.publish()

    # -- copies

    def _hold(self, state: SimulatedState, *, save: bool) -> None:
        machine, held = self._machine, state.reference
        machine.serve_state(state)
        if save:
            machine.disk.save(state, machine.book.chain(held.module, held.digest))
        if held.version:
            machine.publish()
        self._answer_offers(held.digest, True)

    def _keep(self, action: actions.Keep) -> None:
        state = self.fetching.find(action.reference.digest)
        if state is None:
            self._wrong(f"keeps a state of {action.reference.module} that is not at hand")
            return
        self._hold(state, save=True)
        self.fetching.fetched.pop(("keep", action.reference.digest), None)

    def _drop(self, action: actions.Drop) -> None:
        machine = self._machine
        if machine.served.pop(action.module, None) is not None:
            machine.disk.states.pop(action.module, None)
            machine.publish()

    def _save_all(self, action: actions.SaveAll) -> None:
        machine = self._machine
        for state in list(machine.served.values()):
            held = state.reference
            machine.disk.save(state, machine.book.chain(held.module, held.digest))

    def _offer(self, action: actions.Offer) -> None:
        held = action.reference

        def done(answer: Any) -> None:
            is_kept = answer is not None and answer[0]
            self._machine.deliver(
                events.OfferAnswered(held.module, held.digest, action.peer, is_kept)
            )

        self._world.network.call(
            self._machine.peer, action.peer, "offer", held, done, limit_s=action.limit_s
        )

    def note(self, event: events.Event) -> None:
        """The member is about to hear of something that an offer may have waited for."""
        if isinstance(event, events.Offered):
            self._unheard.discard(event.reference.digest)
        elif isinstance(event, events.FetchFailed):
            self.fetching.looked_into.discard(event.digest)
        elif isinstance(event, events.ChainFetched | events.StateFetched):
            self.fetching.looked_into.discard(event.reference.digest)

    def review_offers(self) -> None:
        """The member has handled an event: refuse the offers that it does nothing about."""
        if not self._offers:
            return
        for digest in list(self._offers):
            if self._machine.find(digest) is not None:
                self._answer_offers(digest, True)
            elif digest not in self._unheard | self.fetching.looked_into:
                self._answer_offers(digest, False)

    def _answer_offers(self, digest: str, is_kept: bool) -> None:
        for reply in self._offers.pop(digest, ()):
            reply((is_kept,))

    # -- being called

    def serve(self, caller: str, what: str, content: Any, reply: Reply) -> None:
        """Answer a call; in the background, so an inner step does not keep it waiting."""
        machine = self._machine
        if what == "holdings":
            state = machine.served.get(content)
            reply((state.reference if state is not None else None,))
        elif what == "ping":
            reply(True)
        elif what == "chain":
            chain = machine.book.chain(content.module, content.digest)
            if chain:
                reply(chain, CALL_BYTES + CERTIFICATE_BYTES * len(chain))
            else:
                reply(None)
        elif what == "certificate":
            self.signing.serve(content, reply)
        elif what == "state":
            state = machine.find(content.digest)
            if state is None:
                reply(None)
                return
            chain = machine.book.chain(content.module, content.digest)
            reply((state, chain), self._world.state_bytes + CERTIFICATE_BYTES * len(chain))
        elif what == "shard":
            reply(True if content in machine.disk.shards else None, SHARD_BYTES)
        elif what == "offer" and not self._world.directory.is_in(caller):
            reply((False,))
        elif what == "offer":
            self._offers.setdefault(content.digest, []).append(reply)
            self._unheard.add(content.digest)
            machine.deliver(events.Offered(caller, content))
