"""Why a record, a row or a step that came from elsewhere is refused."""

from __future__ import annotations

from dipaco.base.errors import DipacoError

# The greatest count that a peer may say.
MAX_COUNT = 2**53


class RecordError(DipacoError):
    """A record that is refused; the message says what is wrong with it."""


class OtherProtocolError(RecordError):
    """A record of another version of the protocol, whose peers may be in the same DHT."""
