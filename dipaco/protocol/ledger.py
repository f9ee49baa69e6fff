"""How many tokens each peer trained, from the chains alone (design 4.4, chain). Pure.

Every row in a chain is signed by the peer whose work it is, and at most one row of a peer counts in
a round, so the rows are the ledger. What a peer trains on a path goes into every module of the
path and is the same work: its tokens on a path are those of the module that counts the most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .chain.steps import Step

EXPORT_FORMAT = "dipaco-ledger/4"


@dataclass(frozen=True)
class Credit:
    """What the chains say about one peer."""

    peer: str
    tokens: int
    paths: Mapping[int, int] = field(default_factory=dict)
    """Tokens by path, in the newest run."""
    rows: int = 0
    """Rows in all modules."""
    last_round: int = 0
    """The last round of the newest run; -1 for a peer that is in earlier runs only."""


def credits_of(chains: Mapping[str, Iterable[Step]]) -> dict[str, Credit]:
    """Return the credit of each peer by the heaviest chain of each module."""
    tokens: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    rows: Counter[str] = Counter()
    last_round: dict[str, int] = {}
    for module, steps in chains.items():
        for step in steps:
            for row in step.rows:
                tokens[row.peer][row.path, module] += row.tokens
                rows[row.peer] += 1
                last_round[row.peer] = max(last_round.get(row.peer, 0), row.round_index)
    found = {}
    for peer, sums in sorted(tokens.items()):
        paths: dict[int, int] = {}
        for (path, _), count in sums.items():
            paths[path] = max(paths.get(path, 0), count)
        credit = Credit(
            peer, sum(paths.values()), dict(sorted(paths.items())), rows[peer], last_round[peer]
        )
        found[peer] = credit
    return found


def summed(
    newest: Mapping[str, Credit], earlier: Iterable[Mapping[str, Credit]]
) -> dict[str, Credit]:
    """Return the credit of each peer in a run and in those that it continues."""
    found = dict(newest)
    for credits in earlier:
        for peer, before in credits.items():
            known = found.get(peer, Credit(peer, 0, last_round=-1))
            found[peer] = replace(
                known, tokens=known.tokens + before.tokens, rows=known.rows + before.rows
            )
    return found


def exported(
    run_id: str,
    credits: Mapping[str, Credit],
    names: Mapping[str, tuple[str, str]],
    earlier: Sequence[str] = (),
    not_counted: str | None = None,
) -> dict[str, Any]:
    """Return the ledger as plain values; its keys are part of the command's contract.

    `names` are the names and teams of peers. A name is what its owner says, and two owners may say
    the same: peers are told apart by id. `earlier` are the runs before it that are counted too,
    `not_counted` is the newest one that is not.
    """
    ranked = sorted(credits.values(), key=lambda credit: (-credit.tokens, credit.peer))
    said = {credit.peer: names.get(credit.peer, ("", "")) for credit in ranked}
    teams: Counter[str] = Counter()
    for credit in ranked:
        if said[credit.peer][1]:
            teams[said[credit.peer][1]] += credit.tokens
    return {
        "format": EXPORT_FORMAT,
        "run": run_id,
        "earlier": list(earlier),
        "not_counted": not_counted,
        "tokens": sum(credit.tokens for credit in ranked),
        "peers": [
            {
                "peer_id": credit.peer,
                "name": said[credit.peer][0],
                "team": said[credit.peer][1],
                "tokens": credit.tokens,
                "rows": credit.rows,
                "last_round": credit.last_round,
                "paths": {str(path): count for path, count in credit.paths.items()},
            }
            for credit in ranked
        ],
        "teams": [{"team": team, "tokens": count} for team, count in teams.most_common()],
    }
