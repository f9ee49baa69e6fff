"""The last stage of preparation: the plan of the run, signed by its operator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.bootstrap.invite import is_open, keep_revocations, note_admission
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from dipaco.protocol.plan import BaseSource, RunBlobs, RunPlan
from dipaco.routing.run_folder import RunFolder

from .predecessor import check_start, operator_key_file
from .stages import Job


class Signing:
    """The signed plan in a run folder, and another one in its place.

    Raises as `operator_key_file` does.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._out, self._before = job, job.out, job.before
        self._operator_key = job.operator_key or job.out / "operator.pem"
        if job.before is not None:
            self._operator_key = operator_key_file(job.before, job.operator_key, job.out)
        self._folder = RunFolder(job.out)

    @cached_property
    def signed(self) -> RunPlan | None:
        """The run that the folder holds already."""
        return self._folder.plan() if self._folder.manifest_path.exists() else None

    def plan(self, blobs: RunBlobs, base_source: BaseSource | None) -> RunPlan:
        """Return the plan of a run with these blobs, whose frozen base comes from there."""
        return self._job.config.plan(
            blobs,
            round(time.time() + (self._job.start_in_s or 0.0), 3),
            self._before.plan.run_id if self._before else None,
            base_source,
        ).model_copy(update={"invitations_of": self._invitations_of})

    def is_signed(self, plan: RunPlan) -> bool:
        """Whether the folder holds this run already, whenever it began. Raises ConfigurationError
        when it holds another one, unless that is to be replaced."""
        if self.signed is None:
            return False
        ignored = {"start_s": 0.0, "admission": None}
        changed = _differing_keys(
            self.signed.model_copy(update=ignored).model_dump(mode="json"),
            plan.model_copy(update=ignored).model_dump(mode="json"),
        )
        changed += ["admission"] * (is_open(self.signed) != self._is_open)
        changed += ["start_s (--start-in-s)"] * (self._job.start_in_s is not None)
        if changed and not self._job.replace:
            raise ConfigurationError(
                f"{self._out} holds the signed run '{self.signed.name}' ({self.signed.run_id}), "
                f"which peers may be training; '{plan.name}' would be another one "
                f"({plan.run_id}), because {', '.join(changed)} differ{'s' * (len(changed) == 1)}. "
                f"Give another folder with --out, or --replace to give up the run there"
            )
        return not changed

    def sign(self, plan: RunPlan) -> tuple[RunPlan, bool]:
        """Sign a plan, unless the same one is signed already. Returns the plan, and whether it is
        new."""
        if self._before:
            check_start(plan, self._before.plan)
        if self.is_signed(plan):
            assert self.signed is not None
            return self.signed, False
        key = load_or_create_operator_key(self._operator_key)
        if self._is_open:
            plan = opened(plan, key)
        if self._before and not self._is_open:
            keep_revocations(self._before.path, self._out)
        note_admission(self._out, plan, key, self._job.display.say)
        # It is written last: once it is there, everything is.
        atomic_write(self._folder.manifest_path, sign_manifest(plan, key))
        return plan, True

    @property
    def _is_open(self) -> bool:
        """Whether everybody is admitted: as the operator asks, or as before."""
        before = self.signed or (self._before.plan if self._before else None)
        if self._job.admission is not None or before is None:
            return self._job.admission != "invitation"
        return is_open(before)

    @property
    def _invitations_of(self) -> str | None:
        """The run whose invitations count here too: its peers stay in, in the successor."""
        before = self._before.plan if self._before else None
        if before is None or self._is_open or is_open(before):
            return None
        return before.admission_scope


def _differing_keys(old: Mapping[str, Any], new: Mapping[str, Any], table: str = "") -> list[str]:
    """Return the keys of nested settings whose values differ, as `outer.momentum`."""
    found = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differing_keys(before, after, f"{table}{key}.")
        elif before != after:
            found.append(f"{table}{key}")
    return found
