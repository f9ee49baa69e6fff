"""When a group closes, who leads it and whom it waits for: the same for every peer (design 4.2)."""

from __future__ import annotations

import functools
from collections.abc import Collection

from dipaco.dht.agreement import (
    awaited_group,
    expected_group,
    is_overtaken,
    possible_group,
)
from dipaco.dht.policy import rendezvous, seniority
from dipaco.dht.records import Holding, refresh_period_s
from dipaco.modules.config import RoundsConfig

from .knowledge import ISOLATED_ROUNDS, Knowledge
from .ledger import Others
from .quorum import RECENT_ROUNDS, counting_peers, is_majority
from .round_under_way import RoundUnderWay

ATTEMPTS = 2
# A group that closes sooner than this from now cannot form any more.
SHORTEST_MEETING_S = 0.3
# A first attempt of whose time the slowest line needs more than this ends with the window.
SLOW_SHARE = 0.5
# With fixed steps: the longest that a group waits for its members, whatever `duration_s` is.
LONGEST_WAIT_S = 3000.0
# Who is missing from the newest view, but was in one so many refresh periods ago, may still be
# there: a reader misses records when the nodes that store them are slow.
SIGHT_PERIODS = 4


def close_after_s(rounds: RoundsConfig, attempt: int) -> float:
    """Return when after the boundary an attempt's group closes, by the clock."""
    if attempt == 0:
        return rounds.matchmaking_s
    return max(rounds.window_s / 2, 2 * rounds.matchmaking_s)


def meeting_times(
    close_s: float, end_s: float, attempt: int, window_s: float, *, is_awaited: bool
) -> tuple[float | None, float]:
    """Return when all come to a meeting that closes at `close_s`, None for at any time, and until
    when this peer waits, whoever leads; `window_s` is what a group has to form.

    By the clock a group closes at the same instant for all, and its leader's list is here a moment
    later. With fixed steps each peer has a limit of its own, and that of who leads may be much
    later than this one's.
    """
    start_s = None if is_awaited or attempt > 0 else close_s - window_s
    give_up_s = end_s if is_awaited else close_s + 0.5 * window_s + 0.5
    return start_s, min(end_s, give_up_s)


def takes_long(close_s: float, end_s: float, needed_s: float) -> bool:
    """Tell whether a reduce is to have all that is left of the window, since the slowest line of
    its group needs so long for its bytes alone."""
    return needed_s > SLOW_SHARE * (end_s - close_s)


def latest_s(rounds: RoundsConfig) -> float:
    """Return when after the boundary no group can form any more by the clock, not even a second."""
    return close_after_s(rounds, ATTEMPTS - 1) - SHORTEST_MEETING_S


def longest_wait_s(rounds: RoundsConfig) -> float:
    """Return how long a group waits at most when rounds are counted."""
    return min(LONGEST_WAIT_S, rounds.duration_s + rounds.window_s / 2 + rounds.matchmaking_s)


def leading_order(known: Knowledge, peers: Collection[str]) -> tuple[str, ...]:
    """Return peers in the order in which they are asked to lead.

    The longest in training first; those that others cannot call by an address of theirs, last.
    """

    def order(peer: str) -> tuple[bool, tuple[bool, float, str]]:
        return not known.can_lead(peer), seniority(known.view, known.me, peer)

    return tuple(sorted(peers, key=order))


def awaited(
    known: Knowledge,
    module: str,
    round_index: int,
    *,
    culprits: frozenset[str],
    absent: frozenset[str],
    alive: frozenset[str] | None,
) -> frozenset[str] | None:
    """With fixed steps: return whom a meeting waits for; None for nobody any more.

    A claim that has expired or goes on to a later round is not waited for, nor are `culprits`. Of
    a second attempt's group only those that are `alive`. Whoever is left alone without the `absent`
    waits for those all the same, unless others wait for it in a later round: it would come late to
    that one too.
    """
    if is_behind(known, module):
        return None
    claimed = awaited_group(known.view, known.grid, module, round_index) - {known.me} - culprits
    if alive is not None:
        claimed &= alive
    others = claimed - absent
    if not others and not _are_ahead(known, module, culprits | absent, alive):
        others = claimed
    return others | {known.me} if others else None


def _are_ahead(
    known: Knowledge, module: str, excluded: frozenset[str], alive: frozenset[str] | None
) -> bool:
    """Tell, where nobody is waited for, whether one who made the module lately still trains it."""
    claimed = expected_group(known.view, known.grid, module)
    others = (claimed & _made_lately(known, module)) - {known.me} - excluded
    return bool(others if alive is None else others & alive)


def _made_lately(known: Knowledge, module: str) -> frozenset[str]:
    """Return who contributed to the latest commits of a module."""
    anchor = known.anchors[module]
    since_round = anchor.last_round + 1 - RECENT_ROUNDS
    return known.book.recent_contributors(module, anchor.digest, since_round)


