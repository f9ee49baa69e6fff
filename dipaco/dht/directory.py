"""Announcing and looking up: the one place where records meet the DHT.

Every call goes through `GuardedDHT`, which bounds it. What is read is parsed again, whatever the
node that gave it should have checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time
from multiaddr import Multiaddr

from dipaco.base.errors import DipacoError, ProtocolVersionError
from dipaco.base.repetition import Complaints
from dipaco.base.waits import BriefLock
from dipaco.protocol.admission import Gate
from dipaco.protocol.coverage import Scope, bucket_count
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import Identity
from dipaco.protocol.manifest import (
    SignedManifest,
    chain_of_runs,
    run_and_operator,
    verify_manifest,
)
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import (
    KINDS,
    MANIFESTS_KEY,
    parse_record,
    parse_subkey,
    record_key,
    record_subkey,
)
from dipaco.protocol.records import (
    RENEWED_AFTER,
    ModuleRecord,
    PeerRecord,
    ProgressRecord,
    Record,
)
from dipaco.protocol.revocations import read_revocations
from dipaco.protocol.view import SwarmView, view_of_records

from .bounded_protocol import begin, introduce, let_in, note_contributors, serve_run
from .guarded_dht import GuardedDHT
from .quotas import KnownRun

logger = logging.getLogger("dipaco.dht.directory")

_MAX_COMPLAINTS = 1024
# Peers that are asked themselves in one reading.
_MAX_ASKED_DIRECTLY = 16
# What calling a peer at its addresses may take.
_CONNECT_LIMIT_S = 15.0
_WITH_TLS = re.compile(r"/(udp|ws|wss|tls|http|https)(/|$)")
_RecordT = TypeVar("_RecordT", bound=Record)
# A key and a subkey, which together name a record.
RecordName = tuple[str, bytes]


@dataclass(frozen=True)
class Entry:
    """One record on its way into the DHT."""

    name: RecordName
    value: Any
    expiration: float


class Directory:
    """Reads and writes the records of one run. Thread-safe.

    :param gate: of the run, whose records count by it; None before a run is known
    :param manifest: of the run: the peers of a run of the same chain are let into the DHT too
    :param known_directly: tells which peers are known without the DHT for some modules, with their
        addresses; those whose records a search does not bring are asked themselves
    :param on_called: hears which of these were there
    """

    def __init__(
        self,
        dht: GuardedDHT,
        identity: Identity,
        run_id: str | None,
        gate: Gate | None = None,
        manifest: SignedManifest | None = None,
        known_directly: Callable[
            [Iterable[str]], Mapping[str, tuple[str, ...]]
        ] = lambda modules: {},
        on_called: Callable[[str, bool], None] = lambda peer, has_answered: None,
    ) -> None:
        self._dht = dht
        self.gate, self._manifest = gate, manifest
        self._known_directly, self._on_called = known_directly, on_called
        self.admission: bytes | None = None
        """This peer's, which goes with all its records; None for one that only reads."""
        self._served: KnownRun | None = None
        self._identity = identity
        self._run_id = run_id
        self._public_key = identity.public_key
        self._lock = BriefLock()
        self._expirations: dict[RecordName, float] = {}
        self._said: dict[RecordName, tuple[dict[str, Any], float]] = {}
        self._waiting: Mapping[int, int] = {}
        self._complaints = Complaints(math.inf, _MAX_COMPLAINTS)
        self._chain: set[str] = set()
        self._verified_manifests: dict[bytes, SignedManifest] = {}
        self.foreign_manifests: tuple[bytes, ...] = ()
        """Envelopes of other versions of the protocol, as `list_manifests` last saw them."""

    @property
    def run_id(self) -> str:
        """The run; a directory that only lists runs has none."""
        assert self._run_id is not None
        return self._run_id

    @property
    def failure(self) -> str | None:
        """Why nothing will be read or written any more, else None."""
        return self._dht.failure

    def say_all_again(self) -> None:
        """Publish every record at the next opportunity, as a node does whose store is new."""
        with self._lock:
            self._said.clear()

    def serve(self, grid: Grid) -> None:
        """Have this node store the records of the run for others. Raises `NetworkError`."""
        assert self.gate is not None, "a run has a gate"
        buckets = bucket_count(grid.path_count)
        run = KnownRun(self.run_id, frozenset(grid.modules()), buckets, self.gate)
        self._served = run
        self._dht.keep(f"run {self.run_id}", serve_run, run)

    def be_admitted(self, admission: bytes) -> None:
        """Show this peer's admission in its records, and to the nodes of the DHT."""
        self.admission = admission
        self._dht.keep("admission", introduce, admission)

    def note_contributors(self, peers: Iterable[str]) -> None:
        """Have this node keep room for the records of peers that contributed lately."""
        self._dht.keep("contributors", note_contributors, frozenset(peers))

    # -- writing

    def entry(self, kind: str, item: str, record: Record | None, life_s: float) -> Entry | None:
        """Return what is to be stored under a module, a bucket or a blob, None where the same
        stands there and is hardly older. A record that is None withdraws what was said there.

        What is withdrawn is overwritten by nothing, which ends a moment later than it did.
        """
        name = self._name(kind, item)
        if record is None:
            with self._lock:
                self._said.pop(name, None)
            return self._entry(name, None, 0.0) if name in self._expirations else None
        life_s = min(life_s, KINDS[kind].max_life_s)
        value = record.model_dump()
        if self.admission is not None:
            value["admission"] = self.admission
        lasting = {field: value[field] for field in value.keys() - record.passing}
        now_s = get_dht_time()
        with self._lock:
            said, expires_s = self._said.get(name, (None, 0.0))
            if said == lasting and expires_s - now_s > (1 - RENEWED_AFTER) * life_s:
                return None
            self._said[name] = lasting, now_s + life_s
        return self._entry(name, value, life_s)

    def manifest_entry(self, envelope: bytes, life_s: float) -> Entry:
        """Return what is to be stored of a manifest, also that of another run than the
        directory's: one that this one succeeds. Any peer may store it: it certifies itself."""
        subkey = record_subkey("manifests", *run_and_operator(envelope), b"")
        life_s = min(life_s, KINDS["manifests"].max_life_s)
        return self._entry((MANIFESTS_KEY, subkey), envelope, life_s)

    def _name(self, kind: str, item: str) -> RecordName:
        key = record_key(kind, self.run_id, item)
        return key, record_subkey(kind, self.run_id, item, self._public_key)

    def _entry(self, name: RecordName, value: Any, life_s: float) -> Entry:
        """Return an entry that expires strictly later than the last one, or it would be refused."""
        with self._lock:
            last = self._expirations.get(name, 0.0)
            expiration = max(get_dht_time() + life_s, math.nextafter(last, math.inf))
            self._expirations[name] = expiration
            return Entry(name, value, expiration)

    def store(self, said: Iterable[Entry | None]) -> bool:
        """Store with one call, so a peer with many holdings renews all in the time of one; if
        refused, again above what this peer published in an earlier life.

        Returns whether a node took each; of what none took, a line is logged.
        """
        entries = [entry for entry in said if entry is not None]
        if not entries:
            return True
        refused = entries
        try:
            refused = self._try_to_store(entries)
            if refused:
                refused = self._try_to_store(self._postponed(refused))
        finally:
            with self._lock:
                for entry in refused:
                    self._said.pop(entry.name, None)
        for entry in refused:
            logger.info("no node stored this peer's record at %s", entry.name[0])
        return not refused

    def _postponed(self, entries: list[Entry]) -> list[Entry]:
        """Return `entries` with expirations later than what the DHT holds in their place."""
        held = self._dht.call(_look_up, tuple({entry.name[0] for entry in entries}))
        postponed = []
        for entry in entries:
            key, subkey = entry.name
            _, last = held.get(key, {}).get(subkey, (None, 0.0))
            expiration = max(entry.expiration, math.nextafter(last, math.inf))
            self._expirations[entry.name] = expiration
            postponed.append(Entry(entry.name, entry.value, expiration))
        return postponed

    def _try_to_store(self, entries: list[Entry]) -> list[Entry]:
        """Store all at once and return those that no node took."""
        stored = self._dht.call(
            _store_many, tuple((*entry.name, entry.value, entry.expiration) for entry in entries)
        )
        return [entry for entry in entries if not stored.get(entry.name)]

    # -- reading

    def read_view(self, plan: RunPlan, grid: Grid, now_s: float, scope: Scope) -> SwarmView:
        """Return what `scope` covers of the swarm, as its records show it at `now_s`."""
        buckets = tuple(map(str, scope.buckets))
        wanted = [
            *(("modules", module) for module in scope.modules),
            *(("peers", bucket) for bucket in buckets),
            *(("progress", bucket) for bucket in buckets),
        ]
        keys = {entry: record_key(entry[0], self.run_id, entry[1]) for entry in wanted}
        lists = () if self.gate is None else (record_key("revocations", self.run_id),)
        wanted_keys = (*keys.values(), *lists)
        found = self._get_many(wanted_keys)
        parsed = self._parse_places(keys, found)
        seen = {record.peer_id for records in parsed.values() for record in records}
        direct = self._ask_directly(wanted_keys, scope.modules, seen)
        if direct:
            for key, entries in direct.items():
                # What was taken back may stand there again by now.
                standing = {sub: said for sub, said in found.get(key, {}).items() if said}
                found[key] = {**entries, **standing}
            parsed = self._parse_places(keys, found)
        for key in lists:
            self._take_revocations(found.get(key))
        counted = None
        if self.gate is not None:
            seen = {record.peer_id for records in parsed.values() for record in records}
            own = (self._identity.peer_id, self.admission) if self.admission else None
            counted = self.gate.counted_of(seen, own)

        def read(kind: str, item: str, record_class: type[_RecordT]) -> tuple[_RecordT, ...]:
            return tuple(
                record
                for record in parsed[kind, item]
                if isinstance(record, record_class)
                and (counted is None or record.peer_id in counted)
            )

        view = view_of_records(
            now_s=now_s,
            plan=plan,
            grid=grid,
            peers=[r for bucket in buckets for r in read("peers", bucket, PeerRecord)],
            modules={m: read("modules", m, ModuleRecord) for m in scope.modules},
            progress=[r for bucket in buckets for r in read("progress", bucket, ProgressRecord)],
            scope=scope,
        ).watched(plan, grid, self._waiting)
        self._waiting = view.waiting
        return view

    def _parse_places(
        self, keys: Mapping[tuple[str, str], str], found: Mapping[str, Mapping[Any, Any]]
    ) -> dict[tuple[str, str], tuple[Record, ...]]:
        return {place: self._parse_all(key, found.get(key)) for place, key in keys.items()}

    def _ask_directly(
        self, keys: tuple[str, ...], modules: Iterable[str], seen: Collection[str]
    ) -> dict[str, dict[Any, Any]]:
        """Return what those say under some keys that are known, and that the DHT does not show."""
        known = {
            peer: places
            for peer, places in self._known_directly(modules).items()
            if peer not in seen and peer != self._identity.peer_id
        }
        if not known:
            return {}
        asked = dict(list(known.items())[:_MAX_ASKED_DIRECTLY])
        found, answered = self._dht.call(_ask_peers, keys, asked)
        for peer in asked:
            self._on_called(peer, peer in answered)
        return {key: {sub: value for sub, (value, _) in e.items()} for key, e in found.items()}

    def _take_revocations(self, entries: Mapping[Any, Any] | None) -> None:
        """Take the newest list of the operator's; the peers that it names are out from here on."""
        for envelope in (entries or {}).values():
            try:
                self.revoke(envelope)
            except RecordError as error:
                self._complain("revocations", "a record", error)

    def revoke(self, envelope: bytes) -> None:
        """Take a list of the operator's, and drop what this node stores of those that it names.

        Raises `RecordError` for one that is not of this run.
        """
        gate = self.gate
        if gate is None or not gate.revoke(envelope):
            return
        logger.info("the operator has revoked invitations: %s", ", ".join(sorted(gate.revoked)))
        if self._served is not None:
            self._dht.keep(f"run {self.run_id}", serve_run, self._served)

    def publish_revocations(self) -> bool:
        """Store the newest list of the operator's again, if there is one; anybody may.

        A list that stands there for most of its life is left alone.
        """
        envelope = self.gate.envelope if self.gate is not None else None
        if envelope is None:
            return True
        item = f"{read_revocations(envelope).version:08d}"
        life_s = KINDS["revocations"].max_life_s
        key = record_key("revocations", self.run_id)
        name = key, record_subkey("revocations", self.run_id, item, b"")
        if self._expirations.get(name, 0.0) - get_dht_time() > (1 - RENEWED_AFTER) * life_s:
            return True
        return self.store([self._entry(name, envelope, life_s)])

    def find_blob_holders(self, sha256: str) -> tuple[str, ...]:
        """Return the peers, other than this one, that serve a blob."""
        key = record_key("blobs", self.run_id, sha256)
        records = self._parse_all(key, self._get_many((key,)).get(key))
        return tuple(r.peer_id for r in records if r.peer_id != self._identity.peer_id)

    def list_manifests(self) -> list[SignedManifest]:
        """Return the runs in this DHT, by name and id. Bad ones are skipped with one log line.

        Raises `ProtocolVersionError` when there are runs and all are of another protocol.
        """
        found = self._get_many((MANIFESTS_KEY,)).get(MANIFESTS_KEY)
        manifests: dict[tuple[str, str], SignedManifest] = {}
        foreign: ProtocolVersionError | None = None
        foreign_manifests = []
        for subkey, envelope in (found or {}).items():
            try:
                address = parse_subkey(subkey)
                if address.key != MANIFESTS_KEY or not isinstance(envelope, bytes):
                    raise RecordError("it is not a manifest record")
                manifest = self._verify_manifest(envelope, address.run_id)
                if manifest.operator_fingerprint != address.item:
                    raise RecordError(f"it is not signed by operator {address.item}")
                manifests[manifest.plan.run_id, manifest.operator_fingerprint] = manifest
            except ProtocolVersionError as error:
                logger.info("skipped a manifest: %s", error)
                foreign = error
                foreign_manifests.append(envelope)
            except DipacoError as error:
                self._complain(MANIFESTS_KEY, "a manifest", error)
        self.foreign_manifests = tuple(foreign_manifests)
        if foreign is not None and not manifests:
            raise foreign
        self._verified_manifests = {m.envelope: m for m in manifests.values()}
        self._let_in_chain(list(manifests.values()))
        return sorted(manifests.values(), key=lambda m: (m.plan.name, m.plan.run_id))

    def _let_in_chain(self, manifests: Sequence[SignedManifest]) -> None:
        """Let nodes of runs into the DHT that succeed this one, or that it succeeds."""
        if self._manifest is None:
            return
        gates = {m.plan.admission_scope: m for m in chain_of_runs(self._manifest, manifests)}
        gates.pop(self._manifest.plan.admission_scope, None)
        if gates.keys() != self._chain:
            self._chain = set(gates)
            self._dht.keep("chain", let_in, [Gate.of(manifest) for manifest in gates.values()])

    def _verify_manifest(self, envelope: bytes, run_id: str) -> SignedManifest:
        """Peers read the manifests at every refresh, and they are nearly always the same."""
        known = self._verified_manifests.get(envelope)
        if known is not None and known.plan.run_id == run_id:
            return known
        return verify_manifest(envelope, run_id)

    def look_up_random_key(self, number: int) -> None:
        """Ask for a key that nobody has: the search drops dead peers from the routing table."""
        self._get_many((f"dipaco/refresh/{number}",))

    def call_peers(self, addresses: Mapping[str, tuple[str, ...]], patience_s: float = 0.0) -> None:
        """Call peers that may have been cut off, so that they are in the routing table again; at
        these addresses, or where they were last.

        The calls are made in the DHT process, each within its time limit. Returns when all have
        ended, and after `patience_s` at the latest.
        """
        self._dht.call(_call_peers, dict(addresses), patience_s)

    def _parse_all(self, key: str, entries: Mapping[Any, Any] | None) -> tuple[Record, ...]:
        """Return the records under `key`; what does not belong there is left out."""
        records = []
        for subkey, value in (entries or {}).items():
            if value is None:
                continue
            try:
                address = parse_subkey(subkey)
                if address.key != key:
                    raise RecordError(f"a record of {address.key} stands under {key}")
                record = parse_record(address, value)
                if self.gate is not None:
                    is_here = address.kind.shows_presence(value)
                    self.gate.check(record.peer_id, value.get("admission"), is_here=is_here)
            except RecordError as error:
                self._complain(key, "a record", error)
                continue
            records.append(record)
        return tuple(sorted(records, key=lambda record: record.peer_id))

    def _complain(self, key: str, what: str, error: DipacoError) -> None:
        """Log a refusal, as a warning the first time: the same records come every few seconds, and
        there may be thousands under one key."""
        logger.log(self._complaints.level(key), "skipped %s: %s", what, error)

    def _get_many(self, keys: tuple[str, ...]) -> dict[str, dict[Any, Any]]:
        """Return the unexpired subkeys and values of dictionary keys, from the network."""
        found = self._dht.call(_look_up, keys)
        return {
            key: {subkey: value for subkey, (value, _) in entries.items()}
            for key, entries in found.items()
        }


