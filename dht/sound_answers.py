"""Hivemind's DHT protocol, mended where one bad node could harm what others read.

Three things a node could do by one answer to a search: void every record of an answer by a single
bad one, end the search at its own answer by an expiration that is never reached, and make the
search fail by a dictionary whose size is not a number. The DHT process installs these functions
before it starts (`process_guard`); the record validators decide what is bad.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

_find = DHTProtocol.call_find
_NEVER = float("-inf")


def install() -> None:
    """Change the DHT protocol of this process."""
    DHTProtocol._validate_dictionary = drop_refused
    DHTProtocol.call_find = call_find


def drop_refused(protocol: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """Drop the records that the validators refuse; the others are as good as they were.

    In place of Hivemind's check, which refuses all of a dictionary for one bad record.
    """
    dictionary.maxsize = float("inf")
    refused = []
    with dictionary.freeze():
        for subkey, (value, expiration_s) in dictionary.items():
            tag = protocol.serializer.dumps(subkey)
            if not protocol._validate_record(key, tag, value, expiration_s):
                refused.append(subkey)
    for subkey in refused:
        del dictionary[subkey]
    expirations = [item.expiration_time for item in dictionary.data.values()]
    dictionary.latest_expiration_time = max(expirations, default=_NEVER)
    return True


async def call_find(
    protocol: DHTProtocol, peer: Any, keys: Collection[Any]
) -> dict[Any, tuple[ValueWithExpiration[Any] | None, dict[Any, Any]]] | None:
    """Ask a node as Hivemind does, and take an answer's expiration from its records alone."""
    answers = await _find(protocol, peer, keys)
    if answers is None:
        return None
    return {key: (_bounded(found), nearest) for key, (found, nearest) in answers.items()}


def _bounded(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return found
    if not found.value.data:
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)
