"""Files: one text for one content, and writing so that a crash, a full disk or a SIGKILL never
leaves half of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ConfigurationError, StorageError
from .waits import may_wait_for

TEMPORARY_SUFFIX = ".tmp"
# A temporary file that nobody has written to for so long, and nobody has locked, was left by a
# process that is gone; where files cannot be locked, after so much longer.
_STALE_TEMPORARY_S, _STALE_UNLOCKED_S = 10.0, 3600.0
_READ_BYTES = 2**20
# What stands in the place of a file that was not fetched is shorter.
_MAX_POINTER_BYTES = 1024
# A link into a store of files by hash, kept as a text where there are no links.
_LINK = re.compile(rb"(?:\.\./)+(?:[\w.-]+/)*(?:objects|blobs)/[\w./-]+\n?")
# Of a disk, what is never filled: other programs and the system need some.
_MAX_RESERVE_BYTES, _RESERVE_PART = 2**30, 20


# Where folders are, if somebody says so.
_FOLDER_VARIABLES = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HOME")
# What file systems without locks answer: NFS without its daemon, Lustre, some of FUSE.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def folder_variable(name: str) -> str | None:
    """Return a variable that names a folder, without the quotes and the white space that other
    programs leave around it; None if it says nothing."""
    return tidy(os.environ.get(name, "")) or None


def tidy(value: str) -> str:
    """Return a value without what stands around it by mistake: the quotes of `docker --env-file`,
    the line ends of Windows, spaces."""
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1].strip()
    return value


def set_by(path: Path) -> str:
    """Return which variable put a path where it is, as the rest of a sentence; "" for none."""
    for name in _FOLDER_VARIABLES:
        folder = folder_variable(name)
        if folder is not None and (
            path.is_relative_to(folder) or Path(folder).is_relative_to(path)
        ):
            return f" ({name}={folder})"
    return ""


def try_lock(descriptor: int, folder: Path) -> bool:
    """Lock an open file in a folder, unless another process has; returns whether it is locked.

    Raises StorageError where files cannot be locked, and OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StorageError(
            f"{folder} is on a file system ({file_system_of(folder.resolve()) or 'unknown'}) that "
            f"cannot lock files: {error.strerror}; give a folder on a local disk with --cache-dir"
        ) from None
    return True


def file_system_of(folder: Path, root: Path = Path("/")) -> str:
    """Return the type of the file system that a folder lies on, "" if it is unknown."""
    words = [line.split() for line in text_of(root / "proc/mounts").splitlines()]
    kinds = {w[1].replace("\\040", " "): w[2] for w in words if len(w) > 2}
    holders = [mount for mount in kinds if folder.is_relative_to(mount)]
    return kinds[max(holders, key=len)] if holders else ""


def text_of(file: Path) -> str:
    """Return what the system says in a file, in one piece; nothing where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def home_folder() -> Path:
    """Return the home of the user; the root, where nobody else may write, of a user without
    a name and without one, as containers have them."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def at_home(name: str) -> str:
    """Return a file's name with the home folder in the place of `~`."""
    return str(home_folder() / name[2:]) if name == "~" or name.startswith("~/") else name


def decoded(content: bytes) -> str:
    """Return a text that a person has saved, also as Windows does: with a byte order mark, or in
    UTF-16 or UTF-32. Raises UnicodeDecodeError."""
    return content.decode(json.detect_encoding(content[:4]))


