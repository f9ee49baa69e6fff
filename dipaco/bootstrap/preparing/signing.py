"""The last stage of preparation: the plan of the run, signed by its operator."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.bootstrap.invite import is_open, keep_revocations, note_admission
from dipaco.bootstrap.run_config import RunConfig
from dipaco.protocol.invitations import opened
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from dipaco.protocol.plan import BaseSource, RunBlobs, RunPlan
from dipaco.routing.run_folder import RunFolder

from .predecessor import Predecessor, check_start, operator_key_file
from .prepare_options import PrepareOptions
from .stages import differing_keys


class Signing:
    """The signed plan in a run folder, and another one in its place.

    Raises as `operator_key_file` does.
    """

    def __init__(
        self, config: RunConfig, out: Path, predecessor: Predecessor | None, options: PrepareOptions
    ) -> None:
        self._config, self._out, self._predecessor = config, out, predecessor
        self._options = options
        self._operator_key = options.operator_key or out / "operator.pem"
        if predecessor is not None:
            self._operator_key = operator_key_file(predecessor, options.operator_key, out)
        self._folder = RunFolder(out)

    @cached_property
    def signed(self) -> RunPlan | None:
        """The run that the folder holds already."""
        return self._folder.plan() if self._folder.manifest_path.exists() else None

    def plan(self, blobs: RunBlobs, base_source: BaseSource | None) -> RunPlan:
        """Return the plan of a run with these blobs, whose frozen base comes from there."""
        return self._config.plan(
            blobs,
            round(time.time() + (self._options.start_in_s or 0.0), 3),
            self._predecessor.plan.run_id if self._predecessor else None,
            base_source,
        ).model_copy(update={"invitations_of": self._invitations_of})

    def is_signed(self, plan: RunPlan) -> bool:
        """Whether the folder holds this run already, whenever it began. Raises ConfigurationError
        when it holds another one, unless that is to be replaced."""
        if self.signed is None:
            return False
        ignored = {"start_s": 0.0, "admission": None}
        changed = differing_keys(
            self.signed.model_copy(update=ignored).model_dump(mode="json"),
            plan.model_copy(update=ignored).model_dump(mode="json"),
        )
        changed += ["admission"] * (is_open(self.signed) != self._is_open)
        changed += ["start_s (--start-in-s)"] * (self._options.start_in_s is not None)
        if changed and not self._options.replace:
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
        if self._predecessor:
            check_start(plan, self._predecessor.plan)
        if self.is_signed(plan):
            assert self.signed is not None
            return self.signed, False
        key = load_or_create_operator_key(self._operator_key)
        if self._is_open:
            plan = opened(plan, key)
        atomic_write(self._folder.manifest_path, sign_manifest(plan, key))
        if self._predecessor and not self._is_open:
            keep_revocations(self._predecessor.folder.path, self._out)
        note_admission(self._out, plan, key, self._options.display.say)
        return plan, True

    @property
    def _is_open(self) -> bool:
        """Whether everybody is in: as is asked for, or as before."""
        before = self.signed or (self._predecessor.plan if self._predecessor else None)
        if self._options.admission is not None or before is None:
            return self._options.admission != "invitation"
        return is_open(before)

    @property
    def _invitations_of(self) -> str | None:
        """The run whose invitations count here too: its peers stay in, in the successor."""
        before = self._predecessor.plan if self._predecessor else None
        if before is None or self._is_open or is_open(before):
            return None
        return before.admission_scope