def is_behind(known: Knowledge, module: str) -> bool:
    """With fixed steps: tell whether the others went on without this peer, as far as is known.

    After a fork both sides have gone on. Those whose chain wins wait there for the others to take
    it over; where a chain is not known, more tokens have to do.
    """
    anchor, descent = known.anchors[module], known.descent

    def is_ahead(held: Holding) -> bool:
        state = held.reference
        if descent.is_certified(state) and descent.is_certified(anchor):
            return descent.wins(state, anchor)
        return held.tokens > anchor.tokens

    return is_overtaken(known.view, known.grid, module, known.me, is_ahead)


def may_find_out(
    known: Knowledge, running: RoundUnderWay, awaited_peers: frozenset[str] | None
) -> bool:
    """With fixed steps: tell whether it may still show, before the round's limit, who has to take
    over whose state.

    Rounds in vain would pass in no time where nobody is waited for, and whoever then commits alone
    runs away from the others. Liars can have it waited for once an anchor.
    """
    if running.boundary.meet_until_s - known.now_s < SHORTEST_MEETING_S:
        return False
    return awaited_peers is not None or is_behind(known, running.module)


def gathering_text(known: Knowledge, module: str, round_index: int, count: int) -> str:
    """With fixed steps: say for whom a meeting waits of which `count` members are here."""
    others = awaited_group(known.view, known.grid, module, round_index)
    have = f"have {count} of" if count else "another peer gathers"
    return f"{have} {len(others | {known.me})} peers"


def is_cut_off(known: Knowledge, module: str) -> bool:
    """Tell whether a commit now would be one that others share and know nothing of."""
    if not known.is_isolated:
        return False
    if known.now_s - known.isolated_since_s > ISOLATED_ROUNDS * known.plan.rounds.duration_s:
        return False
    anchor = known.anchors[module]
    others = known.book.contributors_since(module, anchor.digest, None) - {known.me}
    return bool(others) or anchor.version == 0


def why_not_alone(known: Knowledge, counting: Collection[str], expected: int) -> str:
    """Return why this peer may not commit its own work alone; nothing if it may."""
    if not is_majority({known.me}, counting):
        return f"have 1 of {expected} peers that count, need {expected // 2 + 1}"
    if known.is_clock_doubtful:
        return "this machine slept or its clock was set, and the others say another round"
    return ""


def possible_peers(known: Knowledge, module: str) -> frozenset[str]:
    """Return who may come to an outer step: those who claim a path through the module, and those
    who are out of sight."""
    return possible_group(known.view, known.grid, module) | out_of_sight(known, module)


def out_of_sight(known: Knowledge, module: str) -> frozenset[str]:
    """Return who has trained a module lately and is missing from the newest view alone.

    They are called to a meeting like the others: whoever steps without asking forks the module.
    Nobody when rounds are counted: there a meeting waits for claims.
    """
    if known.schedule.fixed_steps:
        return frozenset()
    since_s = known.now_s - SIGHT_PERIODS * refresh_period_s(known.plan.rounds)
    return frozenset(
        peer
        for peer in _made_lately(known, module) - {known.me} - frozenset(known.whole_view.claims)
        if known.last_seen_s(peer) >= since_s and not known.doubts.is_doubted(peer)
    )


def who_counts(
    known: Knowledge,
    module: str,
    round_index: int,
    rounds_in_vain: int,
    alive: frozenset[str] | None,
) -> frozenset[str]:
    """Return who counts when a step of a module is to be committed; `alive` are those that were
    asked and have answered. Nobody else in this peer's turn: none of them can meet it."""
    if whose_turn(known, module, round_index) == known.me:
        return frozenset({known.me})
    found = counting_peers(
        known.view,
        known.grid,
        known.book,
        known.anchors[module],
        me=known.me,
        round_index=round_index,
        rounds_in_vain=rounds_in_vain,
    )
    # Who is out of sight and answers is there.
    return found | (out_of_sight(known, module) & (alive or frozenset()))


def whose_turn(known: Knowledge, module: str, round_index: int) -> str | None:
    """Return who steps alone in a round, where those who train a module can never meet.

    None of them can lead a group. They take turns, and the others take over what came of it, or
    each would make a version of its own. Who has not shown itself has no turn; None where nobody
    else has, where a group can form, and where rounds are counted: there groups wait for claims.
    """
    others = possible_peers(known, module) - {known.me}
    if known.schedule.fixed_steps or any(map(known.can_lead, {known.me, *others})):
        return None
    training = expected_group(known.view, known.grid, module) & others
    shown = {peer for peer in training if known.doubts.has_shown_itself(peer)}
    if not shown:
        return None
    return min({known.me, *shown}, key=lambda peer: rendezvous(peer, round_index))


