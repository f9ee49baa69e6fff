"""One line of `dipaco-peer --check`: what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dipaco.base.errors import ConfigurationError, DipacoError, printable

_SIGNS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Check:
    """The result of one check, which is one line of `--check`."""

    name: str
    verdict: Literal["ok", "warning", "problem"]
    value: str
    remedy: str = ""
    error: DipacoError | None = None
    """The error with which joining would end, if there is a problem."""

    def __str__(self) -> str:
        line = f"{_SIGNS[self.verdict]} {self.name}: {self.value}"
        return printable(f"{line} -> {self.remedy}" if self.remedy else line)


def ok(name: str, value: str, remedy: str = "") -> Check:
    """Nothing is wrong; a remedy may still be worth knowing."""
    return Check(name, "ok", value, remedy)


def warning(name: str, value: str, remedy: str) -> Check:
    """It works, though not as well as it could."""
    return Check(name, "warning", value, remedy)


def problem(
    name: str, value: str, remedy: str, kind: type[DipacoError] = ConfigurationError
) -> Check:
    """A peer cannot run like this: joining ends with an error of this kind."""
    return Check(name, "problem", value, remedy, kind(f"{name}: {value}; {remedy}"))


def failed(name: str, error: DipacoError) -> Check:
    """A step of joining was tried, and ended with this error, which names its own remedy."""
    said, _, remedy = str(error).partition("; ")
    return Check(name, "problem", said, remedy or "start again with --debug", error)
