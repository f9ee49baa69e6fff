"""The best states of a path: early stopping (DiPaCo section 2.7).

A path overfits its shard while training goes on, so the parameters that evaluation and export use
are those with the least loss on its held-out split so far: all modules of the path together, as
they were after one round. They are kept as one *best path* file, and training goes on without it.

The bytes are a safetensors file with Hugging Face names, which a path's model loads as it is,
written in one way only: a header of canonical JSON, then the parameters sorted by name. So equal
bests are equal blobs, named by their SHA-256. The format is described in `docs/protocol.md`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .canonical_file import (
    checked_count,
    encode_header,
    header_of,
    load_bytes,
    numbers_behind,
    parse_metadata,
    parsing,
    read_header,
)
from .errors import IntegrityError, StorageError
from .evaluate import LossSum
from .files import atomic_write, remove_stale_temporaries, sha256_of_file, storage_errors
from .grid import Grid, ModuleLayout
from .state import ModuleState
from .transformer import PathModel

BEST_PATH_FORMAT = "dipaco-best-path/1"
GREATEST_COUNT = 2**53
# Another machine's loss is believed if scoring again gives at most this share more: bf16 and
# other kernels differ by far less, and a false claim gains no more than this.
CLAIM_TOLERANCE = 0.01

_FILE_NAME = re.compile(r"P(\d{5,8})\.safetensors")


@dataclass(frozen=True)
class BestReference:
    """Which best parameters of a path are meant, and what they claim.

    What a peer holds, announces or looks for are best parameters of which it has only this; the
    bytes are fetched by the hash. The loss is a claim until whoever fetched them finds it again.
    """

    path: int
    round_index: int
    held_out_loss: LossSum
    sha256: str

    @property
    def loss(self) -> float:
        """The claimed mean held-out loss in nats."""
        return self.held_out_loss.nll / self.held_out_loss.tokens

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key of the best parameters of a path: the least loss first, then by hash.

        The hash only makes the order one for everybody: none is fetched in place of another
        of the same loss.
        """
        return self.loss, self.sha256


@dataclass(frozen=True)
class BestParameters:
    """The parameters of a path after the round in which its held-out loss was least.

    `parameters` is a flat fp32 CPU tensor [layout.size], `held_out_loss` that of the path's
    early-stopping rows, `digests` names the module states that the parameters were taken from.
    """

    path: int
    round_index: int
    held_out_loss: LossSum
    digests: Mapping[str, str]
    parameters: torch.Tensor
    layout: ModuleLayout

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the bytes, 64 hexadecimal digits."""
        hasher = hashlib.sha256()
        for chunk in best_parameters_chunks(self):
            hasher.update(chunk)
        return hasher.hexdigest()

    @property
    def reference(self) -> BestReference:
        """How these parameters are called and compared."""
        return BestReference(self.path, self.round_index, self.held_out_loss, self.sha256)

    def load_into(self, model: PathModel) -> None:
        """Overwrite the parameters of `model`, which has the run's shape, in place."""
        with torch.no_grad():
            for name, view in self.layout.views(self.parameters).items():
                model.get_parameter(name).copy_(view)


@dataclass(frozen=True)
class BestParametersSummary:
    """What the header of a best-path file says, read without its tensors."""

    path: int
    round_index: int
    held_out_loss: LossSum
    digests: Mapping[str, str]


def path_layout(grid: Grid) -> ModuleLayout:
    """Return the layout of all parameters of a path, the same for every path of the run."""
    shapes = {
        name: shape
        for level in grid.level_names
        for name, shape in zip(grid.layout(level).names, grid.layout(level).shapes, strict=True)
    }
    return ModuleLayout(tuple(sorted(shapes)), tuple(shapes[name] for name in sorted(shapes)))


def best_parameters_of(
    grid: Grid,
    path: int,
    round_index: int,
    held_out_loss: LossSum,
    states: Mapping[str, ModuleState],
) -> BestParameters:
    """Put the best path together from the states of its modules; their tensors are copied.

    Raises KeyError when a module of the path is missing, ValueError for a loss over no tokens.
    """
    if not is_plausible_loss(held_out_loss):
        raise ValueError(f"best parameters need a held-out loss, got {held_out_loss}")
    layout = path_layout(grid)
    parameters = torch.empty(layout.size, dtype=torch.float32)
    views = layout.views(parameters)
    modules = grid.modules_of_path(path)
    for module in modules:
        for name, view in grid.layout(module).views(states[module].parameters).items():
            views[name].copy_(view)
    digests = {module: states[module].digest for module in modules}
    return BestParameters(path, round_index, held_out_loss, digests, parameters, layout)


