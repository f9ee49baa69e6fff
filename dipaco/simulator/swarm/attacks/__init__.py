"""Attacks by insiders, one idea a file: admitted peers that want to steer or to stop the others.

Nobody can sign for another or make bytes that have a given hash. docs/results/attacks.md has
the attacks by their numbers.
"""

from __future__ import annotations

from .bare_quorum import BareQuorum
from .crowd import Crowd
from .drips import Drips
from .false_digests import FalseDigests
from .foreign_files import ForeignFiles
from .forged_state import ForgedState
from .insider import Insider
from .kept_back import KeptBack, KeptBackPerfectly
from .lying_directory import LyingDirectory
from .pushed_out import PushedOut
from .revoked import Revoked
from .secret_chain import SecretChain, SubtleSecretChain

NO_ATTACK = "none"
# Very many rows take very long to live through: so many rounds are enough.
ROUNDS = {"8": 6}
ATTACKS: dict[str, type[Insider]] = {
    NO_ATTACK: Insider,
    "1": ForgedState,
    "2": LyingDirectory,
    "3": FalseDigests,
    "4": ForeignFiles,
    "5": BareQuorum,
    "6": PushedOut,
    "7": SecretChain,
    "7 subtle": SubtleSecretChain,
    "8": Crowd,
    "11": KeptBack,
    "11 perfect": KeptBackPerfectly,
    "12": Drips,
    "13": Revoked,
}
