"""Hivemind's DHT protocol, mended: what a stranger may send a node, and what a node believes.

* A node stores what `quotas.py` admits, which is asked before any signature is checked, and looks
  at so many records of a request only. Nobody writes into its cache, and nobody is told of it.
* Its answers fit into a message, and of an answer it looks at as much as an honest node gives.
* The id of a node is a hash of its peer id. So whoever wants to be near a key has to make keys
  until one is, and cannot be in a routing table many times.

`install` is called in the DHT process, before the node is made.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from .quotas import KEY_BYTES, KEY_RECORDS, HeldRecords, ServedRun

logger = logging.getLogger("dipaco.dht.bounded_protocol")

# Of one request to store, and of one to find; Hivemind asks for a few dozen keys at most.
MOST_STORED, MOST_FOUND = 2048, 256
# Of an answer, and of what is handed to a new node at once. A message may have 4 MiB.
ANSWER_BYTES = 2 * KEY_BYTES
# What MessagePack adds to a record.
_FRAME_BYTES = 32
# Records that are checked before others get their turn.
_AT_ONCE = 32
_NEVER = float("-inf")
# Types of Hivemind's within each other. A node makes one, a dictionary; each level is copied whole.
MOST_NESTED = 2
_nested = threading.local()

_find = DHTProtocol.call_find
_store = DHTProtocol.call_store
_update = DHTProtocol.update_routing_table
_add_handlers = DHTProtocol.add_p2p_handlers
_decode = MSGPackSerializer._decode_ext_types


def install() -> None:
    """Change the DHT protocol of this process."""
    DHTProtocol._validate_dictionary = drop_refused
    DHTProtocol.call_find = call_find
    DHTProtocol.call_store = call_store
    DHTProtocol.rpc_store = rpc_store
    DHTProtocol.rpc_find = rpc_find
    DHTProtocol.update_routing_table = update_routing_table
    DHTProtocol.add_p2p_handlers = _with_quotas
    MSGPackSerializer._decode_ext_types = decode_shallow


def decode_shallow(type_code: int, data: bytes) -> Any:
    """Read one of Hivemind's types, not many within each other. Raises ValueError."""
    depth = getattr(_nested, "depth", 0)
    if depth >= MOST_NESTED:
        raise ValueError(f"more than {MOST_NESTED} types within each other")
    _nested.depth = depth + 1
    try:
        return _decode(type_code, data)
    finally:
        _nested.depth = depth


def node_id_of(peer_id: PeerID) -> DHTID:
    """Return the one id that a peer may have as a node."""
    return DHTID.generate(source=peer_id.to_bytes())


async def serve_run(node: Any, run: ServedRun) -> None:
    """Store the records of `run` from here on. Called through `GuardedDHT.call`."""
    if isinstance(node.protocol.storage, HeldRecords):
        node.protocol.storage.serve(run)


async def _with_quotas(protocol: DHTProtocol, *arguments: Any, **options: Any) -> None:
    """Take a storage with quotas before the first request can arrive. A client keeps its own."""
    protocol.storage = HeldRecords()
    await _add_handlers(protocol, *arguments, **options)


# -- what others want to be stored


async def rpc_store(
    self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext
) -> dht_pb2.StoreResponse:
    """Store the records of a request that are valid and find room."""
    _greet(self, request, context)
    sender, left = context.remote_id.to_bytes(), MOST_STORED
    response = dht_pb2.StoreResponse(store_ok=[], peer=self.node_info)
    fields = (request.keys, request.subkeys, request.values)
    rows = zip(*fields, request.expiration_time, request.in_cache, strict=True)
    for key, tag, value, expiration_s, in_cache in rows:
        entries = [] if in_cache or left <= 0 else _entries_of(self, tag, value, expiration_s)
        stored = bool(entries)
        for subkey, subvalue, subexpiration_s in entries[:left]:
            if left % _AT_ONCE == 0:
                await asyncio.sleep(0)
            left -= 1
            # One that is refused says nothing of the others.
            stored &= _store_one(self, key, subkey, subvalue, subexpiration_s, sender)
        response.store_ok.append(stored)
    return response


def _entries_of(
    protocol: DHTProtocol, tag: bytes, value: bytes, expiration_s: float
) -> list[tuple[Any, Any, Any]]:
    """Return the records in a row of a request: one, or those of a whole dictionary."""
    try:
        if tag != protocol.IS_DICTIONARY:
            return [(protocol.serializer.loads(tag), value, expiration_s)]
        dictionary = protocol.serializer.loads(value)
        assert isinstance(dictionary, DictionaryDHTValue)
        return [(subkey, item.value, item.expiration_time) for subkey, item in _raw(dictionary)]
    except Exception as error:
        logger.debug("a request to store cannot be read: %r", error)
        return []


def _store_one(
    protocol: DHTProtocol, key: bytes, subkey: Any, value: Any, expiration_s: Any, sender: bytes
) -> bool:
    try:
        key_id, tag = DHTID.from_bytes(key), protocol.serializer.dumps(subkey)
        storage = protocol.storage
        return (
            storage.admits(key_id, subkey, value, expiration_s, sender)
            and protocol._validate_record(key, tag, value, expiration_s)
            and storage.store_subkey(key_id, subkey, value, expiration_s, sender)
        )
    except Exception as error:
        logger.debug("a record cannot be stored: %r", error)
        return False