def is_plausible_loss(losses: LossSum) -> bool:
    """Tell whether this can be the loss of some tokens."""
    return losses.tokens > 0 and math.isfinite(losses.nll) and losses.nll >= 0


def claim_holds(claimed: LossSum, found: LossSum) -> bool:
    """Tell whether the loss that was found bears out the one that was claimed.

    Called by whoever got the parameters from others, with the loss that it finds on the same
    held-out rows.
    """
    if claimed.tokens != found.tokens or not is_plausible_loss(found):
        return False
    return found.nll <= claimed.nll * (1 + CLAIM_TOLERANCE)


def best_parameters_chunks(best: BestParameters) -> Iterator[bytes | memoryview]:
    """Yield the bytes in order without copying the parameters."""
    header = _header(best.path, best.round_index, best.held_out_loss, best.digests, best.layout)
    yield len(header).to_bytes(8, "little")
    yield header
    yield best.parameters.numpy().astype("<f4", copy=False).data.cast("B")


def write_best_parameters(best: BestParameters, file: Path) -> None:
    """Write the bytes to `file`: all or nothing. Raises `StorageError`."""
    atomic_write(file, best_parameters_chunks(best))


def best_path_file_name(path: int) -> str:
    """Return the name of a path's file in a run's `best` folder."""
    return f"P{path:05d}.safetensors"


