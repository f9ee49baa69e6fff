"""Which run comes after which (DESIGN 4.8). Pure functions over verified manifests.

A run is succeeded by another when that one names it (`successor_of`), is signed by the same
operator, and starts later. Of several successors of one run the one that starts last counts, so
that running peers and newcomers choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from .manifest import SignedManifest


def next_run(manifest: SignedManifest, others: Iterable[SignedManifest]) -> SignedManifest | None:
    """Return the run that succeeds `manifest`'s directly, if there is one among `others`."""
    following = [other for other in others if _succeeds(other, manifest)]
    return max(following, key=_age, default=None)


def newest_run(manifest: SignedManifest, others: Iterable[SignedManifest]) -> SignedManifest:
    """Follow the chain of successors to its end: the run that peers of `manifest` go to.

    They go there directly; what lies between was only a step for its own peers. A chain has an
    end, because every run in it starts later than the one before.
    """
    others = tuple(others)
    while (following := next_run(manifest, others)) is not None:
        manifest = following
    return manifest


def current_runs(manifests: Iterable[SignedManifest]) -> list[SignedManifest]:
    """Return the runs that a newcomer may mean who names none: the ends of all chains."""
    manifests = tuple(manifests)
    first = [m for m in manifests if not any(_succeeds(m, other) for other in manifests)]
    current = {newest_run(manifest, manifests).plan.run_id for manifest in first}
    return [m for m in manifests if m.plan.run_id in current]


def _succeeds(new: SignedManifest, old: SignedManifest) -> bool:
    return (
        new.plan.successor_of == old.plan.run_id
        and new.operator_fingerprint == old.operator_fingerprint
        and new.plan.start_s > old.plan.start_s
    )


def _age(manifest: SignedManifest) -> tuple[float, str]:
    return manifest.plan.start_s, manifest.plan.run_id
