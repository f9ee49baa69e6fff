"""How a run is prepared and signed, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from dipaco.bootstrap.display import Display

from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options that `prepare` and `add_paths` have in common."""

    device: torch.device
    display: Display
    workers: Workers = field(default_factory=Workers)
    """The processes that tokenise, route and score."""
    operator_key: Path | None = None
    """The file of the operator's key. By default it is `operator.pem` in the run folder, which is
    made if it is missing, or in the folder of the run before."""
    start_in_s: float | None = None
    """Round 0 begins so many seconds from now; by default at once."""
    admission: Literal["open", "invitation"] | None = None
    """Whether everybody may join, or peers with an invitation. By default a successor has what the
    run before it has, and a new run is open."""
    replace: bool = False
    """Whether another run that the run folder holds is given up."""
