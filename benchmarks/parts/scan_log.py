"""A scan that goes on where it ended: one line a history, under the rules that it was lived by."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dipaco.dht
import dipaco.peer.member
import dipaco.simulator.swarm

# What decides how a history goes: what peers decide, and what they decide it by; and what they live
# in and are judged by. A scan is of one state of both. Not all of `dht` takes part: rather once too
# often another digest than one for two kinds of histories.
PARTS = {"rules": (dipaco.peer.member, dipaco.dht), "simulator": (dipaco.simulator.swarm,)}


def digests() -> dict[str, str]:
    """Return what names the present state of the rules and of the simulator.

    Of the code, without comments and docstrings: these change no history.
    """
    return {part: _digest_of(packages) for part, packages in PARTS.items()}


def _digest_of(packages: Iterable[ModuleType]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        # Compiled modules have their source beside them.
        for source in sorted(Path(next(iter(package.__path__))).glob("*.py")):
            text = _without_text(source.read_text(encoding="utf-8"))
            digest.update(f"{package.__name__} {source.name}\n{text}\n".encode())
    return digest.hexdigest()[:12]


def _without_text(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                part
                for part in body
                if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree)


@dataclass(frozen=True)
class Lived:
    """What one history came to."""

    seed: int
    profile: str
    faults: list[str]
    events: int
    sums: dict[str, int]
    violations: list[tuple[str, str]]
    """Invariant and what did not hold, the first of each."""


class ScanLog:
    """The histories of a scan that have been lived, in a file that grows by a line for each."""

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        """Read what is there; `given` is what was asked for besides seeds.

        Raises SystemExit when the file is of other rules, another simulator or other options.
        """
        head = {**digests(), **given}
        self.lived: dict[int, Lived] = {}
        text = path.read_text() if path.exists() else ""
        entries = list(_entries(text))
        if text:
            self._check_head(path, entries[0] if entries else {}, head)
        for entry in entries[1:]:
            entry["violations"] = [(name, what) for name, what in entry["violations"]]
            self.lived[entry["seed"]] = Lived(**entry)
        self._file = path.open("a", buffering=1)
        if text and not text.endswith("\n"):
            print(file=self._file)
        if not text:
            print(json.dumps(head), file=self._file)

    @staticmethod
    def _check_head(path: Path, found: dict[str, Any], head: dict[str, Any]) -> None:
        for name, value in head.items():
            if found.get(name) != value:
                sys.exit(
                    f"error: the histories in {path} have {name} {found.get(name)!r}, these would "
                    f"have {value!r}; give another file"
                )

    def add(self, lived: Iterable[Lived]) -> None:
        """Write down what some histories came to."""
        for one in lived:
            self.lived[one.seed] = one
            print(json.dumps(asdict(one)), file=self._file)


def _entries(text: str) -> Iterator[dict[str, Any]]:
    """Return what the lines say, without the one that a scan was writing when it was killed."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
