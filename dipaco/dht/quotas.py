"""What a node of the DHT stores for others, and how much of it.

A node stores the records of the runs that it serves, of owners that are admitted to them, under
keys that such a run has, and within quotas for a key, for an owner and in all. What is stored stays
until it expires: no flood of later records pushes out honest ones. Those who contributed lately
alone take the place of others when there is none left. What finds no room goes to the next node.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from dipaco.protocol.admission import Gate
from dipaco.protocol.identity import SIGNATURE_BYTES, peer_id_of_public_key
from dipaco.protocol.record_keys import Address, parse_subkey

# Of one key: all of it has to fit into an answer of 4 MiB with others.
KEY_RECORDS, KEY_BYTES = 1024, 2**20
SERVED_RUNS = 8
# Of all runs of the operators whose runs a node serves: also of those that succeed these.
_OWN_MANIFESTS = 4 * SERVED_RUNS
# Of runs of other operators: so that newcomers find them too.
OTHER_MANIFESTS, _OTHER_MANIFEST_BYTES = 16, 2**18


@dataclass(frozen=True)
class _Quota:
    """What a node stores of one kind: records of one owner, records and bytes in all."""

    of_owner: int
    records: int
    bytes: int


# An owner has a record for each module that it trains or keeps, for each bucket that it was in,
# and for each blob of the run that it serves, of which a bootstrap node has all.
QUOTAS = {
    "modules": _Quota(1024, 16_384, 2**24),
    "peers": _Quota(64, 16_384, 2**24),
    "progress": _Quota(256, 16_384, 2**24),
    "blobs": _Quota(2048, 16_384, 2**24),
    "manifests": _Quota(_OWN_MANIFESTS, _OWN_MANIFESTS, 2**20),
    "revocations": _Quota(2 * SERVED_RUNS, 2 * SERVED_RUNS, 2**20),
}
_OTHERS = _Quota(OTHER_MANIFESTS, OTHER_MANIFESTS, _OTHER_MANIFEST_BYTES)


@dataclass(frozen=True)
class KnownRun:
    """A run whose records a node stores, and which keys it has."""

    run_id: str
    modules: frozenset[str]
    buckets: int
    gate: Gate
    """The peers that are in."""

    def has(self, address: Address, value: bytes, *, is_signed: bool) -> bool:
        """Tell whether this run has the key of a record, and its owner.

        `is_signed`: the signature was checked, so the record shows that its owner is there.
        """
        item, kind = address.item or "", address.kind.name
        if not self._is_owner_in(address, value, is_signed):
            return False
        if kind == "revocations":
            return self._is_list_of_operator(value)
        if kind == "modules":
            return item in self.modules
        if kind in ("peers", "progress"):
            return int(item) < self.buckets
        return True

    def _is_owner_in(self, address: Address, value: bytes, is_signed: bool) -> bool:
        """Tell whether the owner of a record may have records here, by what the record carries."""
        if address.public_key is None:
            return True
        if len(value) > address.kind.max_bytes + SIGNATURE_BYTES:
            return False
        owner = peer_id_of_public_key(address.public_key)
        content = MSGPackSerializer.loads(value[:-SIGNATURE_BYTES])
        if content is None:  # Withdrawn; who is not known here has nothing to withdraw.
            return self.gate.admission_of(owner) is not None
        admission = content.get("admission")
        if not is_signed:
            return self.gate.may_be_in(owner, admission)
        self.gate.check(owner, admission, is_here=address.kind.shows_presence(content))
        return True

    def _is_list_of_operator(self, value: bytes) -> bool:
        """Tell whether a list of revoked invitations is of this run, and as new as is known."""
        envelope = MSGPackSerializer.loads(value)
        self.gate.revoke(envelope)
        return bool(envelope == self.gate.envelope)


# A key and a subkey.
_Name = tuple[Any, bytes]


@dataclass
class _Box:
    """Counts what is stored of a key or of a kind against two limits."""

    records: int
    bytes: int
    used_records: int = 0
    used_bytes: int = 0

    def fits(self, size_bytes: int, old: _Held | None) -> bool:
        """Tell whether a record fits when `old`, which it replaces, is gone."""
        used_records = self.used_records - (old is not None)
        used_bytes = self.used_bytes - (old.size_bytes if old is not None else 0)
        return used_records < self.records and used_bytes + size_bytes <= self.bytes

    def count(self, size_bytes: int, sign: int) -> None:
        self.used_records += sign
        self.used_bytes += sign * size_bytes


@dataclass
class _Held:
    """What is known of a stored record besides its bytes."""

    address: Address
    size_bytes: int
    expiration: float
    kind_box: _Box


@dataclass
class _Key:
    """The records under one key."""

    dictionary: DictionaryDHTValue = field(default_factory=DictionaryDHTValue)
    held: dict[bytes, _Held] = field(default_factory=dict)
    box: _Box = field(default_factory=lambda: _Box(KEY_RECORDS, KEY_BYTES))


class HeldRecords:
    """The storage of a node, in place of Hivemind's, which has no bounds.

    In the DHT process, on its loop. `now` gives the time of the DHT.
    """

    def __init__(self, now: Callable[[], float] = get_dht_time) -> None:
        self._now = now
        self._runs: dict[str, KnownRun] = {}
        self._keys: dict[Any, _Key] = {}
        self._expiring: list[tuple[float, bytes, Any]] = []
        self._kinds = {kind: _Box(quota.records, quota.bytes) for kind, quota in QUOTAS.items()}
        self._others = _Box(_OTHERS.records, _OTHERS.bytes)
        self._of_owner: dict[tuple[bytes | None, str], int] = {}
        self.contributors: frozenset[str] = frozenset()
        """Peers with rows in the last steps, who have room before others."""
        self.record_count = 0

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates of the runs that are served."""
        return tuple(run.gate for run in self._runs.values())

    def serve(self, run: KnownRun) -> None:
        """Store the records of `run` from here on, and drop those of runs that are not served.

        Until the first call a node does not know its run yet, and takes manifests alone.
        """
        before = self._runs.get(run.run_id)
        if before is not None:
            run.gate.learn_from(before.gate)
        runs = {name: known for name, known in self._runs.items() if name != run.run_id}
        self._runs = dict([*runs.items(), (run.run_id, run)][-SERVED_RUNS:])
        for key, entry in list(self._keys.items()):
            for subkey, held in list(entry.held.items()):
                value = entry.dictionary.data[subkey].value
                if self._is_unwanted(held.address, value):
                    self._drop(key, subkey)

    # -- what Hivemind asks of a storage

    def get(self, key: Any) -> ValueWithExpiration[DictionaryDHTValue] | None:
        """Return a copy of what is stored under a key, records of contributors first.

        A copy, because Hivemind merges what others answer into it.
        """
        self._expire()
        entry = self._keys.get(key)
        if entry is None:
            return None
        copy = DictionaryDHTValue()
        order = sorted(entry.held, key=lambda subkey: not self._has_contributed(entry.held[subkey]))
        copy.data = {subkey: entry.dictionary.data[subkey] for subkey in order}
        copy.latest_expiration_time = entry.dictionary.latest_expiration_time
        return ValueWithExpiration(copy, copy.latest_expiration_time)

    def size_of(self, key: Any) -> int:
        """Return how many bytes stand under a key."""
        entry = self._keys.get(key)
        return 0 if entry is None else entry.box.used_bytes

    def items(self) -> Iterator[tuple[Any, ValueWithExpiration[DictionaryDHTValue]]]:
        """Yield what is stored, by key; it is not to be changed."""
        self._expire()
        for key, entry in list(self._keys.items()):
            dictionary = entry.dictionary
            yield key, ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def __contains__(self, key: Any) -> bool:
        self._expire()
        return key in self._keys

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Store a record that this node wrote; nothing but records stands under a key."""
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Store a record that was found valid; False when it is refused."""
        held = self._admitted(key, subkey, value, expiration_time, is_signed=True)
        if held is None:
            return False
        for name in self._in_its_place(key, subkey, held) or ():
            self._drop(*name)
        if key in self._keys and subkey in self._keys[key].held:
            self._drop(key, subkey)
        entry = self._keys.setdefault(key, _Key())
        entry.held[subkey] = held
        dictionary = entry.dictionary
        dictionary.data[subkey] = ValueWithExpiration(value, expiration_time)
        dictionary.latest_expiration_time = max(dictionary.latest_expiration_time, expiration_time)
        self._count(entry, held, 1)
        heapq.heappush(self._expiring, (expiration_time, subkey, key))
        if len(self._expiring) > 2 * self.record_count + 64:
            self._expiring = [
                (held.expiration, subkey, key)
                for key, entry in self._keys.items()
                for subkey, held in entry.held.items()
            ]
            heapq.heapify(self._expiring)
        return True

    def admits(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Tell whether a record would be stored. It costs little: no signature is checked."""
        held = self._admitted(key, subkey, value, expiration_time, is_signed=False)
        return held is not None

    # -- inside

    def _admitted(
        self, key: Any, subkey: Any, value: Any, expiration_time: float, *, is_signed: bool
    ) -> _Held | None:
        """Return what is to be noted of a record, or None when it is refused."""
        self._expire()
        if type(value) is not bytes or not expiration_time >= self._now():
            return None
        try:
            address = parse_subkey(subkey)
            kind_box = self._box_for(address, value, is_signed=is_signed)
        except Exception:
            # A RecordError, or whatever msgpack raises for what is not msgpack.
            return None
        if kind_box is None:
            return None
        entry = self._keys.get(key)
        old = entry.held.get(subkey) if entry is not None else None
        if old is not None and expiration_time <= old.expiration:
            return None
        held = _Held(address, len(subkey) + len(value), expiration_time, kind_box)
        if old is None and not self._has_room_for_one_more(address):
            return None
        return None if self._in_its_place(key, subkey, held) is None else held

    def _in_its_place(self, key: Any, subkey: bytes, held: _Held) -> list[_Name] | None:
        """Return which records make room for one, the newest of others; None: there is none."""
        entry = self._keys.get(key)
        old = entry.held.get(subkey) if entry is not None else None
        going: list[_Name] = []
        if entry is not None and not entry.box.fits(held.size_bytes, old):
            going = self._newest_of_others(((key, entry),), held, entry.box, old)
            if not going:
                return None
        old_of_kind = old if old is not None and old.kind_box is held.kind_box else None
        if not going and not held.kind_box.fits(held.size_bytes, old_of_kind):
            keys = reversed(self._keys.items())
            going = self._newest_of_others(keys, held, held.kind_box, old_of_kind)
            if not going:
                return None
        return going

    def _newest_of_others(
        self, keys: Iterable[tuple[Any, _Key]], held: _Held, box: _Box, old: _Held | None
    ) -> list[_Name]:
        """Return records of a box without which one of a contributor's fits; none for others."""
        if not self._has_contributed(held):
            return []
        going: list[_Name] = []
        left = dataclasses.replace(box)
        for key, entry in keys:
            for subkey, other in reversed(entry.held.items()):
                if other is old or self._has_contributed(other):
                    continue
                if other.kind_box is not box and entry.box is not box:
                    continue
                going.append((key, subkey))
                left.count(other.size_bytes, -1)
                if left.fits(held.size_bytes, old):
                    return going
        return []

    def _has_contributed(self, held: _Held) -> bool:
        return held.address.peer_id in self.contributors

    def _is_unwanted(self, address: Address, value: bytes) -> bool:
        try:
            return self._box_for(address, value, is_signed=False) is None
        except Exception:  # As in `_admitted`.
            return True

    def _has_room_for_one_more(self, address: Address) -> bool:
        """Tell whether an owner may have one more record."""
        kind, owner = address.kind.name, address.public_key
        return owner is None or self._of_owner.get((owner, kind), 0) < QUOTAS[kind].of_owner

    def _box_for(self, address: Address, value: bytes, *, is_signed: bool) -> _Box | None:
        """Return where a record is counted; None when its run, or its key there, is not served."""
        kind = address.kind.name
        if kind == "manifests":
            return self._box_of_manifest(address)
        run = self._runs.get(address.run_id)
        if run is None or not run.has(address, value, is_signed=is_signed):
            return None
        return self._kinds[kind]

    def _box_of_manifest(self, address: Address) -> _Box | None:
        """Return where a manifest is counted; None when another operator has signed a run that is
        served, which would mislead newcomers."""
        operators = {name: run.gate.operator_fingerprint for name, run in self._runs.items()}
        if operators.get(address.run_id, address.item) != address.item:
            return None
        is_own = address.item in operators.values()
        return self._kinds["manifests"] if is_own else self._others

    def _count(self, entry: _Key, held: _Held, sign: int) -> None:
        for box in (entry.box, held.kind_box):
            box.count(held.size_bytes, sign)
        self.record_count += sign
        owner = held.address.public_key, held.address.kind.name
        self._of_owner[owner] = self._of_owner.get(owner, 0) + sign
        if not self._of_owner[owner]:
            del self._of_owner[owner]

    def _drop(self, key: Any, subkey: bytes) -> None:
        entry = self._keys[key]
        held = entry.held.pop(subkey)
        data = entry.dictionary.data
        del data[subkey]
        self._count(entry, held, -1)
        if not data:
            del self._keys[key]
        elif held.expiration >= entry.dictionary.latest_expiration_time:
            latest = max(item.expiration_time for item in data.values())
            entry.dictionary.latest_expiration_time = latest

    def _expire(self) -> None:
        """Drop what has expired; entries of records that were replaced since are passed over."""
        now = self._now()
        while self._expiring and self._expiring[0][0] < now:
            _, subkey, key = heapq.heappop(self._expiring)
            held = self._keys[key].held.get(subkey) if key in self._keys else None
            if held is not None and held.expiration < now:
                self._drop(key, subkey)
