"""Attacks by steps, by states that come out of them, and by what is said of who has which."""

from dataclasses import replace

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member.actions import Adopt, Serve, Tell
from dipaco.protocol.member.proposing import LATE_GRACES
from dipaco.protocol.records import HeldState, ModuleRecord, record_life_s
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.world import FORGED_LOSS, STATE_BYTES, SUBTLE_LOSS

from .insider import Insider, names


class ForgedState(Insider):
    """Attack 1: it proposes first with honest rows and its own, gives its file to nobody or to some, and serves a
    state of that step with bytes of its choice, much or a little worse."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        random = self.world.engine.random
        self.loss = random.choice((FORGED_LOSS, SUBTLE_LOSS))
        self.gives_to_some = random.random() < 0.5
        self._forged = set()
        """Its steps."""
        self._told = {}

    def told(self, action):
        """Keep its own rows back; what it proposes in its turn is a step of the same kind."""
        self._forged.update(step.name for step in action.steps if self.peer in step.peers)
        rows = tuple(row for row in action.rows if row.peer != self.peer)
        return Tell(action.peers, action.module, rows, action.steps, action.keep)

    def on_rows(self, place, rows):
        """Propose with every row that was heard beyond half of the group, with its own."""
        group = self.member.known.trainers(place[0]) | {self.peer}
        if self.peer not in rows or 2 * len(rows) <= len(group):
            return
        states = {row.state for row in rows.values()}
        if len(states) == 1 and len(rows) > self._told.get(place, 0):
            self._told[place] = len(rows)
            step = Step.of(rows.values())
            self._forged.add(step.name)
            self.tell(place[0], steps=(step,))

    def seen_digest(self, head):
        """Return the state that is served of its steps."""
        return self.world.forge(head, self.loss) if head.step in self._forged else head

    def serve(self, caller, verb, content):
        """Answer a call, but give its own file to every second peer at most."""
        is_own = verb == "get" and self.world.files[content].row.peer == self.peer
        if is_own and not (self.gives_to_some and self.world.machines[caller].number % 2):
            return None, 0
        return super().serve(caller, verb, content)


class LyingDirectory(Insider):
    """Attack 2: nodes next to a module's keys swallow stores and name only each other. From the fourth round on half of
    the peers, or all, read nothing of each other any more: only what this peer and they themselves have written."""

    first_round = 3
    """When the lie begins. It does not concern those who have just begun to look."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._is_of_all = self.world.engine.random.random() < 0.5
        begin_s = self.world.plan.start_s + self.first_round * self.world.plan.rounds.duration_s
        self.world.engine.at(begin_s, self._hide)

    def _hide(self):
        machines = [m for m in self.world.machines.values() if m.is_honest and m.is_alive]
        hidden = machines if self._is_of_all else machines[::2]
        self.world.say(self.peer, "lies", f"hides the others from {[m.peer for m in hidden]}")
        self.world.directory.shows = {m.peer: {m.peer, self.peer} for m in hidden}