def has_contributed(known: Knowledge, module: str, round_index: int) -> bool:
    """Tell whether this peer contributed to its anchor lately: who did not counts it, and waits."""
    anchor, since = known.anchors[module], round_index - RECENT_ROUNDS
    return known.me in known.book.recent_contributors(module, anchor.digest, since)


def is_whole(known: Knowledge, module: str, group: frozenset[str], since_round: int) -> bool:
    """Tell whether all are in a group who claim to train, or made a state since `since_round`, in
    which the own part before this one is: any of them may have gone another way from there."""
    anchor = known.anchors[module].digest
    last = known.book.get(module, anchor)
    before = last.statement.peers if last is not None else frozenset()
    for certificate in known.book.chain(module, anchor):
        if certificate.statement.round_index < since_round:
            break
        before |= certificate.statement.peers
    return before | expected_group(known.view, known.grid, module) <= group


def is_last_signed(known: Knowledge, module: str) -> bool:
    """Tell whether all of the group before are known to stand on the anchor."""
    last = known.book.get(module, known.anchors[module].digest)
    return last is not None and last.signers == last.statement.peers


def where_others_stand(known: Knowledge, module: str) -> Others:
    """Return what parts the own work in a module.

    Rounds after which others may go another way: all, those of who trains the module, of these
    what they were seen to hold or were in the group of, and what they were seen to hold. Who only
    keeps copies goes on from them itself only if it begins to train.
    """
    trainers, stands = known.trainers_seen(module), known.stands(module).values()
    rounds = (
        rounds_stood_on(known, module),
        rounds_stood_on(known, module, of=trainers),
        rounds_stood_on(known, module, of=trainers, is_offered=False),
        rounds_stood_on(known, module, of=trainers, is_offered=False, is_grouped=False),
    )
    offered = {digest for stand in stands for digest in stand.offered}
    seen = {stand.seen for stand in stands if stand.seen}
    is_clear = all(known.book.get(module, digest) is not None for digest in offered)
    return Others(rounds, frozenset(offered | seen), is_clear)


def rounds_stood_on(
    known: Knowledge,
    module: str,
    *,
    of: Collection[str] | None = None,
    is_offered: bool = True,
    is_grouped: bool = True,
) -> frozenset[int]:
    """Return the rounds of the own chain after which others may go another way.

    Somebody was seen last to hold the state of such a round, or one that parted from it, and is
    not known to have gone on with this peer. When a split shows, it is too late to ask. Round -1
    stands for the genesis state: of who trains and neither held nor signed another one whose chain
    is known, or cannot be called, so that it may never show itself here, and others take over what
    it makes.
    """
    book, anchor = known.book, known.anchors[module]
    rounds: dict[str, list[int]] = {}
    own_rounds: list[int] = []
    signed: dict[str, int] = {}
    for made in reversed(book.chain(module, anchor.digest)):
        said = made.statement
        own_rounds.append(said.round_index)
        signed |= dict.fromkeys(made.signers, said.round_index)
        for row in said.table:
            rounds.setdefault(row.peer, []).append(said.round_index)

    @functools.cache
    def last_shared(digest: str) -> int | None:
        common = book.common_ancestor(module, digest, anchor.digest)
        fork = book.get(module, common) if common is not None else None
        # What is in both chains and has no certificate lies before all that is known.
        return fork.statement.round_index if fork is not None else -1 if common else None

    found: set[int] = set()
    stands = known.stands(module)
    for peer, stand in stands.items():
        if of is not None and peer not in of:
            continue
        seen, offered = last_shared(stand.seen), [last_shared(digest) for digest in stand.offered]
        grouped: list[int] = []
        if book.common_ancestor(module, stand.seen, anchor.digest) == stand.seen:
            # A view is late: who has signed a later state has that, and who was in the group may.
            seen = max(seen if seen is not None else -1, signed.get(peer, -1))
            grouped = rounds.get(peer, [])
        least = seen if seen is not None else -2
        found.add(least)
        maybe = [*(offered if is_offered else ()), *(grouped if is_grouped else ())]
        found.update(later for later in maybe if later is not None and later > least)
        if is_offered and any(last_shared(digest) is None for digest in stand.offered):
            # Where that came from nobody has said yet.
            found.update(later for later in own_rounds if later > least)
    found.discard(-2)
    seen_to_hold = {peer for peer, stand in stands.items() if stand.seen}
    unseen = known.trainers_seen(module) - seen_to_hold - frozenset(signed)
    if any(known.doubts.has_shown_itself(p) or not known.can_ever_answer(p) for p in unseen):
        found.add(-1)
    return frozenset(found - {anchor.last_round})
