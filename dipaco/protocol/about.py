"""What a run is for, in the operator's words: for people alone, nothing depends on it."""

from __future__ import annotations

import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from .config import Config


def _check_line(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise ValueError("must be one line of printable characters, without spaces around it")
    return value


def _check_day(value: str) -> str:
    try:
        datetime.date.fromisoformat(value or "2026-12-31")
    except ValueError:
        raise ValueError("must be a day such as 2026-12-31") from None
    return value


Line = Annotated[str, AfterValidator(_check_line)]


class AboutRun(Config):
    """`[about]`: all of it may be left out. It comes from outside, so it is bounded and printable;
    a page or a card escapes it."""

    description: Line = Field(
        "",
        max_length=400,
        description="What the run is for, in a sentence or two.",
    )
    language: Line = Field(
        "", max_length=60, description="Language of the texts, such as `English` or `de`."
    )
    licence: Line = Field(
        "",
        max_length=80,
        description="Licence of the model that comes out, such as `CC-BY-4.0`.",
    )
    end: Annotated[Line, AfterValidator(_check_day)] = Field(
        "",
        max_length=10,
        description="Day on which you mean to end the run, such as `2026-12-31`. Nothing ends "
        "by itself.",
    )

    @property
    def text(self) -> str:
        """All of it in one line, "" if nothing is said."""
        facts = {
            "language": self.language,
            "licence of the model": self.licence,
            "planned until": self.end,
        }
        said = "; ".join(f"{name} {value}" for name, value in facts.items() if value)
        if self.description and said:
            return f"{self.description} ({said})"
        return self.description or said
