"""Hivemind's DHT protocol with bounds: what a stranger may send a node, and what a node believes.

* A node deals with others of its company only, see `company.py`: it asks them, stores at them and
  has them in its table. What others say or name is left out.
* A node stores what `quotas.py` admits, which is asked before any signature is checked, and looks
  at so many records of a request only. Nobody writes into its cache, and nobody is told of it.
* Its answers fit into a message, and of an answer it looks at as much as an honest node gives.
* To store something, a peer searches for the nodes near a key, not for what they have there.

`install` is called in the DHT process, before the node is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from dipaco.protocol.admission import Gate
from dipaco.protocol.record_keys import MAX_SUBKEY_BYTES, parse_subkey

from .company import Company, node_id_of, wants_to_be_asked
from .metering import Context, MeteredHandlers, metering_of
from .quotas import KEY_BYTES, KEY_RECORDS, HeldRecords, KnownRun

logger = logging.getLogger("dipaco.dht.bounded_protocol")

# Of one request to store, and of one to find; Hivemind asks for a few dozen keys at most.
_MAX_STORED, _MAX_FOUND = 2048, 256
# Of an answer, and of what is handed to a new node at once. A message may have 4 MiB.
_ANSWER_BYTES = 2 * KEY_BYTES
# What MessagePack adds to a record.
_FRAME_BYTES = 32
# Records that are checked before others get their turn.
_AT_ONCE = 32
_NEVER = float("-inf")
# Nodes of the table that are told when there is something new to say, and nodes that somebody names
# that are asked for their admission.
_MAX_GREETED, _MAX_MET = 64, 20
# Types of Hivemind's within each other. A node makes one, a dictionary; each level is copied whole.
_MAX_NESTED = 2
_nested = threading.local()

_find_nearest = DHTNode.find_nearest_nodes
_get_stub = DHTProtocol.get_stub
_ping = DHTProtocol.call_ping
_find = DHTProtocol.call_find
_store = DHTProtocol.call_store
_update = DHTProtocol.update_routing_table
_add_handlers = DHTProtocol.add_p2p_handlers
_decode = MSGPackSerializer._decode_ext_types


def install(given: Iterable[str] = ()) -> None:
    """Change the DHT protocol of this process, whose node was given the addresses of `given`."""
    DHTProtocol.company = Company(given)
    DHTProtocol.refusal = None
    DHTNode.find_nearest_nodes = find_nearest_nodes
    DHTProtocol.get_stub = get_stub
    DHTProtocol.call_ping = call_ping
    DHTProtocol.rpc_ping = rpc_ping
    DHTProtocol._validate_dictionary = drop_refused
    DHTProtocol.call_find = call_find
    DHTProtocol.call_store = call_store
    DHTProtocol.rpc_store = rpc_store
    DHTProtocol.rpc_find = rpc_find
    DHTProtocol.update_routing_table = update_routing_table
    DHTProtocol.add_p2p_handlers = _with_bounds
    MSGPackSerializer._decode_ext_types = decode_shallow
    DictionaryDHTValue.unpackb = read_dictionary


def decode_shallow(type_code: int, data: bytes) -> Any:
    """Read one of Hivemind's types, not many within each other. Raises ValueError."""
    depth = getattr(_nested, "depth", 0)
    if depth >= _MAX_NESTED:
        raise ValueError(f"more than {_MAX_NESTED} nested types")
    _nested.depth = depth + 1
    try:
        return _decode(type_code, data)
    finally:
        _nested.depth = depth


def read_dictionary(data: bytes) -> DictionaryDHTValue:
    """Read a dictionary, in place of Hivemind's way: one that has more records than a node stores
    under a key is refused before they are read. Raises ValueError."""
    _, latest_s, entries = msgpack.unpackb(
        data,
        ext_hook=MSGPackSerializer._decode_ext_types,
        raw=False,
        max_array_len=KEY_RECORDS,
        max_map_len=0,
    )
    found = DictionaryDHTValue()
    with found.freeze():
        for key, value, expiration_s in entries:
            found.store(key, value, expiration_s)
    found.latest_expiration_time = latest_s
    return found


