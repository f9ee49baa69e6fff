"""Ends with an error when the installed wheel is not of this checkout: collect.sh was forgotten.

python -m gpu_kit.same_code
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts.common import HERE

import dipaco

CHECKOUT = HERE.parent / "dipaco"


def differing(installed: Path, checkout: Path) -> list[str]:
    """Return the Python files that are not the same in both, by their names below each."""

    def texts(folder: Path) -> dict[str, bytes]:
        files = (file for room in folder.iterdir() if room.is_dir() for file in room.rglob("*.py"))
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}

    there, here = texts(installed), texts(checkout)
    return sorted(name for name in there | here if there.get(name) != here.get(name))


if __name__ == "__main__":
    found = differing(Path(str(dipaco.__path__[0])), CHECKOUT)
    if found:
        more = f" and {len(found) - 1} more files" if len(found) > 1 else ""
        sys.exit(
            f"error: the wheel is not of this checkout ({found[0]}{more}); run "
            "benchmarks/gpu_kit/collect.sh again"
        )