async def _look_up(node: Any, keys: tuple[str, ...]) -> dict[str, dict[Any, tuple[Any, float]]]:
    """Runs in the DHT process: ask the network for the newest under all keys at once, and until
    when it is valid."""
    found = await node.get_many(keys, sufficient_expiration_time=math.inf)
    return {
        key: {subkey: (item.value, item.expiration_time) for subkey, item in entry.value.items()}
        for key, entry in found.items()
        if entry is not None and isinstance(entry.value, dict)
    }


async def _ask_peers(
    node: Any, keys: tuple[str, ...], peers: dict[str, tuple[str, ...]]
) -> tuple[dict[str, dict[Any, tuple[Any, float]]], set[str]]:
    """Runs in the DHT process: ask some peers themselves for what they have under some keys.

    Returns the newest of all, and who has answered.
    """
    found: dict[str, dict[Any, tuple[Any, float]]] = {key: {} for key in keys}
    answered = set()

    async def ask(peer: str, places: tuple[str, ...]) -> None:
        peer_id = PeerID.from_base58(peer)
        await _connect(node, peer_id, places)
        ids = {DHTID.generate(source=key): key for key in keys}
        answers = await node.protocol.call_find(peer_id, ids)
        if answers is None:
            return
        answered.add(peer)
        for key_id, (entry, _) in answers.items():
            if entry is not None and isinstance(entry.value, DictionaryDHTValue):
                _merge(node.protocol, key_id, entry.value, found[ids[key_id]])

    await asyncio.gather(*(ask(*peer) for peer in peers.items()), return_exceptions=True)
    return found, answered