async def serve_run(node: Any, run: KnownRun) -> None:
    """Store the records of `run` from here on, and let its peers in. Called through
    `GuardedDHT.call`, also by a reader, which stores nothing."""
    protocol = node.protocol
    gates: tuple[Gate, ...] = (run.gate,)
    if isinstance(protocol.storage, HeldRecords):
        protocol.storage.serve(run)
        gates = protocol.storage.gates
    protocol.company.open(gates)
    table = protocol.routing_table
    for node_id, peer_id in list(table.uid_to_peer_id.items()):
        if not protocol.company.knows(peer_id):
            del table[node_id]
    node.blacklist.clear()
    begin(_get_acquainted(node))


async def let_in(node: Any, gates: Sequence[Gate]) -> None:
    """Let in the peers that are admitted to runs of the same chain, too."""
    node.protocol.company.open_also(gates)


async def note_contributors(node: Any, peers: frozenset[str]) -> None:
    """Have places, and room for the records, of these before those of others."""
    storage = node.protocol.storage
    node.protocol.company.contributors = peers
    if isinstance(storage, HeldRecords):
        storage.contributors = peers
        for gate in storage.gates:
            for peer in peers:
                gate.contributed(peer, 0)


async def introduce(node: Any, admission: bytes, is_client: bool | None = None) -> None:
    """Show others from here on that this node is in, and whether it can be asked."""
    protocol = node.protocol
    company, before = protocol.company, protocol.node_info
    company.admission = admission or company.admission
    company.is_client = company.is_client if is_client is None else is_client
    if not protocol.client_mode:
        protocol.node_info = company.introduction(protocol.node_id)
    if protocol.node_info != before:
        begin(_get_acquainted(node))


