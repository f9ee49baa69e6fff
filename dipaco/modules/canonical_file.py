"""The canonical safetensors files of a run: one byte string for one content.

A module's state is a file that any tool reads, but it is written in one way only, so that equal
states have equal bytes on every machine and the SHA-256 of the bytes names them (design 4.3, step).
A file is eight bytes of length, a header of canonical JSON filled up with spaces, then fp32 numbers
in the order of the header. Routers and rerouters are smaller files, of arrays of any kind behind
one metadata entry (`write_arrays`, `read_arrays`). `docs/protocol.md` describes states and routers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.base.files import canonical_json, storage_errors

from .device import all_finite

# A header is parsed before it is checked, which takes 25 times its bytes, and files come from
# strangers. One of 1,024 blocks, or of 2^15 paths, fits.
MAX_HEADER_BYTES = 2**22

FileSource = Path | bytes | bytearray | memoryview
NamedShape = tuple[str, tuple[int, ...]]


def encode_header(format_name: str, content: Any, tensors: Iterable[NamedShape]) -> bytes:
    """Return the header of a state whose fp32 `tensors` lie behind it in their order, and whose
    metadata holds `content`. Its length is a multiple of eight bytes."""
    header: dict[str, Any] = {
        "__metadata__": {"format": format_name, "state": canonical_json(content).decode()}
    }
    offset = 0
    for name, shape in tensors:
        end = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = canonical_json(header)
    return encoded + b" " * (-len(encoded) % 8)


def read_header(file: Path) -> bytes:
    """Read only the header of a file, bounded. Raises `IntegrityError` when there is none."""
    with storage_errors(file.parent), file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise IntegrityError(
                f"{file} is broken: its header would be {length} bytes, and {MAX_HEADER_BYTES} are "
                f"the most"
            )
        header = handle.read(length)
    if len(header) != length:
        raise IntegrityError(f"{file} is cut off")
    return header


def load_bytes(source: FileSource, max_bytes: int) -> tuple[np.ndarray, str]:
    """Return everything as one buffer, uint8, that tensors may be views of, and its SHA-256.

    A file is mapped: it takes only memory that the machine can take back, and may be removed or
    replaced meanwhile, but not written. Raises `IntegrityError` for a file of more than
    `max_bytes`.
    """
    if not isinstance(source, Path):
        return np.frombuffer(bytearray(source), np.uint8), hashlib.sha256(source).hexdigest()
    with storage_errors(source.parent), source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise IntegrityError(f"{source} has {size} bytes, too many for a state of this run")
        # Read first: of a page that cannot be read, a map ends the process without a word.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not size:
            return np.empty(0, np.uint8), digest
        try:
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError:  # Some file systems have no maps.
            file.seek(0)
            return np.fromfile(file, np.uint8), digest
        return np.frombuffer(mapped, np.uint8), digest


def header_of(data: np.ndarray, what: str) -> bytes:
    """Return the header of a whole file. Raises `IntegrityError` when there is none."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8) or length % 8:
        raise IntegrityError(f"{what} is broken: {len(data)} bytes without a whole header")
    return data[8 : 8 + length].tobytes()


def parse_metadata(header: bytes, format_name: str) -> Any:
    """Return the content of the header of a state, which may be anything.

    Raises `IntegrityError` for another format, and what Python raises for broken JSON: it is called
    inside `parsing`.
    """
    metadata = json.loads(header)["__metadata__"]
    if metadata["format"] != format_name:
        raise IntegrityError(f"not a {format_name} file but '{str(metadata['format'])[:40]}'")
    return json.loads(metadata["state"])


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """Raise `IntegrityError` for what Python raises when a header is not that of a state."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"not a module state: {type(error).__name__} in its header") from None


def checked_count(value: Any, greatest: int) -> int:
    """Return `value` if it is an integer from 0 to `greatest`, else raise `ValueError`."""
    if type(value) is not int or not 0 <= value <= greatest:
        raise ValueError("a count is out of range")
    return value


def numbers_behind(data: np.ndarray, header: bytes, count: int, what: str) -> torch.Tensor:
    """Return the `count` numbers behind the header, fp32 [count], as a view of `data`.

    Raises `IntegrityError` when there are more or less, or one is not finite.
    """
    start = 8 + len(header)
    if len(data) != start + 4 * count:
        raise IntegrityError(f"{what} has {len(data)} bytes, not {start + 4 * count}")
    numbers = torch.from_numpy(data[start:].view("<f4").astype(np.float32, copy=False))
    if not all_finite(numbers):
        raise IntegrityError(f"{what} has numbers that are not finite")
    return numbers


def write_arrays(arrays: dict[str, np.ndarray], entry: str, content: Mapping[str, Any]) -> bytes:
    """Return a file of `arrays` whose metadata `entry` holds `content`: the same bytes always.

    Raises ConfigurationError for a content that could make the header longer than is read.
    """
    # One metadata entry only: safetensors writes several in an arbitrary order.
    metadata = {entry: canonical_json(dict(content)).decode()}
    # A string within JSON may take twice as many bytes there.
    if len(metadata[entry]) > MAX_HEADER_BYTES // 2:
        raise ConfigurationError(
            f"the {entry} needs {len(metadata[entry]):,} bytes for its names, and "
            f"{MAX_HEADER_BYTES // 2:,} are the most; take fewer labels"
        )
    # It would write the memory of a transposed array as it lies.
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(plain, metadata=metadata)


def read_arrays(
    data: bytes,
    entry: str,
    format_name: str,
    what: str,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what `write_arrays` wrote, believing nothing: the content, whose "format" is
    `format_name`, and the arrays. Raises `IntegrityError`, naming `what`.
    """
    header = header_of(np.frombuffer(data, dtype=np.uint8), what)
    try:
        metadata = json.loads(header)["__metadata__"]
        content = json.loads(metadata[entry])
        if len(metadata) != 1 or not isinstance(content, dict):
            raise ValueError("other metadata")
        arrays = safetensors.numpy.load(bytes(data))
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{what} is broken: {type(error).__name__} in its header") from None
    if content.get("format") != format_name:
        raise IntegrityError(
            f"{what} has format {str(content.get('format'))[:40]!r}, this version reads "
            f"{format_name!r}"
        )
    return content, arrays