def _merge(
    protocol: Any, key_id: DHTID, entry: DictionaryDHTValue, into: dict[Any, tuple[Any, float]]
) -> None:
    """Take in the valid records of an answer that are later than what is there."""
    for subkey, (value, expiration_s) in entry.items():
        if subkey in into and into[subkey][1] >= expiration_s:
            continue
        tag = protocol.serializer.dumps(subkey)
        record = DHTRecord(key_id.to_bytes(), tag, value, expiration_s)
        with contextlib.suppress(Exception):  # whatever msgpack raises
            stripped = protocol.record_validator.strip_value(record)
            into[subkey] = protocol.serializer.loads(stripped), expiration_s


async def _connect(node: Any, peer: PeerID, places: tuple[str, ...]) -> None:
    """Call a peer at its addresses, if it has any that may be called."""
    # p2pd would call by QUIC and WebSocket too, whose TLS it is better not to meet.
    called = [place.rpartition("/p2p/")[0] for place in places if not _WITH_TLS.search(place)]
    if called:
        with contextlib.suppress(Exception):
            plain = [Multiaddr(place) for place in called]
            await asyncio.wait_for(node.p2p._client.connect(peer, plain), _CONNECT_LIMIT_S)


async def _call_peers(node: Any, addresses: dict[str, tuple[str, ...]], patience_s: float) -> None:
    """Runs in the DHT process: ping peers; who answers is no longer shunned."""

    async def ping(peer: PeerID, places: tuple[str, ...]) -> None:
        await _connect(node, peer, places)
        if await node.protocol.call_ping(peer) is not None:
            node.blacklist.register_success(peer)

    calls = [begin(ping(PeerID.from_base58(p), places)) for p, places in addresses.items()]
    if calls:
        await asyncio.wait(calls, timeout=patience_s)


async def _store_many(
    node: Any, entries: tuple[tuple[str, bytes, Any, float], ...]
) -> dict[RecordName, bool]:
    """Runs in the DHT process: store all records at once and tell which ones a node took.

    They are stored here as well, however far it is: who knows this peer can ask it itself.
    """
    keys, subkeys, values, expirations = (list(column) for column in zip(*entries, strict=True))
    stored = await node.store_many(keys, values, expirations, subkeys=subkeys)
    protocol = node.protocol
    for key, subkey, value, expiration_s in entries:
        key_id = DHTID.generate(source=key)
        tag, packed = map(protocol.serializer.dumps, (subkey, value))
        record = DHTRecord(key_id.to_bytes(), tag, packed, expiration_s)
        signed = protocol.record_validator.sign_value(record)
        protocol.storage.store(key_id, signed, expiration_s, subkey=subkey)
    return dict(stored)
