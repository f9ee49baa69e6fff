"""Where a peer is with one module: what the parts of `FollowedModule` share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from dipaco.protocol.chain.chain_book import Link
from dipaco.protocol.chain.round_rows import RoundRows
from dipaco.protocol.chain.steps import Head

from .knowledge import Knowledge
from .module_chain import ModuleChain


class Role(Enum):
    """What a peer has to do with a module. Trainers and keepers are its mailboxes too, in turn
    (`Group.mailboxes`)."""

    ONLY_MAILBOX = auto()
    """It knows the chain, the rows and the files, and no state."""
    KEEPER = auto()
    """It holds a copy of the state, or wants one."""
    TRAINER = auto()
    """The peer contributes."""


@dataclass
class Round:
    """A round of a module, made once; a trainer opens it with its boundary and closes it."""

    index: int = -1
    boundary_s: float = -math.inf
    is_open: bool = False
    asks: int = 0
    """Questions to mailboxes for what it brought."""
    sure_s: float = math.inf
    """Until then other mailboxes are waited for before a late proposal."""


@dataclass
class Situation:
    """One module. The parts read it; each says what it changes."""

    known: Knowledge
    chain: ModuleChain
    rows: RoundRows = field(default_factory=RoundRows)
    role: Role = Role.ONLY_MAILBOX
    round: Round = field(default_factory=Round)
    rounds_in_vain: int = 0
    """Rounds in a row that brought no step."""

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.chain.module

    @property
    def link(self) -> Link:
        """The step that this peer stands on."""
        return self.chain.link

    @property
    def head(self) -> Head | None:
        """The state that is held; None of a mailbox, and before the first one is here."""
        return self.chain.head
