"""`prepare --upload`: the blobs of a run to a mirror, each in a file named by its SHA-256.

What a mirror gives to peers is checked by its hash, so a mirror cannot harm a run; but one with
half a file is of no use. So every file that was written is read back before it is noted, and what
an earlier, interrupted upload left there is believed only after that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dipaco.modules.command_line import shown_bytes
from dipaco.modules.errors import ConfigurationError, NetworkError
from dipaco.modules.files import atomic_write
from dipaco.modules.plan import RunPlan, check_mirror
from dipaco.peer.exchange.fetching import core_blobs
from dipaco.routing.run_folder import RunFolder

if TYPE_CHECKING:
    from .display import Display

_READ_BYTES = 2**22
_ATTEMPTS = 3


def check_target(address: str) -> str:
    """Return the address of a folder that can be uploaded to. Raises ConfigurationError."""
    try:
        check_mirror(address)
    except ValueError as error:
        raise ConfigurationError(f"--upload {error}") from None
    if address.startswith("https://"):
        raise ConfigurationError(
            f"--upload {address}: https can only be read; give the s3://, gs:// or hf:// address "
            f"of that place, or copy the files in the folders of blobs/ there yourself"
        )
    return address.rstrip("/")


def upload(run: RunFolder, plan: RunPlan, address: str, display: Display) -> None:
    """Put every blob of a run where `address` is. Called by `dipaco-bootstrap prepare`.

    Raises ConfigurationError if the address cannot be opened, NetworkError if writing fails.
    """
    import fsspec

    target = check_target(address)
    try:
        system, folder = fsspec.core.url_to_fs(target)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"--upload {target} cannot be opened: {error}") from None
    with display.stage("upload") as progress:
        Uploader(run, plan, system, folder, target).run(
            lambda done, total, note: progress.update(done, total, note)
        )
    if not plan.mirrors:
        display.say(
            f"This run names no mirrors, so no peer looks at {target}; the next one does with "
            f"mirrors = ['{target}'] at the top of its RUN.toml"
        )


class Uploader:
    """Copies blobs into a folder of an fsspec file system, and remembers which are there."""

    def __init__(
        self, run: RunFolder, plan: RunPlan, system: Any, folder: str, address: str
    ) -> None:
        self._blobs = run.blobs
        self._system = system
        self._folder = folder.rstrip("/")
        self._address = address
        self._names = blobs_of(run, plan)
        self._notes = run.path / "work" / "uploads.json"

    def run(self, progress: Callable[[int, int, str], None]) -> int:
        """Upload what is missing, and return how many files were written.

        `progress` gets blobs done, in all, and the bytes that were written.
        """
        noted, written, sent = self._read_notes(), 0, 0
        try:
            self._system.makedirs(self._folder, exist_ok=True)
            for done, sha256 in enumerate(self._names):
                progress(done, len(self._names), f"blobs, {shown_bytes(sent)} sent")
                size = self._blobs.require(sha256).stat().st_size
                if self._size(sha256) == size and (
                    sha256 in noted or self._digest(sha256) == sha256
                ):
                    noted.add(sha256)
                    continue
                self._write(sha256, size)
                noted.add(sha256)
                self._write_notes(noted)
                written, sent = written + 1, sent + size
        except NetworkError:
            raise
        except FileNotFoundError as error:
            raise NetworkError(
                f"--upload {self._address}: {str(error)[:200]}; make that bucket or repository, "
                f"then give the same command again"
            ) from error
        except Exception as error:  # each file system raises what its service raises
            raise NetworkError(
                f"--upload {self._address}: {type(error).__name__}: {str(error)[:200]}; the same "
                f"command goes on from here"
            ) from error
        finally:
            self._write_notes(noted)
        return written

    def _write(self, sha256: str, size: int) -> None:
        """Write a file and read it back; a few times, should it differ."""
        for _ in range(_ATTEMPTS):
            self._system.put_file(str(self._blobs.path(sha256)), self._path(sha256))
            if self._size(sha256) == size and self._digest(sha256) == sha256:
                return
        raise NetworkError(
            f"--upload {self._address}: {sha256} comes back with other bytes, {_ATTEMPTS} times; "
            f"look at that place, then give the same command again"
        )

    def _path(self, sha256: str) -> str:
        return f"{self._folder}/{sha256}"

    def _size(self, sha256: str) -> int | None:
        # What is listed may be remembered from before it was written.
        self._system.invalidate_cache()
        try:
            return int(self._system.size(self._path(sha256)))
        except FileNotFoundError:
            return None

    def _digest(self, sha256: str) -> str:
        hasher = hashlib.sha256()
        with self._system.open(self._path(sha256), "rb") as file:
            while block := file.read(_READ_BYTES):
                hasher.update(block)
        return hasher.hexdigest()

    def _read_notes(self) -> set[str]:
        try:
            found = json.loads(self._notes.read_bytes())
            return set(found.get(self._address, ()))
        except (OSError, ValueError, AttributeError, TypeError):
            return set()

    def _write_notes(self, noted: set[str]) -> None:
        try:
            found = json.loads(self._notes.read_bytes())
            others = dict(found) if isinstance(found, dict) else {}
        except (OSError, ValueError):
            others = {}
        atomic_write(self._notes, json.dumps({**others, self._address: sorted(noted)}).encode())


def blobs_of(run: RunFolder, plan: RunPlan) -> list[str]:
    """Return the hashes of everything that a peer may fetch of a run, each once."""
    names = list(core_blobs(plan))
    for shard in run.shard_index(plan).paths:
        names += [shard.train_sha256, shard.validation_sha256]
    names += (run.genesis_index(plan) or {}).values()
    return list(dict.fromkeys(names))
