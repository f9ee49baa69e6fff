"""What libp2p says about a failed call, in a few words for a log line."""

from __future__ import annotations

import asyncio

# Phrases of go-libp2p, the telling ones first, and what they mean to a volunteer.
_PHRASES = (
    ("protocols not supported", "it does not speak dipaco's protocol"),
    ("peer id mismatch", "another peer answers there"),
    ("multihash", "its peer id is mistyped or cut off"),
    ("dial to self attempted", "it is this very peer"),
    ("connection refused", "connection refused"),
    ("no such host", "the host name is unknown"),
    ("no route to host", "no route to it"),
    ("network is unreachable", "no route to it"),
    ("no good addresses", "the host name is unknown, or it cannot be dialled from here"),
    ("no addresses", "its address is not known"),
    ("routing: not found", "its address is not known"),
    ("failed to find any peer in table", "its address is not known"),
    ("i/o timeout", "it does not answer"),
    ("deadline exceeded", "it does not answer"),
    ("dial backoff", "it did not answer a moment ago"),
    ("stream reset", "it broke off the connection"),
    ("failed to negotiate", "what answers there is not a libp2p peer"),
    ("all dials failed", "it does not answer"),
)


def short_reason(error: BaseException) -> str:
    """Return a short phrase for an error of a remote call: "connection refused"."""
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "it does not answer"
    if isinstance(error, asyncio.IncompleteReadError | EOFError):
        return "it broke off the connection"
    if isinstance(error, ConnectionError):
        return "the connection broke"
    text = str(error)
    for phrase, meaning in _PHRASES:
        if phrase in text:
            return meaning
    lines = text.strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]


def dial_reason(error: BaseException, address: str) -> str:
    """Return why `address` failed, where the dial tried all addresses known of a peer."""
    tried = [line for line in str(error).splitlines() if line.lstrip().startswith("* [")]
    for line in tried:
        if f"[{address}]" in line:
            return short_reason(Exception(line))
    # A host name is listed by what it resolves to. Nothing new was tried: it resolves to nothing.
    if address.startswith("/dns") and tried and all("dial backoff" in line for line in tried):
        return "the host name is unknown"
    return short_reason(error)


def speaks_no_dipaco(error: BaseException) -> bool:
    """Tell whether a libp2p peer answered that it knows no such service."""
    return "protocols not supported" in str(error)


def was_reset(error: BaseException) -> bool:
    """Tell whether the other side reset the stream of a call."""
    return "stream reset" in str(error)
