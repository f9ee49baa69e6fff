"""A made-up swarm of 16 paths and 40 peers as the page of a swarm shows it: well, in trouble and
finished. The pictures of docs/status.md are of it."""

import functools

from dipaco.protocol.about import AboutRun
from dipaco.protocol.ledger import Credit, exported
from dipaco.status.history import History
from dipaco.status.page import SwarmPage

from .big_swarm import big_records, fork, neglect, status_at

NAME = "nine-domains"
ROUND = 36
DURATION_S = 600.0
# The afternoon of a day in May.
NOW_S = 1_779_285_600.0
START_S = NOW_S - (ROUND + 0.5) * DURATION_S
WAITING = 5
"""The path that nobody trains in trouble."""
FORKED = "L0.E3"
# The last has none.
TEAMS = ("library", "observatory", "")


def swarm_records(round_index=ROUND):
    """Return the records of the swarm in a round, all of it well."""
    records = big_records(round_index, peers=40, sizes=(4, 4), start_s=START_S, duration_s=DURATION_S)
    about = AboutRun(description="Nine kinds of texts, from laws to folk tales.", licence="CC-BY-4.0")
    records.plan = records.plan.model_copy(update={"name": NAME, "about": about})
    for place, (peer, record) in enumerate(list(records.peers.items())):
        named = {"name": f"volunteer {place}" * (place % 3 == 0), "team": TEAMS[place % 3]}
        records.peers[peer] = record.model_copy(update=named)
    return records


def well(round_index=ROUND):
    """Return the status of a round in which all is well."""
    return status_at(swarm_records(round_index))


def in_trouble():
    """Return the status with a fork and a path that waits."""
    records = swarm_records()
    fork(records, FORKED)
    neglect(records, WAITING, ROUND - 12)
    return status_at(records)


def finished():
    """Return the status when everybody has moved to the successor."""
    records = swarm_records()
    records.claims.clear()
    records.peers.clear()
    plan = records.plan
    return status_at(records, plan.model_copy(update={"name": f"{NAME}-2", "start_s": NOW_S}))


def then(status):
    """Return a status of the run that continues that of `status`, which is finished."""
    new = status["successor"]
    newer = well(1)
    return {**newer, "run": {**newer["run"], "id": new["id"], "name": new["name"]}}


def ledger_of():
    """Return who has contributed to the run."""
    view = swarm_records().view()
    tokens = {name: int(record.tokens_per_s * ROUND) for name, record in view.peers.items()}
    credits = {name: Credit(name, count) for name, count in tokens.items()}
    names = {name: (record.name, record.team) for name, record in view.peers.items()}
    return exported(swarm_records().plan.run_id, credits, names)


@functools.cache
def _earlier(round_index):
    """Return the status of a round, for the curves alone."""
    return well(round_index)


def content_of(status, *, with_ledger=True):
    """Return what the page shows, with the rounds before the status in its history."""
    history = History(None)
    for round_index in range(1, status["round"]):
        history.write({**_earlier(round_index), "run": status["run"]})
    page = SwarmPage(lambda: status, history, 5.0, ledger_of)
    page.look()
    if with_ledger:
        page.count()
        page.look()
    return page
