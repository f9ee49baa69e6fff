"""The state of a module, its one canonical byte string, and its digest.

The bytes are a safetensors file that any tool can read, written in one way only: a header of
canonical JSON, then the momentum, then the parameters, each sorted by name. The digest is the
SHA-256 of these bytes, so a state is also a blob named by its digest, and equal states have equal
digests on every machine (design 4.3, step). The format is described in `docs/protocol.md`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dipaco.base.errors import IntegrityError
from dipaco.base.files import atomic_write

from .canonical_file import (
    MAX_HEADER_BYTES,
    FileSource,
    checked_count,
    encode_header,
    header_of,
    load_bytes,
    numbers_behind,
    parse_metadata,
    parsing,
    read_header,
)
from .contributions import exact_norm
from .device import all_finite, own_pages
from .layout import ModuleLayout

_STATE_FORMAT = "dipaco-state/4"
# Of tokens and rounds: sums of two still fit into 64 bits.
MAX_COUNT = 2**62 - 1
_MAX_NAME = 64
# Before the first step, this share of the norm of the parameters is the usual norm.
_FIRST_USUAL_NORM = 1 / 4


@dataclass(frozen=True)
class PathProgress:
    """What one path has contributed to a module."""

    tokens: int
    """Its place in the schedule: what one of its peers trained, replicas counted once."""
    last_round: int
    steps: int
    """The number of steps of the module in which it grew."""
    read: int
    """Its place in the shard: what all of its peers trained together."""

    @property
    def usual(self) -> int:
        """The average number of tokens by which it grew in a step."""
        return self.tokens // max(1, self.steps)


@dataclass(frozen=True, eq=False)
class ModuleState:
    """An anchor: what all peers of a module agree on after an outer step. Never modified.

    `parameters` and `momentum` are flat fp32 CPU tensors [layout.size]; `progress` has an entry
    for each path that ever contributed. Raises ValueError for tensors of another kind.
    """

    module: str
    version: int
    parameters: torch.Tensor
    momentum: torch.Tensor
    progress: Mapping[int, PathProgress]
    layout: ModuleLayout
    usual_norm: float
    """L2 norm of a usual contribution (`outer.moved_norm`)."""

    def __post_init__(self) -> None:
        for name in ("parameters", "momentum"):
            tensor: torch.Tensor = getattr(self, name)
            if (
                tensor.shape != (self.layout.size,)
                or tensor.dtype != torch.float32
                or tensor.device.type != "cpu"
                or not tensor.is_contiguous()
                or tensor.requires_grad
            ):
                raise ValueError(
                    f"{name} of {self.module} must be {self.layout.size} contiguous fp32 numbers "
                    f"on the CPU, got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )
        object.__setattr__(self, "progress", dict(sorted(self.progress.items())))

    @cached_property
    def tokens(self) -> int:
        """Tokens behind this state, over all paths."""
        return sum(progress.tokens for progress in self.progress.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the state's bytes, 64 hexadecimal digits."""
        hasher = hashlib.sha256()
        for chunk in state_chunks(self):
            hasher.update(chunk)
        return hasher.hexdigest()

    def rest_on(self, other: ModuleState) -> None:
        """Take the memory of an equal state, read from a file, for everybody who holds this one.

        The memory of this one goes back to the machine. Raises ValueError for another state.
        """
        if other.digest != self.digest:
            raise ValueError(f"{self.module}: state {other.digest[:16]} is another one")
        object.__setattr__(self, "parameters", other.parameters)
        object.__setattr__(self, "momentum", other.momentum)

    @property
    def summary(self) -> StateSummary:
        """What the header of its file says."""
        return StateSummary(self.module, self.version, self.progress, self.usual_norm)

    @property
    def byte_size(self) -> int:
        """Length of the state's bytes."""
        return 8 + len(_header(self.summary, self.layout)) + (8 * self.layout.size)


@dataclass(frozen=True)
class StateSummary:
    """What the header of a state file says, read without its tensors."""

    module: str
    version: int
    progress: Mapping[int, PathProgress]
    usual_norm: float


def genesis_state(
    module: str, layout: ModuleLayout, base: Mapping[str, torch.Tensor]
) -> ModuleState:
    """Return version 0 of a module: the base model's parameters, no momentum, no progress.

    Raises `IntegrityError` when `base` lacks a parameter or has it in another shape.
    """
    parameters = own_pages(layout.size)
    for name, view in layout.views(parameters).items():
        if name not in base:
            raise IntegrityError(f"the base model lacks '{name}', which {module} needs")
        if base[name].shape != view.shape:
            raise IntegrityError(
                f"the base model has '{name}' in shape {tuple(base[name].shape)}, but {module} "
                f"needs {tuple(view.shape)}"
            )
        view.copy_(base[name].detach())
    if not all_finite(parameters):
        raise IntegrityError(f"the base model has numbers in {module} that are not finite")
    usual_norm = first_usual_norm(parameters)
    return ModuleState(module, 0, parameters, own_pages(layout.size), {}, layout, usual_norm)


def first_usual_norm(parameters: torch.Tensor) -> float:
    """Return the usual norm of a state behind which no step is."""
    return _FIRST_USUAL_NORM * exact_norm(lambda b, e: parameters[b:e], parameters.numel())


