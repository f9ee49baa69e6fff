"""What a machine that loses its power may leave of a file that was being written."""

import os

from dipaco.base.index import INDEX_FILE

CUTS = ("nothing", "one byte", "half", "all but one byte", "zeros", "a temporary file beside it")


def cut(file, how):
    """Leave of a file that was written what `how` says, one of `CUTS`.

    A temporary file is left by a writer that came to the middle of the next one.
    """
    content = file.read_bytes()
    if how == "a temporary file beside it":
        file.with_name(f".{file.name}.4242-0123abcd.tmp").write_bytes(content[: len(content) // 2])
        return
    left = {
        "nothing": b"",
        "one byte": content[:1],
        "half": content[: len(content) // 2],
        "all but one byte": content[:-1],
        "zeros": bytes(len(content)),
    }
    mode = file.stat().st_mode
    # Not written over: other names of it, and maps of it, are of files that are whole.
    file.unlink()
    file.write_bytes(left[how])
    file.chmod(mode)


class Disk:
    """A disk that keeps what somebody has waited for, and no more, when the power fails."""

    def __init__(self, monkeypatch):
        self._safe_bytes = {}
        usual = os.fsync

        def fsync(descriptor):
            usual(descriptor)
            found = os.fstat(descriptor)
            self._safe_bytes[found.st_ino] = found.st_size

        monkeypatch.setattr(os, "fsync", fsync)

    def lose_power(self, folder):
        """Take from all files of a folder what was not safe. SQLite's own are left to SQLite."""
        for file in folder.rglob("*"):
            if file.is_file() and not file.name.startswith(INDEX_FILE):
                found = file.stat()
                os.truncate(file, min(found.st_size, self._safe_bytes.get(found.st_ino, 0)))
