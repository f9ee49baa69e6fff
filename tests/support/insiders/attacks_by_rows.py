"""Attacks by what rows say and by which files they name, and by who is in the first step of a round."""

from dataclasses import replace
from itertools import islice

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member.actions import Adopt, StartPath
from dipaco.simulator.swarm.network import NO_ANSWER

from .insider import Insider, names
from .slots import SlottedMachine


class ForeignFiles(Insider):
    """Attack 4: its rows of one module name its newest file of another module, which those who train both have checked
    already."""

    def told(self, action):
        rows = tuple(self._changed(row) if row.peer == self.peer else row for row in action.rows)
        return replace(action, rows=rows)

    def _changed(self, row):
        known = [rows[self.peer] for rows in self.rows.values() if self.peer in rows]
        others = [r for r in known if r.module < row.module]
        return replace(row, file=max(others, key=lambda r: r.round_index, default=row).file)


class BareQuorum(Insider):
    """Attack 5: it tells a step of its own row and of as few others as are enough, never the victim's, as soon as it
    has heard of them, every round."""

    def on_rows(self, place, rows):
        module = place[0]
        trainers = self.member.known.trainers(module) | {self.peer}
        enough = len(trainers) // 2 + 1
        chosen = [row for peer, row in rows.items() if peer not in (self.victims.get(module), self.peer)]
        if self.peer not in rows or len(chosen) + 1 != enough:
            return
        own = rows[self.peer]
        step = Step.of([own, *(row for row in chosen if row.state == own.state)])
        self.tell(module, rows=(own,), steps=(step,))


class PushedOut(Insider):
    """Attack 6: it tells rows of its own that name the files of honest rows, then many more, so that members forget
    the first ones, and with them the files if they are told apart by these."""

    pushing = 10
    """So many rows push all others of a peer out."""
    pushes, push_s = 12, 1.5
    """How often in a round, and how many seconds apart."""

    def told(self, action):
        """Tell its own row late, so that nobody has all rows early."""
        own = tuple(row for row in action.rows if row.peer == self.peer)
        if own:
            delay_s = 0.9 * self.world.plan.rounds.gather_limit_s
            self.later(delay_s, lambda: self.tell(action.module, rows=own))
        return replace(action, rows=tuple(row for row in action.rows if row.peer != self.peer))

    def on_rows(self, place, rows):
        """Begin with the second row of a round."""
        if len(rows) == 2 and self.peer in rows:
            for number in range(self.pushes):
                self.later(number * self.push_s, self._push, place, number)

    def _push(self, place, push):
        module, round_index, _ = place
        honest = [row for row in self.rows[place].values() if row.peer != self.peer]
        naming = [
            self._row_on(row, round_index - 1, f"{push}{number}") for number, row in enumerate(honest) if round_index
        ]
        pushing = [self._row_on(honest[0], round_index, f"{push}x{n}") for n in range(self.pushing)]
        self.tell(module, rows=(*naming, *pushing))

    def _row_on(self, honest, round_index, salt):
        """Return a row of its own that names the file of an honest one, on an invented step."""
        parent = salt.encode().hex().ljust(64, "0")
        return replace(honest, peer=self.peer, round_index=round_index, parent=parent)


class Crowd(Insider):
    """Attack 8: as soon as there is a head, as many rows as are remembered stand on it, of its owner's identities and
    of the next round, before any honest row does."""

    row_count, at_once = 512, 128

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._peers = names("x", self.row_count)
        self.add_identities(self._peers)
        self._crowded = set()

    def act(self, action):
        """Crowd every new head."""
        super().act(action)
        if isinstance(action, Adopt):
            self._crowd(action.head.module)
        elif isinstance(action, StartPath):
            for head in action.heads:
                self._crowd(head.module)

    def _crowd(self, module):
        head = self.store.held[module]
        if head.step in self._crowded:
            return
        self._crowded.add(head.step)
        place = module, self._next_round(module), head.step
        first = self.make_row(place, head.digest, peer=self._peers[0], content="garbage")
        rows = [replace(first, peer=peer) for peer in self._peers]
        for begin in range(0, self.row_count, self.at_once):
            self.tell(module, rows=tuple(rows[begin : begin + self.at_once]))

    def _next_round(self, module):
        schedule, head = self.world.schedule, self.store.held[module]
        if schedule.fixed_steps:
            return head.round_index + 1
        level = self.world.grid.level_of(module)
        return max(head.round_index, schedule.passed(level, self.believed_s)) + 1


class Drips(Insider):
    """Attack 12: just before every boundary it tells eight rows whose files never end, so that downloads of honest
    files wait for them."""

    honest = SlottedMachine
    heads = 3
    """Rows of three rounds stand on so many heads: eight beside the honest one."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._dripping = set()

    def on_boundary(self, action):
        """Tell of the files."""
        book, now = self.world.book, action.round_index
        rows = []
        # Of a peer one row counts for each round and head.
        for link in islice(book.back_from(action.parent), self.heads):
            for round_index in (now - 1, now, now + 1):
                place = action.module, round_index, link.name
                if place != (action.module, now, action.parent) and round_index >= 0:
                    rows.append(self.make_row(place, self.world.head(link.name).digest))
        self._dripping.update(row.file for row in rows)
        self.tell(action.module, rows=tuple(rows))

    def serve(self, caller, verb, content):
        """Answer a call; of a dripping file nothing arrives."""
        if verb == "get" and content in self._dripping:
            return None, NO_ANSWER
        return super().serve(caller, verb, content)


class Revoked(Insider):
    """Attack 13: it tells steps of its own row and of rows of its owner's revoked identities, of more rows than there
    are honest peers, as soon as a round begins."""

    def start(self):
        """Begin, with as many revoked identities as there are peers."""
        super().start()
        self._peers = names("v", len(self.world.machines))
        self.world.revoked.update(self._peers)
        self.add_identities(self._peers)

    def on_rows(self, place, rows):
        """Propose without anybody else."""
        if set(rows) != {self.peer}:
            return
        own = rows[self.peer]
        revoked = [self.make_row(place, own.state, peer=peer) for peer in self._peers]
        self.tell(place[0], steps=(Step.of((own, *revoked)),))