def state_chunks(state: ModuleState) -> Iterator[bytes | memoryview]:
    """Yield the state's bytes in order without copying its tensors."""
    header = _header(state.summary, state.layout)
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in (state.momentum, state.parameters):
        yield tensor.numpy().astype("<f4", copy=False).data.cast("B")


def write_state(state: ModuleState, file: Path) -> None:
    """Write the state's bytes to `file`: all or nothing. Raises `StorageError`."""
    atomic_write(file, state_chunks(state))


def max_state_bytes(layout: ModuleLayout, path_count: int) -> int:
    """Return the most bytes that a state of this layout with so many paths can have.

    Called before a state is fetched, to bound the transfer.
    """
    greatest = MAX_COUNT
    progress = {greatest + path: PathProgress(*[greatest] * 4) for path in range(path_count)}
    # No double is written with more digits.
    summary = StateSummary("L0000000.E0000000", greatest, progress, sys.float_info.min)
    header = _header(summary, layout)
    return 8 + len(header) + 8 * layout.size


def read_state(
    source: FileSource,
    layout: ModuleLayout,
    expected_digest: str | None = None,
    *,
    module: str | None = None,
    paths: Collection[int] | None = None,
) -> ModuleState:
    """Read a state from a file, which is mapped, or from bytes, believing nothing.

    Checks the digest, that the bytes are the canonical ones for `layout`, that all numbers are
    finite and all counts plausible, and, where given, that it is a state of `module` and that its
    progress names only `paths`. Raises `IntegrityError` with what is wrong.
    """
    data, digest = load_bytes(source, 8 * layout.size + MAX_HEADER_BYTES)
    if expected_digest is not None and digest != expected_digest:
        raise IntegrityError(f"state {expected_digest[:16]} has the digest {digest[:16]} instead")
    header = header_of(data, "a module state")
    summary = _parse_header(header)
    if module is not None and summary.module != module:
        raise IntegrityError(f"expected a state of {module}, got one of {summary.module}")
    if paths is not None and not set(summary.progress) <= set(paths):
        foreign = sorted(set(summary.progress) - set(paths))
        raise IntegrityError(f"state of {summary.module} counts foreign paths {foreign[:5]}")
    _check_header(header, summary, layout)
    numbers = numbers_behind(data, header, 2 * layout.size, f"state of {summary.module}")
    state = ModuleState(
        module=summary.module,
        version=summary.version,
        parameters=numbers[layout.size :],
        momentum=numbers[: layout.size],
        progress=summary.progress,
        layout=layout,
        usual_norm=summary.usual_norm,
    )
    # The bytes are canonical, so their digest is the state's; this spares hashing them again.
    state.__dict__["digest"] = digest
    return state


def read_state_summary(file: Path) -> StateSummary:
    """Read only the header of a state file. Raises `IntegrityError` when it is none."""
    return _parse_header(read_header(file))


def _header(summary: StateSummary, layout: ModuleLayout) -> bytes:
    """Return the one header that a state may have."""
    table = {str(path): list(astuple(entry)) for path, entry in summary.progress.items()}
    content = {
        "module": summary.module,
        "version": summary.version,
        "progress": table,
        "usual_norm": summary.usual_norm,
    }
    shapes = list(zip(layout.names, layout.shapes, strict=True))
    parts = [
        (f"{part}/{name}", shape) for part in ("momentum", "parameters") for name, shape in shapes
    ]
    return encode_header(_STATE_FORMAT, content, parts)


def _parse_header(header: bytes) -> StateSummary:
    """Read module, version and progress out of a header that may be anything."""
    with parsing():
        content = parse_metadata(header, _STATE_FORMAT)
        module, version, table = content["module"], content["version"], content["progress"]
        progress = {
            _count(int(path)): PathProgress(*(_count(number) for number in _four(entry)))
            for path, entry in table.items()
        }
        if not isinstance(module, str) or len(module) > _MAX_NAME:
            raise TypeError("module is not a short string")
        norm = _norm(content["usual_norm"])
        return StateSummary(module, _count(version), dict(sorted(progress.items())), norm)


def _four(entry: Any) -> list[Any]:
    if not isinstance(entry, list) or len(entry) != 4:
        raise ValueError("progress is not four numbers")
    return entry


def _count(value: Any) -> int:
    return checked_count(value, MAX_COUNT)


def _norm(value: Any) -> float:
    if not isinstance(value, float) or not 0.0 <= value < math.inf:
        raise ValueError("a norm is out of range")
    return value


def _check_header(header: bytes, summary: StateSummary, layout: ModuleLayout) -> None:
    """Compare with the only header allowed, and say in words what differs."""
    expected = _header(summary, layout)
    if header == expected:
        return
    found, wanted = json.loads(header), json.loads(expected)
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        detail = f"lacks '{missing[0]}'" if missing else f"has an unknown '{unknown[0][:80]}'"
    else:
        name = next((name for name in wanted if found[name] != wanted[name]), None)
        otherwise = f"describes '{name}' otherwise, as that of another model does"
        detail = otherwise if name else "is not in canonical form"
    raise IntegrityError(f"the header of a state of {summary.module} {detail}")