def missing_content(path: Path) -> str | None:
    """Return why a file is there by name alone, and what to do, as the rest of a line that begins
    with its name. None of a file that is there, or not even by name. Raises OSError."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist; fetch it"
    if not path.is_file() or path.stat().st_size > _MAX_POINTER_BYTES:
        return None
    content = path.read_bytes()
    if content.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a pointer of Git LFS to a file that was not fetched; fetch it: git lfs pull"
    if content.startswith(b"/annex/objects/"):
        return "is a pointer of git-annex to a file that was not fetched; fetch it: git annex get"
    if link := _LINK.fullmatch(content):
        return f"holds the text of a link, {link[0].decode()}; fetch the file itself"
    return None


def check_content(*paths: Path) -> None:
    """Raise StorageError for a file that is there by name alone: see `missing_content`."""
    for path in paths:
        if (reason := missing_content(path)) is not None:
            raise StorageError(f"{path} {reason}")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, also one from Windows. Raises ConfigurationError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(decoded(content))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None


def json_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file, or none in it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def canonical_json(value: Any) -> bytes:
    """Serialise with sorted keys and no white space, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the body into a `StorageError` that says what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"disk full: cannot write in {folder} ({_free_space(folder)}); free some "
                f"space there, or give another folder with --cache-dir (or --out)"
            ) from error
        if error.errno == errno.EROFS:
            raise StorageError(
                f"cannot write {error.filename or folder}: the file system is read-only, as "
                f"after an error of the disk (see dmesg). Give another folder with --cache-dir (or "
                f"--out), or mount it for writing"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise StorageError(
                f"no permission to use {error.filename or folder}; check its owner, or give "
                f"another folder with --cache-dir (or --out)"
            ) from error
        where = error.filename or folder
        raise StorageError(
            f"cannot use {where}: {error.strerror or error}{set_by(Path(where))}"
        ) from error


def spare_bytes(folder: Path) -> int:
    """Return how much may be written where a folder is, or would be: a reserve stays free.

    Less than nothing once others have used the reserve too. Raises OSError.
    """
    disk = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists()))
    return disk.free - min(_MAX_RESERVE_BYTES, disk.total // _RESERVE_PART)


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError:
        return "free space unknown"


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the body succeeds, and vanishes if not.

    The content is on the disk before the name is. Creates the folder. `mode` is what others may do
    with it, before the process's mask. Raises `StorageError`.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name}.{unique}{TEMPORARY_SUFFIX}")
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb", opener=lambda name, how: os.open(name, how, mode)) as handle:
                hold(handle.fileno())
                yield handle
                handle.flush()
                sync(handle.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def atomic_write(
    path: Path, chunks: bytes | Iterable[bytes | bytearray | memoryview], mode: int = 0o666
) -> None:
    """Write `chunks` to `path`: afterwards it has the old content or all of the new."""
    with atomic_file(path, mode) as handle:
        for chunk in (chunks,) if isinstance(chunks, bytes) else chunks:
            handle.write(chunk)


def note(path: Path, text: str) -> None:
    """Write a short text that others read, whole or not at all, and that nobody misses after a
    power cut: it waits for no disk. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    temporary.write_text(text)
    os.replace(temporary, path)


def append(path: Path, data: bytes) -> None:
    """Write behind the end of a file, in an existing folder; it is on the disk afterwards.

    Raises StorageError.
    """
    with storage_errors(path.parent), path.open("ab") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())


def ends_within_a_line(path: Path) -> bool:
    """Tell whether a file ends within a line, as that of a process that was killed may. Raises
    OSError."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where that cannot be; one that is there
    stays. Raises StorageError."""
    if target.exists():
        return
    with storage_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            with source.open("rb") as reader, atomic_file(target) as writer:
                shutil.copyfileobj(reader, writer)
        else:
            sync_folder(target.parent)


def sync(descriptor: int) -> None:
    """Wait until an open file is on the disk. Raises OSError."""
    may_wait_for("the disk")
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, reading it in pieces."""
    hasher = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def hold(descriptor: int) -> None:
    """Lock a temporary file that is being written, where that is possible: it is not stale."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_stale_temporaries(folder: Path) -> None:
    """Delete temporary files that a killed process left in `folder`; stores call it early.

    Those that another process may be writing are spared.
    """
    for temporary in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):
            age_s = time.time() - temporary.stat().st_mtime
            if age_s > _STALE_TEMPORARY_S and not _is_held(temporary, age_s):
                temporary.unlink()


def _is_held(temporary: Path, age_s: float) -> bool:
    """Tell whether a process is writing a temporary file. Raises OSError."""
    with temporary.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return age_s < _STALE_UNLOCKED_S
    return False