async def call_store(
    protocol: DHTProtocol,
    peer: PeerID,
    keys: Sequence[DHTID],
    values: Sequence[Any],
    expiration_time: Any,
    subkeys: Any = None,
    in_cache: Any = None,
) -> list[bool] | None:
    """Ask a node to store, with messages that fit.

    A node that takes nothing of it is as one that does not answer: the next one is asked.
    """
    if not any(isinstance(value, DictionaryDHTValue) for value in values):
        stored = await _store(protocol, peer, keys, values, expiration_time, subkeys, in_cache)
        return stored if stored and any(stored) else None
    answers: list[bool] = []
    for rows in _portions(values):
        stored = await _store(
            protocol,
            peer,
            [keys[row] for row in rows],
            [values[row] for row in rows],
            [expiration_time[row] for row in rows],
            in_cache=in_cache,
        )
        if stored is None:
            return None
        answers.extend(stored)
    return answers


def _portions(values: Sequence[Any]) -> list[list[int]]:
    """Divide rows so that what is stored of each portion fits into a message."""
    portions: list[list[int]] = []
    room = 0
    for row, value in enumerate(values):
        size = sum(map(_size, _raw(value))) if isinstance(value, DictionaryDHTValue) else len(value)
        if not portions or size > room:
            portions.append([])
            room = ANSWER_BYTES
        portions[-1].append(row)
        room -= size
    return portions


# -- what others want to know


async def rpc_find(
    self: DHTProtocol, request: dht_pb2.FindRequest, context: P2PContext
) -> dht_pb2.FindResponse:
    """Answer with what is stored here of some keys, and with the nodes that are nearest to them.

    What was only read is told to nobody: a reader visits twenty nodes, and each copy is the whole
    key. Five nodes store it, which is enough.
    """
    _greet(self, request, context)
    if len(request.keys) > MOST_FOUND:
        raise ValueError(f"at most {MOST_FOUND} keys at once")
    response = dht_pb2.FindResponse(results=[], peer=self.node_info)
    room = ANSWER_BYTES
    for number, key in enumerate(map(DHTID.from_bytes, request.keys)):
        found = self.storage.get(key)
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            room -= cut(found.value, room // (len(request.keys) - number))
            result = dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY,
                value=self.serializer.dumps(found.value),
                expiration_time=found.value.latest_expiration_time,
            )
        exclude = DHTID.from_bytes(request.peer.node_id)
        nearest = self.routing_table.get_nearest_neighbors(key, self.bucket_size, exclude=exclude)
        for node_id, peer_id in nearest:
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer_id.to_bytes())
        response.results.append(result)
    return response


def cut(dictionary: DictionaryDHTValue, room: int) -> int:
    """Leave the first records of a dictionary that fit; return how many bytes they have."""
    used, kept = 0, dict[Any, ValueWithExpiration[Any]]()
    for subkey, item in _raw(dictionary):
        size = _size((subkey, item))
        if used + size > room or len(kept) >= KEY_RECORDS:
            break
        used += size
        kept[subkey] = item
    dictionary.data = kept
    return used


def drop_refused(protocol: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    """Drop the records that the validators refuse, and what is more than a node stores of a key.

    In place of Hivemind's check, which refuses all of a dictionary for one bad record.
    """
    dictionary.maxsize = float("inf")
    cut(dictionary, KEY_BYTES + KEY_RECORDS * _FRAME_BYTES)
    for subkey, (value, expiration_s) in list(dictionary.data.items()):
        tag = protocol.serializer.dumps(subkey)
        if not protocol._validate_record(key, tag, value, expiration_s):
            del dictionary.data[subkey]
    expirations = [item.expiration_time for item in dictionary.data.values()]
    dictionary.latest_expiration_time = max(expirations, default=_NEVER)
    return True


async def call_find(
    protocol: DHTProtocol, peer: Any, keys: Collection[Any]
) -> dict[Any, tuple[ValueWithExpiration[Any] | None, dict[Any, Any]]] | None:
    """Ask a node as Hivemind does; take an answer's expiration from its records alone, and of the
    nodes that it names those whose ids are their own."""
    answers = await _find(protocol, peer, keys)
    if answers is None:
        return None
    return {
        key: (
            _bounded(found),
            {
                node: other
                for node, other in nearest.items()
                # Others may still have this node in their tables after it became a client.
                if node == node_id_of(other) and node != protocol.node_id
            },
        )
        for key, (found, nearest) in answers.items()
    }


def _bounded(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return found
    if not found.value.data:
        return None
    return ValueWithExpiration(found.value, found.value.latest_expiration_time)


# -- who others are


def _greet(
    protocol: DHTProtocol, request: Any, context: P2PContext
) -> asyncio.Task[dht_pb2.PingResponse]:
    """Let whoever asks into the routing table, as Hivemind does; the loop holds its tasks."""
    return asyncio.create_task(protocol.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))


async def update_routing_table(
    protocol: DHTProtocol, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
) -> None:
    """Note that a node answered or asked, unless its id is not its own."""
    if responded and (node_id is None or node_id != node_id_of(peer_id)):
        return
    await _update(protocol, node_id, peer_id, responded)


def _raw(dictionary: DictionaryDHTValue) -> list[tuple[Any, ValueWithExpiration[Any]]]:
    """Return what stands in a dictionary, expired or not."""
    return list(dictionary.data.items())


def _size(entry: tuple[Any, ValueWithExpiration[Any]]) -> int:
    subkey, item = entry
    value_size = len(item.value) if isinstance(item.value, bytes) else KEY_BYTES
    return (len(subkey) if isinstance(subkey, bytes) else 0) + value_size + _FRAME_BYTES