def path_of_file_name(name: str) -> int | None:
    """Return the path that a file in a `best` folder is of; None for a foreign file."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match and best_path_file_name(int(match[1])) == name else None


def greatest_best_path_bytes(grid: Grid) -> int:
    """Return the most bytes that a best-path file can have, to bound a transfer."""
    last = grid.path_count - 1
    digests = dict.fromkeys(grid.modules_of_path(last), "0" * 64)
    longest = LossSum(-1.2345678901234567e-123, GREATEST_COUNT)
    header = _header(GREATEST_COUNT, GREATEST_COUNT, longest, digests, path_layout(grid))
    return 8 + len(header) + 64 * len(digests) + 4 * path_layout(grid).size


def read_best_parameters(
    source: Path | bytes, grid: Grid, expected_sha256: str | None = None, *, path: int | None = None
) -> BestParameters:
    """Read a best path from a file or from bytes, believing nothing but its claimed loss.

    Checks the hash, that the bytes are the canonical ones for this grid, that the modules are
    those of the path, that all numbers are finite and, where given, the path. Raises
    `IntegrityError` with what is wrong.
    """
    data = load_bytes(source, greatest_best_path_bytes(grid), "a best path")
    sha256 = hashlib.sha256(data.data).hexdigest()
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise IntegrityError(f"best path {expected_sha256[:16]} has the hash {sha256[:16]} instead")
    header = header_of(data, "a best path")
    summary = _parse_header(header)
    if path is not None and summary.path != path:
        raise IntegrityError(f"expected the best of path {path}, got one of path {summary.path}")
    if not summary.path < grid.path_count:
        raise IntegrityError(f"a best path of path {summary.path}, which this run does not have")
    if set(summary.digests) != set(grid.modules_of_path(summary.path)):
        raise IntegrityError(f"the best of path {summary.path} is made of other modules")
    layout = path_layout(grid)
    round_index, held_out_loss = summary.round_index, summary.held_out_loss
    if header != _header(summary.path, round_index, held_out_loss, summary.digests, layout):
        raise IntegrityError(
            f"the best of path {summary.path} has other parameters than this run, or is not in "
            "canonical form"
        )
    numbers = numbers_behind(data, header, layout.size, f"the best of path {summary.path}")
    best = BestParameters(
        summary.path, round_index, held_out_loss, summary.digests, numbers, layout
    )
    # The bytes are canonical; this spares hashing them again.
    best.__dict__["sha256"] = sha256
    return best


def read_best_parameters_summary(file: Path) -> BestParametersSummary:
    """Read only the header of a best-path file. Raises `IntegrityError` when it is none."""
    return _parse_header(read_header(file, "a best path"))


def _header(
    path: int,
    round_index: int,
    held_out_loss: LossSum,
    digests: Mapping[str, str],
    layout: ModuleLayout,
) -> bytes:
    """Return the one header that a best path may have."""
    content = {
        "path": path,
        "round": round_index,
        "nll": float(held_out_loss.nll),
        "tokens": held_out_loss.tokens,
        "modules": dict(digests),
    }
    tensors = zip(layout.names, layout.shapes, strict=True)
    return encode_header(BEST_PATH_FORMAT, "best_path", content, tensors)


def _parse_header(header: bytes) -> BestParametersSummary:
    """Read what a header says that may be anything."""
    with parsing("a best path"):
        content = parse_metadata(header, BEST_PATH_FORMAT, "best_path")
        held_out_loss = LossSum(_number(content["nll"]), _count(content["tokens"]))
        if not is_plausible_loss(held_out_loss):
            raise ValueError("no loss")
        digests = {_text(module): _digest(digest) for module, digest in content["modules"].items()}
        return BestParametersSummary(
            _count(content["path"]),
            _count(content["round"]),
            held_out_loss,
            dict(sorted(digests.items())),
        )


def _number(value: Any) -> float:
    if type(value) is not float:
        raise ValueError("not a float")
    return value


def _count(value: Any) -> int:
    return checked_count(value, GREATEST_COUNT)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _digest(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", _text(value)):
        raise ValueError("not a digest")
    return str(value)


logger = logging.getLogger(__name__)


class BestParametersStore:
    """One best path of every path at most, so disk use is bounded. Thread-safe; one writer.

    Nothing is created before something is held.
    """

    def __init__(self, folder: Path, grid: Grid) -> None:
        self.folder = Path(folder)
        self._grid = grid
        self._lock = threading.Lock()
        self._held: dict[int, BestReference] = {}
        self._size_bytes: dict[int, int] = {}
        # Paths whose file may be another one already than the one that is registered.
        self._being_written: set[int] = set()

    def load_from_disk(self) -> tuple[BestReference, ...]:
        """Register what an earlier process left; other files are reported and left alone."""
        if self.folder.is_dir():
            remove_stale_temporaries(self.folder)
            for file in sorted(self.folder.iterdir()):
                path = path_of_file_name(file.name)
                if path is None or path >= self._grid.path_count:
                    continue
                try:
                    self._register(file, path)
                except (IntegrityError, StorageError) as error:
                    logger.warning("best path on disk not used: %s", error)
        return self.all()

    def _register(self, file: Path, path: int) -> None:
        summary = read_best_parameters_summary(file)
        if summary.path != path:
            raise IntegrityError(f"{file} is of path {summary.path}")
        with storage_errors(self.folder):
            sha256, size_bytes = sha256_of_file(file), file.stat().st_size
        held = BestReference(path, summary.round_index, summary.held_out_loss, sha256)
        with self._lock:
            self._held[path], self._size_bytes[path] = held, size_bytes

    def hold(self, best: BestParameters) -> BestReference:
        """Write a best path in place of the one held of its path. Raises `StorageError`."""
        file = self.file(best.path)
        with self._lock:
            self._being_written.add(best.path)
        try:
            write_best_parameters(best, file)
            with storage_errors(self.folder):
                size_bytes = file.stat().st_size
            with self._lock:
                self._held[best.path], self._size_bytes[best.path] = best.reference, size_bytes
        finally:
            with self._lock:
                self._being_written.discard(best.path)
        return best.reference

    def drop(self, path: int) -> None:
        """Drop what is held of this path."""
        with self._lock:
            self._held.pop(path, None)
        with storage_errors(self.folder):
            self.file(path).unlink(missing_ok=True)

    def get(self, path: int) -> BestReference | None:
        """Return what is held of a path."""
        with self._lock:
            return self._held.get(path)

    def size_bytes(self, path: int) -> int:
        """Return the size of what is, or was last, held of a path."""
        with self._lock:
            return self._size_bytes[path]

    def all(self) -> tuple[BestReference, ...]:
        """Return everything held, by path."""
        with self._lock:
            return tuple(self._held[path] for path in sorted(self._held))

    def load(self, path: int) -> BestParameters | None:
        """Read the best of a path; None when there is none. Raises `IntegrityError`.

        Read from the file, not from what was registered: another process may have written it.
        """
        file = self.file(path)
        return read_best_parameters(file, self._grid, path=path) if file.is_file() else None

    def find(self, sha256: str) -> Path | None:
        """Return the file of the best path with this hash, for serving it; None while it is being
        replaced, or whoever asks would get another one under this hash."""
        with self._lock:
            for path, held in self._held.items():
                if held.sha256 == sha256 and path not in self._being_written:
                    return self.file(path)
        return None

    def file(self, path: int) -> Path:
        """Return where the best of a path lies or would lie."""
        return self.folder / best_path_file_name(path)