class FalseDigests(Insider):
    """Attack 3: as many silent admitted identities as there are peers announce the newest step that it has with another
    digest, and serve a state of that digest, much or a little worse."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.loss = self.world.engine.random.choice((FORGED_LOSS, SUBTLE_LOSS))
        self._names = ()

    def start(self):
        """Begin, and begin to announce."""
        super().start()
        if not self._names:
            self._names = names("s", len(self.world.machines))
            for name in self._names:
                self.world.network.join(name, Link(), self._serve_forged)
        self.later(0.0, self._announce)

    def _forged(self, module):
        head = self.store.held.get(module)
        if head is None or not head.version:
            return None
        return self.world.forge(self.world.head(head.step), self.loss)

    def _announce(self):
        """Write a record for each of them, as often as an honest peer would."""
        life_s = record_life_s(self.refresh_period_s)
        for module in list(self.store.held):
            head = self._forged(module)
            for name in self._names if head is not None else ():
                record = ModuleRecord.model_construct(
                    peer_id=name,
                    module=module,
                    held=HeldState.of(head),
                    state="serving",
                    path=None,
                    since_s=0.0,
                    round=max(0, head.round_index),
                    pinned=False,
                    reachable="direct",
                )
                self.world.directory.write(name, f"modules/{module}", record, life_s)
        self.later(0.25 * self.refresh_period_s, self._announce)

    def _serve_forged(self, caller, verb, content):
        if verb == "ask":
            steps, rows, has_more, _, trains = self.serve(caller, verb, content)[0]
            return (steps, rows, has_more, self._forged(content[0]), trains), 0
        if verb == "state":
            head = self.world.forge(self.world.head(content.step), self.loss)
            return (head, STATE_BYTES) if content.digest in ("", head.digest) else (None, 0)
        return self.serve(caller, verb, content)


class SecretChain(Insider):
    """Attack 7: its owner's identities, more than steps have rows, make a chain of their own from the genesis, of
    poisoned work, and tell it late."""

    poison = "poison"
    published_share = 0.7
    """Of the rounds of a history: when it is published."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._is_arranged = self._is_published = False

    def start(self):
        """Begin, and arrange when the chain is published."""
        super().start()
        if not self._is_arranged:
            self._is_arranged = True
            duration_s = self.world.plan.rounds.duration_s
            at_s = self.world.plan.start_s + self.published_share * self.rounds * duration_s
            self.world.engine.at(at_s, self._publish)

    def act(self, action):
        """Serve its own chain from then on, whatever its member finds."""
        if not (self._is_published and isinstance(action, Adopt | Serve)):
            super().act(action)

    def _publish(self):
        self._is_published = True
        peers = names("i", len(self.world.machines) + 1)
        self.add_identities(peers)
        for module in list(self.works):
            steps = self._chain(module, peers)
            self.store.serve(module, steps[-1].name, steps)
            self.store.held[module] = self.world.head(steps[-1].name)
            for begin in range(0, len(steps), 16):
                self.later(0.1 * begin, self._tell_part, module, steps[begin : begin + 16])

    def _tell_part(self, module, steps):
        self.tell(module, steps=steps)

    def _chain(self, module, peers):
        """Make a step of every round up to the newest step that it knows."""
        parent, steps = self.world.book.genesis(module), []
        for round_index in range(self.store.held[module].round_index + 1):
            place, state = (module, round_index, parent), self.world.head(parent).digest
            rows = [self.make_row(place, state, peer=p, content=self.poison) for p in peers]
            step = Step.of(rows)
            self.carrying.take((), (step,))
            self.store.at_hand[step.name] = self.world.head(step.name)
            steps.append(step)
            parent = step.name
        return tuple(steps)


class SubtleSecretChain(SecretChain):
    """The same, of work that makes the held-out loss worse by less than is noticed."""

    poison = "subtle"


class KeptBack(Insider):
    """Attack 11: it keeps its row back until others have made the step of the round, and tells half of the peers a step
    with that row more just before the next boundary."""

    close_s = 5.0
    """So long before the last moment: most of those who are told still hear of it in time, and cannot tell the others
    in time."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._own = {}
        self._heaviest = {}
        """The heaviest step of each place that others have made."""

    def told(self, action):
        """Keep its own rows back, and tell no step that has them."""
        for row in action.rows:
            if row.peer == self.peer:
                place = row.module, row.round_index, row.parent
                if place not in self._own:
                    self._own[place] = row
                    self.later(self._delay_s(row), self._tell_half, place)
        rows = tuple(row for row in action.rows if row.peer != self.peer)
        steps = tuple(step for step in action.steps if self.peer not in step.peers)
        return replace(action, rows=rows, steps=steps)

    def _boundary_s(self, row):
        schedule = self.world.schedule
        if schedule.fixed_steps:
            return self.believed_s
        return schedule.boundary(row.round_index, self.world.grid.level_of(row.module)).time_s

    def _delay_s(self, row):
        """Return in how many seconds the step is told: just before the next boundary."""
        passed_s = self.believed_s - self._boundary_s(row)
        return self.world.plan.rounds.duration_s - passed_s - self.close_s

    def on_step(self, step):
        place = step.module, step.round_index, step.parent
        known = self._heaviest.get(place)
        if self.peer not in step.peers and (known is None or len(known.rows) < len(step.rows)):
            self._heaviest[place] = step

    def _tell_half(self, place):
        step, own = self._heaviest.get(place), self._own[place]
        if step is None:
            made = Step.of([row for row in self.rows[place].values() if row.state == own.state])
        else:
            made = Step.of((*step.rows, own))
        self.tell(place[0], steps=(made,), peers=self.others[::2])


class KeptBackPerfectly(KeptBack):
    """The same at the last moment at which another step of the round is taken."""

    def _delay_s(self, row):
        rounds = self.world.plan.rounds
        last_s = rounds.gather_limit_s + LATE_GRACES * rounds.grace_limit_s
        if self.world.schedule.fixed_steps:
            last_s += rounds.duration_s / 2
        return max(0.1, self._boundary_s(row) + last_s - self.believed_s - self.close_s)
