"""How many peers are enough: all the counting of peers that a member does.

See design 4.3, gather, and design 4.4, chain. Pure.

                                       enough
    to propose a step                  more than half of the voters and of those who have told a row
                                       of the round, or two rounds that brought no step
    to overrule a held-out loss        half of the voters, and at least two; or the only one
    to be alone with a digest          more than half of the voters, this peer counted in, name
                                       another one
    to vouch for a state               more than half of those who contributed before
                                       (`ChainBook.vouched`)

The *voters* are those who contributed to the last steps and still train the module.
"""

from __future__ import annotations

from collections.abc import Set

# Rounds without a step after which a proposal needs no quorum: otherwise a swarm whose members left
# without a word would stand still.
ROUNDS_IN_VAIN = 2


def is_majority(part: Set[str], voters: Set[str]) -> bool:
    """Tell whether more than half of the voters, and at least one, are among others."""
    return 2 * len(part & voters) > len(voters)


def may_overrule(part: Set[str], voters: Set[str]) -> bool:
    """Tell whether these peers overrule what held-out documents say of their chain. Half are
    enough, so that even parts of a swarm come together again; one of two is nobody's majority."""
    common = len(part & voters)
    return 2 * common >= len(voters) and (common > 1 or common == len(voters) == 1)


def may_propose(contributors: Set[str], voters: Set[str], rounds_in_vain: int) -> bool:
    """Tell whether a step with these contributors may be proposed. This saves forks; nothing that
    others are told has to follow it."""
    return not voters or rounds_in_vain >= ROUNDS_IN_VAIN or is_majority(contributors, voters)
