"""Meetings of many peers over a bad network, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from dipaco.peer.member.calls import Absent, Awaiting, Confirm, Join, Leave, Refused
from dipaco.peer.member.gathering import meeting_times
from dipaco.peer.member.meeting import Meeting
from dipaco.peer.member.reception import GREATEST_GROUP, GREATEST_HELD, Reception
from support.meeting_net import Faults, MeetingNet

WINDOW_S = 2.0
# A group that somebody is missing from closes then, and an answer and a list later it is known.
LATEST_S = WINDOW_S + 0.7


def names(count: int) -> list[str]:
    """Peers whose names do not sort as they lead."""
    return [f"{(7 * place) % count:02d}-{place}" for place in range(count)]


def fine(peer: str, row: bytes) -> str | None:
    return None if row == peer.encode() else "its row is bad"


def by_the_clock(
    net: MeetingNet,
    name: str,
    candidates: Sequence[str],
    *,
    comes_s: float = 0.0,
    start_s: float = 0.0,
    undialable: Sequence[str] = (),
    excluded: Sequence[str] = (),
) -> None:
    close_s = start_s + WINDOW_S
    end_s = close_s + 10.0
    begin_s, give_up_s = meeting_times(close_s, end_s, 0, WINDOW_S, is_awaited=False)
    assert begin_s == start_s
    net.add(
        name,
        comes_s,
        lambda now_s: Meeting(
            name,
            candidates,
            name.encode(),
            fine,
            now_s=now_s,
            window_s=WINDOW_S,
            start_s=start_s,
            close_s=close_s,
            give_up_s=give_up_s,
            undialable=undialable,
            excluded=excluded,
        ),
    )


def at_any_time(
    net: MeetingNet,
    name: str,
    candidates: Sequence[str],
    *,
    comes_s: float,
    close_s: float = 60.0,
    awaited: frozenset[str] | None = None,
    undialable: Sequence[str] = (),
    end_s: float | None = None,
) -> None:
    end_s = close_s + 10.0 if end_s is None else end_s
    _, give_up_s = meeting_times(close_s, end_s, 0, WINDOW_S, is_awaited=True)
    net.add(
        name,
        comes_s,
        lambda now_s: Meeting(
            name,
            candidates,
            name.encode(),
            fine,
            now_s=now_s,
            window_s=WINDOW_S,
            close_s=close_s,
            give_up_s=give_up_s,
            awaited=awaited,
            undialable=undialable,
        ),
    )


def groups(net: MeetingNet) -> list[tuple[str, ...]]:
    """The groups that peers are in, each once, after checking what must always hold."""
    found = {}
    for peer in net.peers.values():
        if peer.group is None:
            continue
        assert peer.name in peer.group.peers
        assert peer.group.rows == tuple(name.encode() for name in peer.group.peers)
        assert 2 <= len(peer.group.peers) <= GREATEST_GROUP
        found[peer.group.peers] = peer.group
    members = [name for group in found for name in group]
    assert len(members) == len(set(members)), f"a peer is in two groups: {sorted(found)}"
    return list(found)


def together_at(net: MeetingNet) -> float:
    """When the last peer has the one group that all are in; infinite if they are not."""
    if groups(net) and set(groups(net)[0]) == set(net.peers) == {
        peer.name for peer in net.peers.values() if peer.group is not None
    }:
        return max(peer.ended_s for peer in net.peers.values())
    return float("inf")


@pytest.mark.parametrize(("count", "seeds"), [(2, 100), (16, 100), (40, 20), (64, 10)])
def test_without_faults_all_meet_in_one_group(count: int, seeds: int) -> None:
    latest_s = 0.0
    for seed in range(seeds):
        net = MeetingNet(seed, Faults(latency_s=(0.0, 0.2)))
        for name in names(count):
            by_the_clock(net, name, names(count))
        net.run()
        latest_s = max(latest_s, together_at(net))
        assert net.messages < 8 * count
    assert latest_s < 0.6 * WINDOW_S


@pytest.mark.parametrize("count", [3, 16])
def test_peers_that_come_late_or_early_meet_the_others(count: int) -> None:
    """Nobody is more than half of the window late; the leader is among the late ones."""
    for seed in range(150):
        chance = random.Random(seed)
        net = MeetingNet(seed, Faults(latency_s=(0.0, 0.2)))
        for name in names(count):
            by_the_clock(net, name, names(count), comes_s=chance.uniform(-5.0, 0.5 * WINDOW_S))
        net.run()
        assert together_at(net) <= LATEST_S, f"seed {seed}"


def test_views_that_differ_by_a_newcomer_or_in_their_order_still_meet() -> None:
    for seed in range(150):
        chance = random.Random(seed)
        net = MeetingNet(seed, Faults(latency_s=(0.0, 0.2)))
        for name in names(10):
            seen = names(10)
            first, second = chance.sample(range(10), 2)
            seen[first], seen[second] = seen[second], seen[first]
            unseen = chance.choice([peer for peer in seen if peer != name])
            by_the_clock(net, name, [peer for peer in seen if peer != unseen])
        net.run()
        assert together_at(net) <= LATEST_S, f"seed {seed}"


def test_a_peer_that_the_leader_cannot_hear_comes_by_another_way() -> None:
    """The first candidate cannot be called by some, but it can call them: it invites them."""
    for seed in range(100):
        chance = random.Random(seed)
        everybody = names(12)
        deaf_to = chance.sample(everybody[1:], 5)
        cut = frozenset((peer, everybody[0]) for peer in deaf_to)
        net = MeetingNet(seed, Faults(latency_s=(0.0, 0.2), cut=cut))
        for name in everybody:
            by_the_clock(net, name, everybody)
        net.run()
        assert together_at(net) <= LATEST_S, f"seed {seed}"


@pytest.mark.parametrize("frozen", [False, True])
def test_candidates_that_are_dead_are_passed_over(frozen: bool) -> None:
    for seed in range(100):
        everybody = names(12)
        dead = everybody[:2]
        crashes = dict.fromkeys(dead, -1.0)
        faults = Faults((0.0, 0.2), crashes=crashes, frozen=frozenset(dead if frozen else ()))
        net = MeetingNet(seed, faults)
        for name in everybody:
            by_the_clock(net, name, everybody)
        net.run()
        assert [set(group) for group in groups(net)] == [set(everybody[2:])], f"seed {seed}"
        assert max(peer.ended_s for peer in net.peers.values()) <= LATEST_S


def test_a_leader_that_dies_is_replaced() -> None:
    for seed in range(100):
        everybody = names(8)
        crash_s = random.Random(seed).uniform(0.0, 0.4 * WINDOW_S)
        net = MeetingNet(seed, Faults((0.0, 0.2), crashes={everybody[0]: crash_s}))
        for name in everybody:
            # The last one comes never, so that the group stays open.
            if name != everybody[-1]:
                by_the_clock(net, name, everybody)
        net.run()
        assert [set(group) for group in groups(net)] == [set(everybody[1:-1])], f"seed {seed}"


def test_a_member_that_vanishes_before_the_closing_is_not_in_the_group() -> None:
    for seed in range(50):
        everybody = names(6)
        gone = everybody[3]
        for frozen in (frozenset(), frozenset([gone])):
            crashes = {gone: 0.45, everybody[-1]: -1.0}
            net = MeetingNet(seed, Faults((0.0, 0.2), crashes=crashes, frozen=frozen))
            for name in everybody:
                by_the_clock(net, name, everybody)
            net.run()
            expected = set(everybody) - {gone, everybody[-1]}
            assert [set(group) for group in groups(net)] == [expected], f"seed {seed}"


def test_undialable_peers_are_led_and_never_lead() -> None:
    for seed in range(100):
        everybody = names(7)
        undialable = [everybody[0], everybody[3]]
        cut = frozenset((peer, far) for peer in everybody for far in undialable)
        net = MeetingNet(seed, Faults((0.0, 0.2), cut=cut))
        for name in everybody:
            by_the_clock(net, name, everybody, undialable=undialable)
        net.run()
        assert together_at(net) < WINDOW_S, f"seed {seed}"


def test_undialable_peers_alone_do_not_meet() -> None:
    net = MeetingNet(0, Faults())
    for name in names(2):
        by_the_clock(net, name, names(2), undialable=names(2))
    net.run()
    assert groups(net) == []
    assert all("no other peer came" in peer.missed for peer in net.peers.values())


def test_an_excluded_peer_is_neither_waited_for_nor_admitted() -> None:
    everybody = names(5)
    net = MeetingNet(1, Faults())
    for name in everybody:
        by_the_clock(net, name, everybody, excluded=everybody[:1] if name != everybody[0] else ())
    net.run()
    assert [set(group) for group in groups(net)] == [set(everybody[1:])]
    assert net.peers[everybody[0]].missed
    assert net.peers[everybody[1]].ended_s < 0.7 * WINDOW_S


def test_a_bad_row_is_refused_with_the_reason() -> None:
    net = MeetingNet(2, Faults())
    for name in names(3):
        by_the_clock(net, name, names(3))
    bad = Meeting(
        names(3)[2], names(3), b"bad", fine, now_s=0.0, window_s=2.0, close_s=2.0, give_up_s=3.0
    )
    net.peers[names(3)[2]].make = lambda now_s: bad
    leads: list[Meeting] = []
    make = net.peers[names(3)[0]].make
    net.peers[names(3)[0]].make = lambda now_s: leads.append(make(now_s)) or leads[0]  # type: ignore[func-returns-value]
    net.run()
    assert [set(group) for group in groups(net)] == [set(names(3)[:2])]
    assert "its row is bad" in net.peers[names(3)[2]].missed
    (notice,) = leads[0].notices
    assert names(3)[2] in notice
    assert "its row is bad" in notice


def test_who_comes_after_the_closing_is_told() -> None:
    net = MeetingNet(3, Faults())
    for name in names(4):
        by_the_clock(net, name, names(4), comes_s=2.6 if name == names(4)[3] else 0.0)
    net.run()
    assert [set(group) for group in groups(net)] == [set(names(4)[:3])]
    assert "the group has closed" in net.peers[names(4)[3]].missed


def test_awaited_peers_come_one_after_the_other() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        everybody = names(chance.randint(2, 12))
        net = MeetingNet(seed, Faults((0.0, 0.2)))
        awaited = frozenset(everybody)
        comes = {name: chance.choice([0.0, chance.uniform(0.0, 40.0)]) for name in everybody}
        for name in everybody:
            at_any_time(net, name, everybody, comes_s=comes[name], awaited=awaited)
        net.run()
        assert together_at(net) < max(comes.values()) + 2.5, f"seed {seed}"


def test_a_leader_whose_limit_is_later_is_waited_for() -> None:
    """With fixed steps limits begin when a peer enters its round, and somebody does not come."""
    net, everybody = MeetingNet(1, Faults(latency_s=(0.0, 0.2))), ["a", "b", "c", "never"]
    for comes_s, (name, close_s) in enumerate((("a", 40.0), ("b", 20.0), ("c", 25.0))):
        limits = {"comes_s": float(comes_s), "close_s": close_s, "end_s": 90.0}
        at_any_time(net, name, everybody, awaited=frozenset(everybody), **limits)
    net.run()
    assert groups(net) == [("a", "b", "c")]
    assert 40.0 <= together_at(net) < 42.0


def test_where_nobody_can_lead_all_give_up_soon_after_their_limits() -> None:
    """With fixed steps they take no further step as long as they wait."""
    net, everybody = MeetingNet(2, Faults(latency_s=(0.0, 0.2))), ["a", "b", "never"]
    for name, close_s in (("a", 20.0), ("b", 30.0)):
        limits = {"comes_s": 1.0, "close_s": close_s, "end_s": 90.0}
        at_any_time(
            net, name, everybody, awaited=frozenset(everybody), undialable=["a", "b"], **limits
        )
    net.run()
    assert groups(net) == []
    ended = {peer.name: peer.ended_s for peer in net.peers.values()}
    assert ended == {"a": 20.0 + 2 * WINDOW_S, "b": 30.0 + 2 * WINDOW_S}


def test_who_is_awaited_may_change() -> None:
    everybody = names(4)
    net = MeetingNet(5, Faults())
    for name in everybody[:3]:
        at_any_time(net, name, everybody, comes_s=0.0, awaited=frozenset(everybody))
        event = Awaiting(frozenset(everybody[:3]))
        net.at(20.0, lambda name=name, event=event: net.happen(name, event))  # type: ignore[misc]
    net.run()
    assert [set(group) for group in groups(net)] == [set(everybody[:3])]
    assert 20.0 < net.peers[everybody[0]].ended_s < 22.0


def test_a_peer_that_nobody_is_awaited_by_gives_up() -> None:
    net = MeetingNet(6, Faults())
    at_any_time(net, "a", ["a", "b"], comes_s=0.0, awaited=frozenset("ab"))
    net.at(5.0, lambda: net.happen("a", Awaiting(None)))
    net.run()
    assert net.peers["a"].ended_s == 5.0
    assert "nobody is waited for" in net.peers["a"].missed


def test_awaited_undialable_peers_and_a_leader_that_dies() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        everybody = names(8)
        undialable = everybody[2:4]
        cut = frozenset((peer, far) for peer in everybody for far in undialable)
        comes = {name: chance.uniform(0.0, 20.0) for name in everybody}
        first = min((n for n in everybody if n not in undialable), key=lambda n: comes[n])
        frozen = frozenset([first] if seed % 2 else ())
        net = MeetingNet(seed, Faults((0.0, 0.2), cut=cut, crashes={first: 25.0}, frozen=frozen))
        awaited = frozenset(everybody) | {"never"}
        for name in everybody:
            at_any_time(
                net,
                name,
                everybody,
                comes_s=comes[name],
                awaited=awaited,
                undialable=undialable,
            )
        net.run()
        assert [set(group) for group in groups(net)] == [set(everybody) - {first}], f"seed {seed}"


@pytest.mark.parametrize("awaits", [False, True])
def test_whatever_is_lost_nobody_is_in_two_groups(awaits: bool) -> None:
    """Losses, crashes, cuts, latecomers, and views that differ, all at once."""
    met = peers = 0
    for seed in range(250):
        chance = random.Random(seed)
        everybody = names(chance.randint(2, 40 if seed % 10 == 0 else 12))
        crashes = {n: chance.uniform(-1, 3) for n in everybody if chance.random() < 0.15}
        frozen = frozenset(n for n in crashes if chance.random() < 0.5)
        cut = frozenset(
            (a, b) for a in everybody for b in everybody if chance.random() < 0.05 and a != b
        )
        faults = Faults((0.0, 0.3), chance.choice([0.0, 0.02, 0.1, 0.4]), cut, crashes, frozen)
        net = MeetingNet(seed, faults)
        for name in everybody:
            seen = [peer for peer in everybody if peer == name or chance.random() < 0.9]
            if chance.random() < 0.2:
                chance.shuffle(seen)
            comes_s = chance.choice([0.0, chance.uniform(-1.0, 2.0)])
            if awaits:
                awaited = frozenset(seen)
                at_any_time(net, name, seen, comes_s=comes_s, close_s=6.0, awaited=awaited)
            else:
                by_the_clock(net, name, seen, comes_s=comes_s)
        net.run()
        met += sum(len(group) for group in groups(net))
        peers += len(everybody)
        for peer in net.peers.values():
            assert peer.group or peer.missed or peer.name in crashes
    assert met > 0.5 * peers


def test_the_group_has_a_limit() -> None:
    everybody = names(GREATEST_GROUP + 6)
    net = MeetingNet(7, Faults())
    for name in everybody:
        by_the_clock(net, name, everybody)
    net.run()
    greatest, *others = sorted((len(group) for group in groups(net)), reverse=True)
    assert greatest == GREATEST_GROUP
    # Those that were refused may find each other, too few to commit.
    assert sum(others) <= 6


def test_meetings_are_deterministic() -> None:
    def run() -> list[tuple[str, ...]]:
        net = MeetingNet(11, Faults((0.0, 0.3), 0.1))
        for name in names(9):
            by_the_clock(net, name, names(9))
        net.run()
        return [(*group, str(net.messages), str(net.now_s)) for group in groups(net)]

    assert run() == run()


def test_calls_for_a_meeting_to_come_are_held_within_bounds() -> None:
    reception = Reception()
    join = Join(b"row", b"view")
    for number in range(2 * GREATEST_HELD):
        assert reception.hold("later", f"peer-{number}", number, join) == Absent()
    reception.hold("another", "peer-1", 7, join)
    reception.hold("later", f"peer-{2 * GREATEST_HELD - 1}", 9999, join)
    reception.lost("later", f"peer-{2 * GREATEST_HELD - 2}", 2 * GREATEST_HELD - 2)
    held = reception.begin("later")
    assert len(held) == GREATEST_HELD - 2
    assert held[-1].number == 9999
    assert reception.begin("later") == []
    assert [heard.peer for heard in reception.begin("another")] == ["peer-1"]


def test_calls_for_a_meeting_that_is_over_are_refused() -> None:
    reception = Reception()
    reception.end("over")
    answer = reception.hold("over", "late", 0, Join(b"row", b"view"))
    assert isinstance(answer, Refused)
    assert "closed" in answer.reason
    assert reception.hold("other", "stray", 0, Confirm()) is None
    assert reception.hold("other", "early", 0, Join(b"row", b"view")) == Absent()
    assert reception.hold("other", "early", 0, Leave()) is None
    assert reception.begin("other") == []
