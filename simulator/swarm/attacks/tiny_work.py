"""Attack 9: a contribution whose norm is next to nothing."""

from __future__ import annotations

from .insider import Insider


class TinyWork(Insider):
    """Its contributions have a norm of 1e-38: longer ones are shortened to the median norm, which
    with two contributions is next to nothing, too."""

    content = "tiny"