def begin(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin a task on a loop that holds its tasks."""
    return asyncio.create_task(coroutine)


async def _get_acquainted(node: Any) -> None:
    """Ask for the nodes that are near this one, so that both sides know each other."""
    with contextlib.suppress(Exception):
        table = list(node.protocol.routing_table.uid_to_peer_id.values())
        await asyncio.gather(*(node.protocol.call_ping(peer) for peer in table[:_MAX_GREETED]))
        await node.find_nearest_nodes([node.protocol.node_id])


async def _with_bounds(protocol: DHTProtocol, p2p: P2P, *arguments: Any, **options: Any) -> None:
    """Take a storage with quotas, and have requests paid for, before the first one can arrive. A
    client keeps its own storage, and is asked nothing."""
    protocol.storage = HeldRecords()
    protocol.metering = metering_of(p2p, protocol.company)
    await _add_handlers(protocol, MeteredHandlers(p2p, protocol.metering), *arguments, **options)


# -- what others want to be stored


async def rpc_store(
    self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext
) -> dht_pb2.StoreResponse:
    """Store the records of a request that are valid and find room."""
    is_in, left = _greet(self, request, context), _MAX_STORED
    if len(request.keys) > _MAX_STORED:
        raise ValueError(f"at most {_MAX_STORED} rows at once")
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
            stored &= _store_one(self, key, subkey, subvalue, subexpiration_s, is_in)
        response.store_ok.append(stored)
    return response


def _entries_of(
    protocol: DHTProtocol, tag: bytes, value: bytes, expiration_s: float
) -> list[tuple[Any, Any, Any]]:
    """Return the records in a row of a request: one, or those of a whole dictionary."""
    try:
        if len(tag) > MAX_SUBKEY_BYTES + _FRAME_BYTES:
            return []
        if tag != protocol.IS_DICTIONARY:
            return [(protocol.serializer.loads(tag), value, expiration_s)]
        dictionary = protocol.serializer.loads(value)
        assert isinstance(dictionary, DictionaryDHTValue)
        return [(subkey, item.value, item.expiration_time) for subkey, item in _raw(dictionary)]
    except Exception as error:
        logger.debug("a request to store cannot be read: %r", error)
        return []


def _store_one(
    protocol: DHTProtocol, key: bytes, subkey: Any, value: Any, expiration_s: Any, is_in: bool
) -> bool:
    try:
        key_id, tag = DHTID.from_bytes(key), protocol.serializer.dumps(subkey)
        storage = protocol.storage
        return (
            (is_in or _certifies_itself(subkey))
            and storage.admits(key_id, subkey, value, expiration_s)
            and protocol._validate_record(key, tag, value, expiration_s)
            and storage.store_subkey(key_id, subkey, value, expiration_s)
        )
    except Exception as error:
        logger.debug("a record cannot be stored: %r", error)
        return False


async def find_nearest_nodes(
    node: Any,
    queries: Collection[DHTID],
    *,
    found_callback: Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]] | None = None,
    **options: Any,
) -> dict[DHTID, dict[DHTID, PeerID]]:
    """Return the nodes that are nearest to some keys, without fetching what stands under them.

    Each node that stores a key answers with all of it. The id beside a key, which differs in the
    last bit, is as near to every node, and nothing stands there.
    """
    keys = {DHTID(int(key) ^ 1): key for key in queries}

    async def on_found(beside: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
        if found_callback is not None:
            await found_callback(keys[beside], nearest, visited)

    found = await _find_nearest(node, list(keys), found_callback=on_found, **options)
    return {keys[beside]: nodes for beside, nodes in found.items()}


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
            room = _ANSWER_BYTES
        portions[-1].append(row)
        room -= size
    return portions


# -- what others want to know


async def rpc_find(
    self: DHTProtocol, request: dht_pb2.FindRequest, context: Context
) -> dht_pb2.FindResponse:
    """Answer with what is stored here of some keys, and with the nodes that are nearest to them.

    What was only read is told to nobody: a reader visits twenty nodes, and each copy is the whole
    key. Five nodes store it, which is enough.
    """
    _greet(self, request, context)
    if len(request.keys) > _MAX_FOUND:
        raise ValueError(f"at most {_MAX_FOUND} keys at once")
    keys = list(dict.fromkeys(map(DHTID.from_bytes, request.keys)))
    if len(keys) < len(request.keys):
        raise ValueError("a key is asked for twice")
    size = min(_ANSWER_BYTES, sum(map(self.storage.size_of, keys)))
    await self.metering.pay_for_answer(context.asker, size)
    response = dht_pb2.FindResponse(results=[], peer=self.node_info)
    room = _ANSWER_BYTES
    for number, key in enumerate(keys):
        found = self.storage.get(key)
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            room -= _cut(found.value, room // (len(keys) - number))
            result = dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY,
                value=self.serializer.dumps(found.value),
                expiration_time=found.value.latest_expiration_time,
            )
        exclude = node_id_of(context.remote_id)
        nearest = self.routing_table.get_nearest_neighbors(key, self.bucket_size, exclude=exclude)
        for node_id, peer_id in nearest:
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer_id.to_bytes())
        response.results.append(result)
    return response


def _cut(dictionary: DictionaryDHTValue, room: int) -> int:
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
    _cut(dictionary, KEY_BYTES + KEY_RECORDS * _FRAME_BYTES)
    found = _raw(dictionary)
    # A dictionary also has its records in the order in which they expire. One that is left there
    # alone would raise when it expires, and Hivemind's search would never end.
    dictionary.clear()
    dictionary.maxsize, dictionary.latest_expiration_time = float("inf"), _NEVER
    for subkey, (value, expiration_s) in found:
        tag = protocol.serializer.dumps(subkey)
        if protocol._validate_record(key, tag, value, expiration_s):
            dictionary.store(subkey, value, expiration_s)
    return True


async def call_find(
    protocol: DHTProtocol, peer: Any, keys: Collection[Any]
) -> dict[Any, tuple[ValueWithExpiration[Any] | None, dict[Any, Any]]] | None:
    """Ask a node as Hivemind does; take an answer's expiration from its records alone, and of the
    nodes that it names those of this node's company."""
    answers = await _find(protocol, peer, keys)
    if answers is None:
        return None
    named = {other for _, nearest in answers.values() for other in nearest.values()}
    await _meet(protocol, named)
    return {
        key: (
            _bounded(found),
            {
                node: other
                for node, other in nearest.items()
                # Others may still have this node in their tables after it became a client.
                if node == node_id_of(other)
                and node != protocol.node_id
                and protocol.company.knows(other)
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


class _Stub:
    """Requests to one peer. An answer counts when its sender is of this node's company."""

    def __init__(self, protocol: DHTProtocol, peer: PeerID) -> None:
        self._company, self._peer = protocol.company, peer
        stub = _get_stub(protocol, peer)
        self.rpc_ping = self._checked(stub.rpc_ping)
        self.rpc_store = self._checked(stub.rpc_store)
        self.rpc_find = self._checked(stub.rpc_find)

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def ask(request: Any, timeout: float | None = None) -> Any:
            response = await method(request, timeout=timeout)
            said = bytes(response.peer.node_id)
            if not self._company.hears(self._peer, said):
                raise PermissionError(f"{self._peer} has shown no admission")
            own = node_id_of(self._peer).to_bytes() if wants_to_be_asked(said) else b""
            response.peer.node_id = own
            return response

        return ask


def get_stub(protocol: DHTProtocol, peer: PeerID) -> _Stub:
    """Return what requests to a peer go through."""
    return _Stub(protocol, peer)


async def _meet(protocol: DHTProtocol, named: Collection[PeerID]) -> None:
    """Ask nodes that somebody names for their admission, unless they were asked a moment ago.

    A search goes to the nearest that it hears of, so a node that is only named must not count:
    twenty such names would end it.
    """
    company = protocol.company
    if not company.is_open():
        return
    unknown = [
        peer
        for peer in named
        if peer != protocol.p2p.peer_id
        and not company.knows(peer)
        and not company.was_strange(peer)
    ]
    await asyncio.gather(*(_ask_who(protocol, peer) for peer in unknown[:_MAX_MET]))


async def _ask_who(protocol: DHTProtocol, peer: PeerID) -> None:
    if await protocol.call_ping(peer) is None:
        protocol.company.hears(peer, b"")  # it is not asked again at once


async def call_ping(
    self: DHTProtocol, peer: PeerID, validate: bool = False, strict: bool = True
) -> DHTID | None:
    """Say hello. Where the answer does not fit to this node at joining, such as another time, the
    peer counts as silent, as one of several may be wrong; `refusal` says why."""
    try:
        found: DHTID | None = await _ping(self, peer, validate, strict)
    except ValidationError as error:
        logger.debug("%s is passed over: %s", peer, error)
        DHTProtocol.refusal = error
        return None
    return found


async def rpc_ping(
    self: DHTProtocol, request: dht_pb2.PingRequest, context: P2PContext
) -> dht_pb2.PingResponse:
    """Say who this node is, and let who asks into the table if it is in and can be asked.

    In place of Hivemind's, which lets in everybody.
    """
    peer, said = context.remote_id, bytes(request.peer.node_id)
    response = dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time(), available=False)
    if request.validate and wants_to_be_asked(said):
        response.available = await _can_be_called(self, peer)
    is_there = response.available or not request.validate
    if self.company.hears(peer, said) and wants_to_be_asked(said):
        coroutine = self.update_routing_table(node_id_of(peer), peer, responded=is_there)
        begin(coroutine)
    return response


async def _can_be_called(protocol: DHTProtocol, peer: PeerID) -> bool:
    """Tell whether a peer answers; one that joins has no admission to show yet."""
    request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo())
    try:
        await _get_stub(protocol, peer).rpc_ping(request, timeout=protocol.wait_timeout)
    except Exception as error:
        logger.debug("%s cannot be called: %r", peer, error)
        return False
    return True


def _greet(protocol: DHTProtocol, request: Any, context: P2PContext) -> bool:
    """Let the sender of a request into the table if it may be there; returns whether it is in."""
    ping = dht_pb2.PingRequest(peer=request.peer)
    begin(protocol.rpc_ping(ping, context))
    return bool(protocol.company.hears(context.remote_id, bytes(request.peer.node_id)))


async def update_routing_table(
    protocol: DHTProtocol, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
) -> None:
    """Note that a node answered or asked, if it is of this node's company under its own id."""
    is_own = node_id is not None and node_id == node_id_of(peer_id)
    if responded and not (is_own and protocol.company.knows(peer_id)):
        return
    await _update(protocol, node_id, peer_id, responded)


def _certifies_itself(subkey: Any) -> bool:
    """Tell whether a record is signed by an operator, so that anybody may store it."""
    return parse_subkey(subkey).public_key is None


def _raw(dictionary: DictionaryDHTValue) -> list[tuple[Any, ValueWithExpiration[Any]]]:
    """Return what stands in a dictionary, expired or not."""
    return list(dictionary.data.items())


def _size(entry: tuple[Any, ValueWithExpiration[Any]]) -> int:
    subkey, item = entry
    value_size = len(item.value) if isinstance(item.value, bytes) else KEY_BYTES
    return (len(subkey) if isinstance(subkey, bytes) else 0) + value_size + _FRAME_BYTES
