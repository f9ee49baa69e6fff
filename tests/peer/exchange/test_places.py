"""Places: what one peer, and all strangers together, can hold of this one."""

from dipaco.peer.exchange.streams.places import Places
from dipaco.protocol.allowances import ADMITTED, CONTRIBUTOR, STRANGER, Asker, Bounds
from support.waiting import HandClock


def bounds(total, each, together, each_stranger):
    return Bounds(
        total,
        {CONTRIBUTOR: each, ADMITTED: each, STRANGER: each_stranger},
        {STRANGER: together},
        grace_s=10.0,
        wanted_rate_bytes_s=1000.0,
    )


class TakenPlaces:
    """Places, and whose were taken away."""

    def __init__(self, of=bounds(8, 6, 4, 2)):
        self.time, self.stopped, self.used = HandClock(), [], {}
        self.places = Places(of, lambda asker: self.used.get(asker.name, 0.0), self.time)

    def take(self, peer, *, is_stranger=False, is_contributor=False):
        standing = CONTRIBUTOR if is_contributor else ADMITTED
        standing = STRANGER if is_stranger else standing
        return self.places.take(Asker(standing, peer), lambda: self.stopped.append(peer))


def test_one_peer_and_strangers_have_so_many_places():
    places = TakenPlaces()
    assert all(places.take("a") for _ in range(6))
    assert places.take("a") is None
    other = TakenPlaces()
    assert all(other.take("s", is_stranger=True) for _ in range(2))
    assert other.take("s", is_stranger=True) is None
    assert all(other.take("t", is_stranger=True) for _ in range(2))
    # Somebody who has none gets one of theirs, and the third no more than that.
    assert other.take("u", is_stranger=True) is not None
    assert len(other.stopped) == 1
    # Room for peers that are in.
    assert all(other.take("a") for _ in range(4))


def test_when_all_are_taken_who_has_many_gives_to_who_has_few():
    places = TakenPlaces()
    for name in "aaaaaabb":
        assert places.take(name)
    assert [places.take(name) is not None for name in "cdef"] == [True] * 4
    assert places.stopped == ["a"] * 4
    # Now each has one or two: nobody has two more than a newcomer but those.
    assert places.take("g") is not None
    assert len(places.stopped) == 5


def test_who_takes_bytes_too_slowly_gives_its_place_and_who_waited_for_us_does_not():
    places = TakenPlaces(bounds(2, 1, 1, 1))
    fast, _ = places.take("fast"), places.take("slow")
    places.time.s += 60.0
    fast.moved(100_000)
    assert places.take("new") is not None
    assert places.stopped == ["slow"]
    held_up = TakenPlaces(bounds(1, 1, 1, 1))
    place = held_up.take("a")
    held_up.time.s += 60.0
    place.excuse(55.0)
    assert held_up.take("b") is None


def test_who_contributed_has_room_before_those_that_an_open_run_lets_in():
    places = TakenPlaces()
    for number in range(8):
        assert places.take(f"identity {number}")
    assert places.take("new") is None
    assert all(places.take(f"good {number}", is_contributor=True) for number in range(6))
    assert len(places.stopped) == 6
    # A quarter is for the others, who may become contributors.
    assert places.take("good 7", is_contributor=True) is None


def test_a_place_that_was_taken_away_is_given_back_without_harm():
    places = TakenPlaces()
    held = [places.take("a") for _ in range(6)] + [places.take("b") for _ in range(2)]
    assert places.take("c")
    for place in held:
        places.places.give_back(place)
    assert all(places.take("d") for _ in range(6))
    assert places.stopped == ["a"]


def test_among_strangers_who_has_used_more_gives_way_after_a_while():
    """Many prefixes, a place each, could else keep out whoever comes after them."""
    taken = TakenPlaces()
    for number in range(4):
        taken.used[f"flood {number}"] = 5.0 + number
        assert taken.take(f"flood {number}", is_stranger=True)
    assert taken.take("new", is_stranger=True) is None
    taken.time.s += 11.0
    for place in taken.places._taken:
        place.moved(10**9)  # none of them is slow
    taken.used["greedy"] = 9.0
    assert taken.take("greedy", is_stranger=True) is None
    assert taken.take("new", is_stranger=True) is not None
    assert len(taken.stopped) == 1
