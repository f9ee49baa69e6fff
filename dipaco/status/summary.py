"""The state of the whole swarm, computed from a view. Pure; `screen.py` prints it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dipaco.protocol.admission import Gate
from dipaco.protocol.config import OwnTexts
from dipaco.protocol.grid import Grid
from dipaco.protocol.manifest import SignedManifest
from dipaco.protocol.view import SwarmView, present_round

from .problems import callable_peers, forked_modules, problems

# More states of one module are not listed.
_MAX_STATES = 8


def status_of(
    view: SwarmView,
    manifest: SignedManifest,
    grid: Grid,
    *,
    successor: SignedManifest | None = None,
    gate: Gate,
) -> dict[str, Any]:
    """Return the status as plain values; its keys are part of the command's contract.

    `successor` is the newest run that succeeds this one, and `gate` says who is admitted.
    """
    plan = manifest.plan
    round_index = present_round(plan, view)
    finished = successor is not None and not any(c.state != "leaving" for c in view.claims.values())
    paths = [_path_status(view, grid, path) for path in range(grid.path_count)]
    # All peers train the successor: what is missing here is no problem.
    found = () if finished else problems(view, plan, grid)
    forked = forked_modules(found)
    modules = [_module_status(view, grid, module, module in forked) for module in grid.modules()]
    return {
        "time_s": round(view.now_s, 3),
        "run": {
            "id": plan.run_id,
            "name": plan.name,
            "fingerprint": plan.fingerprint,
            "start_s": plan.start_s,
            "about": plan.about.text,
        },
        "operator": manifest.operator_fingerprint,
        "round": round_index,
        "round_duration_s": plan.rounds.duration_s,
        "copies": plan.rounds.copies,
        "paths": paths,
        "modules": modules,
        "peers": [_peer_status(view, peer, plan.own_texts) for peer in view.present],
        "validation": _validation_of(paths),
        "successor": _successor_status(successor),
        "finished": finished,
        "admission": _admission_status(view, gate, is_open=plan.admission is not None),
        "healthy": not found,
        "sentence": _sentence_of(view, paths, len(found), able=len(callable_peers(view))),
        "problems": [
            {
                "kind": problem.kind,
                "text": problem.text,
                "what": problem.what,
                "since_round": problem.since_round,
                "remedy": problem.remedy,
                "subjects": list(problem.subjects),
            }
            for problem in found
        ],
    }


def _sentence_of(
    view: SwarmView, paths: Sequence[dict[str, Any]], problem_count: int, able: int
) -> str:
    """Return how the run is, for somebody who knows none of the project's words. `able` is how many
    peers can keep copies for others.
    """
    trainers = sum(claim.state == "training" for claim in view.claims.values())
    trained = sum(path["state"] != "unserved" for path in paths)
    machines = "1 machine" if trainers == 1 else f"{trainers:,} machines"
    how = "all is well"
    if problem_count:
        how = "1 problem" if problem_count == 1 else f"{problem_count:,} problems"
    verb = "is" if trained == 1 else "are"
    parts = f"{trained:,} of {len(paths):,} parts of the model"
    said = f"{how}: {parts} {verb} being trained by {machines}"
    if 0 < trainers < len(paths) and not problem_count:
        said += "; the parts take turns"
    if trainers and able < 2:
        said += "; no other machine keeps copies"
    return said


def _path_status(view: SwarmView, grid: Grid, path: int) -> dict[str, Any]:
    claims = view.claimants(path)
    service = view.progress.get(path)
    rates = [view.peers[c.peer_id].tokens_per_s for c in claims if c.peer_id in view.peers]
    states = {claim.state for claim in claims}
    return {
        "path": path,
        "modules": list(grid.modules_of_path(path)),
        "peers": [claim.peer_id for claim in claims],
        "state": "training" if "training" in states else "joining" if states else "unserved",
        "last_round": view.last_round(path) if service else None,
        "tokens": service.tokens if service else 0,
        "tokens_per_s": round(sum(rates), 1),
        "validation_loss": service.validation_loss if service else None,
        "shard_sequences": service.shard_sequences if service else 0,
    }


def _module_status(view: SwarmView, grid: Grid, module: str, is_forked: bool) -> dict[str, Any]:
    best = view.heaviest(module)
    trainers = view.group(grid, module, joining=False)
    return {
        "module": module,
        "version": best.version if best else 0,
        "step": best.step if best else None,
        "weight": best.weight if best else 0,
        "digest": best.digest if best else None,
        "last_round": best.round_index if best else None,
        "holders": list(view.holders(module, best.step)) if best else [],
        "trainers": len(trainers),
        "states": _announced_states(view, module, trainers),
        # A peer may be a version behind for a moment.
        "agree": not is_forked,
    }


def _announced_states(
    view: SwarmView, module: str, trainers: frozenset[str]
) -> list[dict[str, Any]]:
    """Return the states of a module that peers announce, the newest first, and who holds them."""
    holders: dict[str, list[str]] = {}
    states = {}
    for holding in view.holdings.get(module, ()):
        holders.setdefault(holding.head.digest, []).append(holding.peer_id)
        states[holding.head.digest] = holding.head
    order = sorted(states.values(), key=lambda s: (-s.version, -len(holders[s.digest]), s.digest))
    return [
        {
            "step": state.step,
            "digest": state.digest,
            "version": state.version,
            "trainers": sum(peer in trainers for peer in holders[state.digest]),
            "peers": sorted(holders[state.digest]),
        }
        for state in order[:_MAX_STATES]
    ]


def _peer_status(view: SwarmView, peer: str, own_texts: OwnTexts) -> dict[str, Any]:
    record = view.peers[peer]
    return {
        "peer_id": peer,
        "name": record.name,
        "team": record.team,
        "path": record.path,
        "state": record.state,
        "since_s": record.since_s,
        "tokens_per_s": record.tokens_per_s,
        "waits_for": record.waits_for,
        "device": record.device,
        "software": record.software,
        "protocol": record.protocol,
        "reachable": record.reachable,
        "addresses": list(record.addresses),
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        # Nobody has own texts in a run that forbids them, whatever a peer says.
        "own_texts_loss": record.own_texts_loss if own_texts == "yes" else None,
    }


def _successor_status(successor: SignedManifest | None) -> dict[str, Any] | None:
    if successor is None:
        return None
    plan = successor.plan
    return {"id": plan.run_id, "name": plan.name, "start_s": plan.start_s}


def _admission_status(view: SwarmView, gate: Gate, *, is_open: bool) -> dict[str, Any]:
    """Return how many peers are here by each invitation; an invitation that nobody uses is not
    known."""
    found = gate.admitted()
    used = Counter((found[p].invitation, found[p].places) for p in view.present if p in found)
    return {
        "kind": "open" if is_open else "invitation",
        "invitations": [
            {"id": name, "peers": number, "places": places}
            for (name, places), number in sorted(used.items())
        ],
        "revoked": len(gate.revoked),
    }


def _validation_of(paths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the loss on held-out text of the paths that have one, weighted by their shards."""
    scored = [path for path in paths if path["validation_loss"] is not None]
    # Peers say how large a shard is; one without documents counts for nothing.
    weight = sum(path["shard_sequences"] for path in scored)
    loss = None
    if weight:
        loss = sum(path["validation_loss"] * path["shard_sequences"] for path in scored) / weight
    return {
        "loss": loss,
        "perplexity": None if loss is None else math.exp(min(loss, 700.0)),
        "paths_reporting": len(scored),
        "paths": len(paths),
    }


def with_what_was_known(status: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a status whose paths also have what was known of them before and no peer reports now:
    the peer that reported it may have gone."""
    paths = []
    for now, then in zip(status["paths"], before["paths"], strict=True):
        kept = dict(now)
        # As the newest of several records is found: what was said once does not outlast a round.
        if _how_far(now) < _how_far(then):
            kept |= {name: then[name] for name in ("tokens", "last_round")}
        if now["validation_loss"] is None:
            kept |= {name: then[name] for name in ("validation_loss", "shard_sequences")}
        paths.append(kept)
    return {**status, "paths": paths, "validation": _validation_of(paths)}


def _how_far(path: dict[str, Any]) -> tuple[int, int]:
    return -1 if path["last_round"] is None else path["last_round"], path["tokens"]
