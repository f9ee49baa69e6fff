"""Histories that violated an invariant once: each has a reason that is mended."""

from __future__ import annotations

import pytest
from dipaco.simulator.swarm.history import run_history

# Histories that showed a defect, by (profile, seed, members, rounds); None is drawn.
FOUND: tuple[tuple[str, int, int | None, int | None], ...] = (
    ("latency", 7, 5, 6),  # A slow peer joined parts of its work between which a chain parted.
    ("clock", 13, 3, 6),  # A peer alone on a path committed in rounds far ahead.
    ("latency", 99, 5, 6),  # Of three that nobody can call, two had seen each other.
    ("hostile", 67, 5, 6),  # An offered copy was taken for the genesis state to compare with.
    ("mixed", 46, 4, 8),  # Whoever was alone for long forgot what it had trained first.
    ("mixed", 124, 2, 8),  # A claim made by a clock that was ahead was believed by nobody.
    ("mixed", 47, 5, 6),  # Two clocks that were ahead believed each other.
    ("split", 1011, 5, 8),  # A split began between two commits that a peer made alone ...
    ("split", 145, 3, 6),  # ... while the records of the others still lived.
    ("split", 180, 7, 19),  # After a split others held what nobody knew the descent of yet.
    ("hostile", 1004, 5, 8),  # An inventor went on from what others held, and served nothing.
    ("mixed", 117, 5, 8),  # After a start a peer did not count those who had signed with it.
    ("churn", 231, 5, 8),  # Who gave up on a path took its copies with it.
    ("split", 3010, None, None),  # A split in a reduce: the others had merged what came to nothing.
    ("mixed", 3013, None, None),  # Whoever had nothing yet went on from the genesis state.
    ("hostile", 5006, 5, 8),  # Two had parted at genesis, and what one did first was dropped.
    ("mixed", 5036, 5, 8),  # Counted rounds pass sooner than their limit, and each has its cost.
    ("mixed", 6249, 5, 8),  # All were slow, one more than the others.
    ("mixed", 21316, None, None),  # Two that cannot be called, and a third on one's chain ...
    ("mixed", 22304, None, None),  # ... who spoils reduces, or is too slow to come to any.
    ("hostile", 30363, None, None),  # Inventors that serve nothing ended rounds by the clock.
    ("mixed", 30481, None, None),  # Who gave way again and again dropped what it did first.
    ("mixed", 51000, None, None),  # Three chains won over each other in a circle.
    ("latency", 61660, None, None),  # Rounds never ended for steps of half a round.
    ("latency", 100010, None, None),  # Two too slow to take a copy were asked in turn.
    ("suspend", 100716, None, None),  # The chain of who slept had won, and nobody trained then.
    ("mixed", 111393, None, None),  # A meeting of a round that was given up ended in the next one.
    ("latency", 110553, None, None),  # Only keepers had seen who made the chain that won.
    ("latency", 111684, None, None),  # Of steps of 0.6 of a round each outer round met the next.
    ("mixed", 115111, None, None),  # Whom liars had wait at their meetings waited too long ...
    ("closed", 115151, None, None),  # ... and so did those of whom nobody can lead.
    ("split", 115184, None, None),  # What the others held was seen sooner than where it came from.
    ("hostile", 201170, None, None),  # Thirty names that answer refused copies in turn.
    ("mixed", 200001, None, None),  # One part was in the anchor, and four that came to nothing.
    ("mixed", 400942, None, None),  # A line carried its copies in a minute, and a round had 17 s.
    ("mixed", 401046, None, None),  # Others had committed what was joined to the next part.
    ("split", 401275, None, None),  # Others took a state over after they were seen last.
    ("mixed", 450484, None, None),  # Five places that others may go on from were between parts.
    ("churn", 500958, None, None),  # The last one left took itself for cut off.
    ("falsified", 501240, None, None),  # A newcomer counted nobody that slept when it came.
    ("mixed", 510259, None, None),  # Two that cannot be called stood on either side of a third.
    (
        "hostile",
        516212,
        None,
        None,
    ),  # All met a leader with an impossible row again and again.
    ("latency", 531350, None, None),  # What one held that cannot be called parted two parts.
    ("invited", 540317, None, None),  # What a liar held of its own chain passed for a copy.
    ("churn", 560069, None, None),  # All three holders of a state crashed within 72 s.
    ("mixed", 659, None, None),  # Two parts were joined before it was known where others parted.
    ("closed", 11268, None, None),  # Counted rounds end when their last group closes.
    ("mixed", 12242, None, None),  # A clock was put back: steps in rounds before a fork were lost.
    ("mixed", 12619, None, None),  # Who was behind waited for a liar, and stayed behind.
    ("mixed", 4156, None, None),  # Two rounds that came to nothing took the place of two forks.
    ("mixed", 4260, None, None),  # So did own chains that lost, of which nobody held a state.
    ("mixed", 5365, None, None),  # Thirty claims that nobody stands behind were called in turn.
    ("churn", 17254, None, None),  # Who had acknowledged a copy lost its disk, and came back.
    ("churn", 68, None, None),  # A state of 20 s: both that had it crashed.
    ("mixed", 6132, None, None),  # A round of the same name before a restart took its work.
    ("mixed", 13685, None, None),  # One peer looked after five orphans among thirty empty names.
    ("mixed", 9265, None, None),  # Two who slept weighed nothing for one that came meanwhile.
    ("invited", 19433, None, None),  # A liar that never came was waited for by three, in turn.
    ("mixed", 254, None, None),  # Who had made a state left its chain; one slow peer had not yet.
    ("mixed", 491, None, None),  # A clock was put back: rounds that came to nothing did not return.
    ("mixed", 2141, None, None),  # A clock was put back: a pause in a counted round lasted as long.
    ("mixed", 596, None, None),  # A slow peer took a state on the way to one that wins.
    ("mixed", 2662, None, None),  # So did one where a liar had made that.
    ("mixed", 1833, None, None),  # Names on a shared path were called in turn, and nobody else.
    ("mixed", 2237, None, None),  # Two liars said which counted round it is, to two trainers.
    ("mixed", 3164, None, None),  # A peer began with a clock that is an hour ahead: it would not.
    ("mixed", 4153, None, None),  # After a long split the names were called before the keeper.
    ("mixed", 4636, None, None),  # One of two makers had left the chain, the other heard it next.
    ("mixed", 5234, None, None),  # A member of the group, whose signature a split had cut off.
    ("mixed", 1013, 4, 8),  # Who did not come was waited for again after a change of paths.
)


@pytest.mark.parametrize(("profile", "seed", "members", "rounds"), FOUND)
def test_what_was_found_is_mended(
    profile: str, seed: int, members: int | None, rounds: int | None
) -> None:
    result = run_history(seed, profile, members=members, rounds=rounds)
    assert result.violations == [], result.command
