"""The plan of a run: everything that peers must agree on, as plain validated data.

The manifest (`dipaco.protocol.manifest`) is this plan, signed. The simulator and the tools read the
plan from a run folder without any network. Large parts are blobs named by their SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    model_validator,
)

from dipaco.base.files import canonical_json

from .about import AboutRun
from .config import (
    Config,
    ContributionsConfig,
    GridConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    OwnTexts,
    RoundsConfig,
    check_adapters,
)

_PLAN_FORMAT: Final = "dipaco-plan/1"
# Raised with whatever other peers can see, unless old peers ignore it by design.
PROTOCOL_VERSION = 8


def protocol_remedy(theirs: int) -> str:
    """Say what to do about others who speak another version of the protocol."""
    if theirs > PROTOCOL_VERSION:
        return (
            "this dipaco is the older one: install the version that the operator names, and start "
            "again with the same cache folder (docs/upgrading.md)"
        )
    return (
        f"this dipaco is the newer one: install a version that speaks protocol {theirs}, or wait "
        f"until the operator has upgraded the run (docs/upgrading.md)"
    )


def _check_sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("must be 64 lower-case hexadecimal digits")
    return value


Sha256 = Annotated[str, AfterValidator(_check_sha256)]

# Most schemes of fsspec read the disk of the peer that opens them, run programs or unpack archives.
_MIRROR_SCHEMES = ("https", "s3", "gs", "hf")


def check_mirror(address: str) -> str:
    """Return the address of a mirror. Raises ValueError unless it names a plain folder afar.

    Checked when a plan is read, and again before a mirror is opened.
    """
    scheme, found, place = address.partition("://")
    if scheme not in _MIRROR_SCHEMES or not found or not place:
        allowed = ", ".join(f"{scheme}://" for scheme in _MIRROR_SCHEMES)
        raise ValueError(
            f"{address[:80]!r} is not a mirror; the address begins with one of {allowed}"
        )
    if not re.fullmatch(r"[!-~]{1,500}", place) or "://" in place or "::" in place:
        raise ValueError(f"{address[:80]!r} is not a mirror; it is not one plain address")
    return address


Mirror = Annotated[str, AfterValidator(check_mirror)]


class PathShard(Config):
    """The sequences routed to one path. Token files are blobs, see `dipaco.routing.shards`."""

    path: int = Field(ge=0)
    train_sha256: Sha256
    train_sequences: int = Field(ge=0)
    train_documents: int = Field(ge=0)
    validation_sha256: Sha256
    validation_sequences: int = Field(ge=0)


class ShardIndex(Config):
    """All shards of a run; the blob `blobs.shards` of a plan is this as JSON."""

    sequence_length: int = Field(ge=8)
    # A complaint takes more memory than what it is about.
    paths: Annotated[tuple[PathShard, ...], FailFast()]
    marked: bool = Field(
        False, description="Whether tokens have marks (`dipaco.modules.marked_tokens`)."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [shard.path for shard in self.paths] != list(range(len(self.paths))):
            raise ValueError("paths must be listed in order, each once")
        return self

    def canonical_json(self) -> bytes:
        """Return the bytes of its blob."""
        return canonical_json(self.model_dump(mode="json", exclude_defaults=True))


class RunBlobs(Config):
    """SHA-256 of the parts of a run that are too large for the manifest."""

    tokenizer: Sha256
    router: Sha256
    base: Sha256 = Field(
        description="The base model: genesis parameters (with adapters: the frozen base, as it is "
        "loaded), and prefix features."
    )
    shards: Sha256 = Field(description="The `ShardIndex` as JSON.")
    genesis: Sha256 | None = Field(
        None, description="JSON of module to state digest, for a successor run; else from `base`."
    )


# What the Hub calls a checkpoint, or a plain word: the READMEs of exports have it in programs and
# command lines that people copy.
BASE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"


class BaseFile(Config):
    """A weight file of a public checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    sha256: Sha256


class BaseSource(Config):
    """The public checkpoint that the frozen base of a run with adapters is made of.

    `RunBlobs.base` is what it becomes; anybody with the checkpoint can make that and compare.
    """

    name: str = Field(pattern=BASE_NAME_PATTERN, description="What the Hugging Face Hub calls it.")
    files: tuple[BaseFile, ...] = Field(min_length=1, max_length=256)


class RoutingPlan(Config):
    """How documents find their path."""

    kind: str = Field("kmeans", description="Kind of the router file.")
    prefix_tokens: int = Field(32, ge=1, description="Tokens that routing sees (section 2.4).")
    train_paths: int = Field(
        1, ge=1, description="Shards that every training document is in (section 2.4.4)."
    )


class RunPlan(Config):
    """Everything that peers must agree on. A run's id is the hash of this."""

    format: Literal["dipaco-plan/1"] = _PLAN_FORMAT
    protocol_version: int = Field(PROTOCOL_VERSION, ge=1)
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    about: AboutRun = Field(AboutRun(), description="What the run is for, for people.")
    seed: int = Field(0, ge=0, lt=2**32)
    start_s: float = Field(0.0, ge=0, le=2**40, description="Unix time at which round 0 begins.")
    model: ModelConfig
    grid: GridConfig
    inner: InnerConfig
    outer: OuterConfig
    rounds: RoundsConfig
    contributions: ContributionsConfig
    own_texts: OwnTexts = Field("no", description="Whether peers may train on texts of their own.")
    routing: RoutingPlan
    blobs: RunBlobs
    base_source: BaseSource | None = Field(
        None, description="Where the frozen base of a run with adapters comes from."
    )
    mirrors: tuple[Mirror, ...] = Field(
        (), max_length=16, description="Addresses of folders that hold blobs by their SHA-256."
    )
    successor_of: str | None = None
    admission: str | None = Field(
        None,
        max_length=400,
        description="The invitation by which everybody is in, of an open run; None: the operator "
        "gives invitations out.",
    )
    invitations_of: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{16}$",
        description="The run whose invitations count here too; None for this run's own.",
    )

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        check_adapters(self.model, self.grid, self.inner)
        if (self.model.adapters is None) != (self.base_source is None):
            raise ValueError("base_source is for a run with adapters, which cannot be without it")
        return self

    @model_validator(mode="after")
    def _check_admission(self) -> Self:
        if self.invitations_of is not None and self.admission is not None:
            raise ValueError("invitations_of is for a run by invitation, not for an open one")
        return self

    def canonical_json(self) -> bytes:
        """Return the one byte string that is hashed and signed."""
        return canonical_json(self.model_dump(mode="json"))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, and with the fingerprint of these."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("fingerprint", None)
        return copied

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the plan, 64 hexadecimal digits."""
        return hashlib.sha256(self.canonical_json()).hexdigest()

    @property
    def admission_scope(self) -> str:
        """What invitations name as the run that they are for: 16 hexadecimal digits.

        The invitation of an open run stands in the plan, so it names the plan without it.
        """
        if self.invitations_of is not None:
            return self.invitations_of
        return self.model_copy(update={"admission": None}).run_id

    @property
    def run_id(self) -> str:
        """First 16 digits of the fingerprint: the name of the run in the DHT."""
        return self.fingerprint[:16]
