"""The stage that makes the base model: what every path starts from, and what routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.modules.frozen_file import rounded_from, write_base
from dipaco.modules.transformer import PathModel
from dipaco.training.dense import SavedTraining

from .corpus_stages import TokensStage
from .pieces import base_model
from .predecessor import Predecessor
from .pretrain import parameters_bytes, pretrain
from .stages import Job, Stage


class BaseStage(Stage):
    """Make the base model.

    Dense pretraining, of random or of imported parameters; with adapters the checkpoint as it is,
    and a row of padding. A successor has the base of the run before; if that was dense
    and is not only given more paths, its trained model, which is a better reader of prefixes.
    """

    name = "base"

    def __init__(
        self, job: Job, tokens: Sequence[TokensStage], imported: ImportedBase | None
    ) -> None:
        super().__init__(job)
        self._tokens, self._imported = tokens, imported

    @property
    def model(self) -> PathModel:
        """The base model on the device of this preparation."""
        job = self.job
        return base_model(job.out, job.config.model, self.sha256, str(job.device))

    @property
    def _trained_dense(self) -> Predecessor | None:
        """The run before, if its trained model is the base of this one."""
        before = self.job.before
        return before if before and before.is_dense and self.job.grown is None else None

    def inputs(self) -> Sequence[Any]:
        config, imported = self.job.config, self._imported
        if self._trained_dense is not None:
            return ["trained", self._trained_dense.digests]
        if self.job.before is not None:
            return [self.job.before.plan.blobs.base]
        if config.model.adapters is not None:
            assert imported is not None  # a RUN.toml with adapters names a base
            return [imported.fingerprint, config.model.adapters.base_format]
        start = [] if imported is None else [imported.fingerprint]
        steps = [config.base_inner(), config.base.steps, config.seed]
        return [self._tokens[0].hash, config.model, *steps, *start]

    def make(self) -> dict[str, Any]:
        job, blobs = self.job, self.job.blobs
        if self._trained_dense is not None:
            return {"sha256": blobs.add_bytes(self._trained_dense.trained_model_bytes())}
        if job.before is not None:
            return {"sha256": job.before.copy_blob(job.before.plan.blobs.base, blobs)}
        with job.display.stage("base model") as progress:
            if job.config.model.adapters is not None:
                assert self._imported is not None
                file, base_format = self.folder / "base", job.config.model.adapters.base_format
                if stored := rounded_from(self._imported.folder, base_format):
                    job.display.say(
                        f"the checkpoint is stored in {stored}, and the run's base is that rounded "
                        f"to {base_format}: adapters are exact on the rounded base; base_format "
                        f"under [adapters] may be fp16 or float32"
                    )
                write_base(self._imported.folder, base_format, file)
                return {"sha256": blobs.add_file(file, move=True)}
            steps = job.config.base.steps
            model = pretrain(
                job.config.model,
                job.config.base_inner(),
                self._tokens[0].corpora[0].rows(job.config.model.sequence_length),
                steps,
                seed=job.config.seed,
                device=job.device,
                initial=self._imported.parameters() if self._imported else None,
                saved=SavedTraining(self.folder / "training.pt", self.hash),
                on_step=lambda step, loss: progress.update(
                    step + 1, steps, f"steps, loss {loss:.3f}"
                ),
            )
            parameters = dict(model.named_parameters())
            return {"sha256": blobs.add_bytes(parameters_bytes(parameters))}

    def tidy(self) -> None:
        (self.folder / "training.pt").unlink(missing_ok=True)
