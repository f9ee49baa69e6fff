"""What a node stores for others, and what it does with a flood of records."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from dipaco.base.token_bucket import Budget
from dipaco.dht import bounded_protocol, quotas
from dipaco.dht.company import Company
from dipaco.dht.metering import Metering, Refused
from dipaco.dht.quotas import KEY_BYTES, KEY_RECORDS, OTHER_MANIFESTS, QUOTAS, HeldRecords, KnownRun
from dipaco.dht.record_validator import RecordValidator
from dipaco.protocol.admission import AWAY_S, Gate
from dipaco.protocol.allowances import ADMITTED, DHT_LARGE, STRANGER, Asker
from dipaco.protocol.identity import PEER_ID_PREFIX, peer_id_of_public_key, raw_public_key
from dipaco.protocol.invitations import Terms, make_invitation
from dipaco.protocol.manifest import operator_fingerprint, sign_manifest
from dipaco.protocol.record_keys import MANIFESTS_KEY, record_key, record_subkey
from support.runs.make_plan import make_plan
from support.waiting import HandClock
from support.wire.dht_pair import RUN_ID, peer_record
from support.wire.exchanges import OPERATOR
from support.wire.peers import OpenGate, key

OTHER_RUN = "fedcba9876543210"
# Of a grid of 2 and 3 modules, with something private to each of four paths.
MODULES = frozenset({"L0.E0", "L0.E1", "L1.E0", "L1.E1", "L1.E2", *(f"P{path}" for path in range(4))})
RUN = KnownRun(RUN_ID, MODULES, 2, OpenGate(RUN_ID))
FRIEND = PEER_ID_PREFIX + b"f" * 32
NOW = 1_000.0
# Small, so that floods are short.
KEY_SIZE = 32


@pytest.fixture(autouse=True)
def small_quotas(monkeypatch):
    monkeypatch.setattr(quotas, "KEY_RECORDS", KEY_SIZE)


def owner(number):
    return number.to_bytes(32, "big")


def store(
    records,
    kind,
    item,
    number,
    *,
    run_id=RUN_ID,
    expires_s=NOW + 60,
    value=MSGPackSerializer.dumps({"admission": bytes(11)}) + bytes(64),
):
    """Store a record of owner `number`."""
    key, subkey = record_key(kind, run_id, item), record_subkey(kind, run_id, item, owner(number))
    return records.store_subkey(DHTID.generate(key), subkey, value, expires_s)


def owners(records, kind, item):
    found = records.get(DHTID.generate(record_key(kind, RUN_ID, item)))
    return [] if found is None else [int.from_bytes(s[-32:], "big") for s in found.value.data]


@pytest.fixture
def records():
    held = HeldRecords(HandClock(NOW))
    held.serve(RUN)
    return held


def test_only_what_belongs_to_a_served_run_is_stored(records):
    assert store(records, "modules", "L1.E2", 1)
    assert store(records, "modules", "P3", 1)
    assert store(records, "progress", "1", 1)
    for kind, item in [("modules", m) for m in ("L1.E3", "L2.E0", "P4", "L0.E00", "P03", "L..1")]:
        assert not store(records, kind, item, 1), item
    assert not store(records, "peers", "2", 1)
    assert not store(records, "peers", "0", 1, run_id=OTHER_RUN)
    assert records.record_count == 3


def test_before_the_run_is_known_nothing_of_a_run_is_stored():
    records = HeldRecords(HandClock(NOW))
    assert not store(records, "peers", "0", 1)
    records.serve(RUN)
    assert store(records, "peers", "0", 1)


def test_a_flood_of_one_key_does_not_push_out_who_was_there(records):
    honest = list(range(KEY_SIZE // 2))
    assert all(store(records, "peers", "0", number) for number in honest)
    taken = [store(records, "peers", "0", 1000 + n) for n in range(10 * KEY_SIZE)]
    assert sum(taken) == KEY_SIZE - len(honest)
    # They renew what they said, and a withdrawal is one more version of a record.
    gone = MSGPackSerializer.dumps(None) + bytes(64)
    assert all(store(records, "peers", "0", n, expires_s=NOW + 90, value=gone) for n in honest)
    assert set(honest) <= set(owners(records, "peers", "0"))
    assert records.record_count == KEY_SIZE


def contributor(number):
    return peer_id_of_public_key(owner(number))


def test_who_contributed_has_room_before_others_and_comes_first(records):
    assert all(store(records, "peers", "0", number) for number in range(KEY_SIZE))
    assert not store(records, "peers", "0", 100)
    records.contributors = frozenset(map(contributor, (3, 100, 101)))
    assert store(records, "peers", "0", 100)
    assert owners(records, "peers", "0")[:2] == [3, 100]
    assert KEY_SIZE - 1 not in owners(records, "peers", "0"), "the newest of others has gone"
    assert store(records, "peers", "0", 101)
    assert records.record_count == KEY_SIZE
    # One contributor does not push out another.
    records.contributors = frozenset(map(contributor, range(200)))
    assert not store(records, "peers", "0", 150)


def test_who_contributed_has_room_also_where_a_kind_is_full(records, monkeypatch):
    records._kinds["peers"].records = 4
    assert [store(records, "peers", "01"[n % 2], n) for n in range(6)] == [True] * 4 + [False] * 2
    records.contributors = frozenset({contributor(9)})
    assert store(records, "peers", "0", 9)
    assert records.record_count == 4
    assert owners(records, "peers", "0")[0] == 9


def test_a_goodbye_keeps_no_place_for_who_has_left():
    """It stands there for up to 40 minutes, and everybody reads it again and again."""
    clock, invitation = HandClock(NOW), make_invitation(Terms(RUN_ID, 1, 0), OPERATOR)
    gate = Gate(RUN_ID, raw_public_key(OPERATOR), now=clock)
    records = HeldRecords(clock)
    records.serve(KnownRun(RUN_ID, MODULES, 2, gate))

    def say(number, state):
        public_key = raw_public_key(key(number))
        value = {"admission": invitation.admit(key(number), NOW), "state": state}
        place, subkey = (record_key("peers", RUN_ID, "0"), record_subkey("peers", RUN_ID, "0", public_key))
        data = MSGPackSerializer.dumps(value) + bytes(64)
        return records.store_subkey(DHTID.generate(place), subkey, data, clock.s + 2000)

    assert say(1, "training")
    clock.s += AWAY_S - 1
    assert say(1, "leaving")
    assert not say(2, "training")
    clock.s += 2
    assert say(2, "training")


def test_an_owner_has_so_many_records(records):
    quota = QUOTAS["blobs"].of_owner
    taken = [store(records, "blobs", f"{n:064x}", 1) for n in range(quota + 5)]
    assert taken == [True] * quota + [False] * 5
    assert store(records, "blobs", f"{9:064x}", 9)


def test_bytes_count_and_expired_records_make_room(records, monkeypatch):
    clock = records._now
    monkeypatch.setattr(quotas, "KEY_BYTES", 40_000)
    large = MSGPackSerializer.dumps({"admission": bytes(10_000)}) + bytes(64)
    larger = MSGPackSerializer.dumps({"admission": bytes(20_000)}) + bytes(64)
    taken = [store(records, "progress", "0", number, value=large) for number in range(5)]
    assert taken == [True, True, True, False, False]
    # A record that grows is counted anew.
    assert not store(records, "progress", "0", 1, value=larger, expires_s=NOW + 61)
    clock.s = NOW + 100
    assert records.record_count == 3
    assert store(records, "progress", "0", 9, value=large, expires_s=clock.s + 9)
    assert owners(records, "progress", "0") == [9]
    assert records.record_count == 1
    assert not records._of_owner.keys() - {(owner(9), "progress")}


def test_a_record_is_renewed_under_a_key_that_is_full_to_the_last_byte(records, monkeypatch):
    subkey_bytes = len(record_subkey("progress", RUN_ID, "0", owner(1)))
    value = MSGPackSerializer.dumps({"admission": bytes(10_000)}) + bytes(64)
    monkeypatch.setattr(quotas, "KEY_BYTES", 3 * (subkey_bytes + len(value)))
    assert [store(records, "progress", "0", n, value=value) for n in range(4)] == [True] * 3 + [False]
    assert store(records, "progress", "0", 1, value=value, expires_s=NOW + 61)
    assert not store(records, "progress", "0", 1, value=value[:9] + b"?" + value[9:], expires_s=NOW + 62)


def test_a_record_that_is_renewed_for_ever_takes_no_more_memory(records):
    for step in range(2_000):
        assert store(records, "peers", "0", 1, expires_s=NOW + 60 + step / 1000)
        assert not store(records, "peers", "0", 1, expires_s=NOW + 60)
    assert records.record_count == 1
    assert len(records._expiring) < 100


def test_a_reader_cannot_change_what_is_stored(records):
    """Hivemind merges what others answer into what a storage gave."""
    store(records, "peers", "0", 1)
    found = records.get(DHTID.generate(record_key("peers", RUN_ID, "0")))
    found.value.store(b"junk", b"junk", NOW + 1e9)
    assert owners(records, "peers", "0") == [1]


def test_junk_runs_leave_room_for_the_run_that_is_served():
    records, key, junk = HeldRecords(HandClock(NOW)), *(Ed25519PrivateKey.generate() for _ in range(2))

    def announce(number, signer, expires_s=NOW + 60):
        plan = make_plan(seed=number)
        value = MSGPackSerializer.dumps(sign_manifest(plan, signer))
        subkey = record_subkey("manifests", plan.run_id, operator_fingerprint(signer), b"")
        return records.store_subkey(DHTID.generate(MANIFESTS_KEY), subkey, value, expires_s)

    assert sum(announce(number, junk) for number in range(1, 40)) == OTHER_MANIFESTS
    served = make_plan(seed=0).run_id
    records.serve(KnownRun(served, frozenset(), 1, Gate(served, raw_public_key(key))))
    assert announce(0, key)
    # What its operator signs besides may be what succeeds it.
    assert announce(40, key)
    assert not announce(41, junk)
    # Anybody can sign the plan of the run, and might keep newcomers out of it so.
    assert not announce(0, junk, NOW + 90)


# -- the protocol


class Node:
    """A node without a network: as much of Hivemind's protocol as requests need."""

    serializer = MSGPackSerializer
    IS_DICTIONARY, IS_REGULAR_VALUE = DHTProtocol.IS_DICTIONARY, DHTProtocol.IS_REGULAR_VALUE
    node_info = dht_pb2.NodeInfo()
    bucket_size = 20

    def __init__(self):
        self.storage, self.cache = HeldRecords(), DHTLocalStorage()
        self.storage.serve(RUN)
        self.validator = RecordValidator()
        self.checked = 0
        self.routing_table = RoutingTable(DHTID.generate(), 20, 5)
        self.company = Company()
        self.company.open((RUN.gate,))
        self.metering = Metering(self.company, None, None)
        self.asker = Asker(ADMITTED, PeerID(FRIEND).to_base58())

    async def rpc_ping(self, *_):
        pass

    def _validate_record(self, *fields):
        self.checked += 1
        return self.validator.validate(DHTRecord(*fields))

    def store(self, sender, request):
        context = SimpleNamespace(remote_id=PeerID(sender))
        answer = asyncio.run(bounded_protocol.rpc_store(self, request, context))
        return list(answer.store_ok)

    def find(self, *keys):
        context = SimpleNamespace(remote_id=PeerID(FRIEND), asker=self.asker)
        request = dht_pb2.FindRequest(keys=[DHTID.generate(key).to_bytes() for key in keys])
        answer = asyncio.run(bounded_protocol.rpc_find(self, request, context))
        size = answer.ByteSize()
        assert size < 4 * 2**20, f"an answer of {size} bytes does not fit into a message"
        return {
            key: MSGPackSerializer.loads(result.value) if result.value else DictionaryDHTValue()
            for key, result in zip(keys, answer.results, strict=True)
        }


def signed(signer, record, kind, item):
    key = record_key(kind, RUN_ID, item)
    subkey = record_subkey(kind, RUN_ID, item, raw_public_key(signer))
    made = DHTRecord(
        DHTID.generate(key).to_bytes(),
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(record.model_dump()),
        time.time() + 60,
    )
    value = RecordValidator(signer).sign_value(made)
    return DHTRecord(made.key, made.subkey, value, made.expiration_time)


def request_of(*rows, in_cache=False):
    return dht_pb2.StoreRequest(
        keys=[row.key for row in rows],
        subkeys=[row.subkey for row in rows],
        values=[row.value for row in rows],
        expiration_time=[row.expiration_time for row in rows],
        in_cache=[in_cache for _ in rows],
        peer=dht_pb2.NodeInfo(),
    )


def claim_of(signer, bucket="0"):
    record = peer_record(peer_id_of_public_key(raw_public_key(signer)), 1)
    return signed(signer, record, "peers", bucket)


def test_what_finds_no_room_is_refused_before_its_signature_is_checked():
    node = Node()
    signers = [Ed25519PrivateKey.generate() for _ in range(KEY_SIZE + 5)]
    rows = [claim_of(signer) for signer in signers]
    assert sum(node.store(FRIEND, request_of(*rows))) == KEY_SIZE
    assert node.checked == KEY_SIZE
    assert node.store(FRIEND, request_of(claim_of(signers[0], "7"))) == [False]
    assert node.checked == KEY_SIZE


def test_who_is_not_in_stores_nothing_but_what_an_operator_signed():
    node, key = Node(), Ed25519PrivateKey.generate()
    node.company.open((Gate(RUN_ID, bytes(32)),))
    assert node.store(FRIEND, request_of(claim_of(Ed25519PrivateKey.generate()))) == [False]
    assert node.checked == 0
    plan = make_plan()
    manifest = DHTRecord(
        DHTID.generate(MANIFESTS_KEY).to_bytes(),
        MSGPackSerializer.dumps(record_subkey("manifests", plan.run_id, operator_fingerprint(key), b"")),
        MSGPackSerializer.dumps(sign_manifest(plan, key)),
        time.time() + 60,
    )
    assert node.store(FRIEND, request_of(manifest)) == [True]


def test_a_long_answer_is_paid_for_before_it_is_put_together():
    """One request of some bytes can ask for a megabyte."""
    node, late = Node(), time.time() + 60
    node.asker = Asker(STRANGER, "10.0.0.0/24")
    node.metering._large = Budget(DHT_LARGE, HandClock(NOW))
    value = MSGPackSerializer.dumps({"admission": bytes(24_500)}) + bytes(64)
    for number in range(32):
        assert store(node.storage, "progress", "0", number, value=value, expires_s=late)
    key = record_key("progress", RUN_ID, "0")
    # A stranger has 4 MiB at once, and each of these answers has 0.75 MiB.
    assert [len(node.find(key).popitem()[1].data) for _ in range(5)] == [32] * 5
    with pytest.raises(Refused, match="too many requests"):
        node.find(key)
    assert node.find("another key") != {}, "short answers are had yet"
    node.asker = Asker(ADMITTED, "a member")
    assert len(node.find(key).popitem()[1].data) == 32


def test_nobody_asks_for_a_key_twice_at_once():
    node = Node()
    with pytest.raises(ValueError, match="asked for twice"):
        node.find("a key", "another", "a key")


def test_a_request_has_so_many_rows_and_short_names():
    node = Node()
    row = claim_of(Ed25519PrivateKey.generate())
    tag = MSGPackSerializer.dumps(bytes(300))
    assert node.store(FRIEND, request_of(DHTRecord(row.key, tag, row.value, row.expiration_time))) == [False]
    assert node.checked == 0
    bare = DHTRecord(row.key, row.subkey, b"", row.expiration_time)
    assert len(node.store(FRIEND, request_of(*[bare] * 2048))) == 2048
    with pytest.raises(ValueError, match="at most 2048 rows"):
        node.store(FRIEND, request_of(*[bare] * 2049))


def test_one_record_that_is_refused_does_not_keep_out_the_others_with_it():
    node = Node()
    rows = [claim_of(Ed25519PrivateKey.generate()) for _ in range(3)]
    whole = DictionaryDHTValue()
    with whole.freeze():
        whole.store(b"nonsense", b"x", time.time() + 60)
        for row in rows:
            whole.store(MSGPackSerializer.loads(row.subkey), row.value, row.expiration_time)
    value = MSGPackSerializer.dumps(whole)
    carrying = DHTRecord(rows[0].key, DHTProtocol.IS_DICTIONARY, value, time.time() + 60)
    assert node.store(FRIEND, request_of(carrying)) == [False]
    assert node.storage.record_count == 3


def test_nobody_writes_into_the_cache_of_a_node():
    node, claim = Node(), claim_of(Ed25519PrivateKey.generate())
    assert node.store(FRIEND, request_of(claim, in_cache=True)) == [False]
    assert not node.cache.data


def test_answers_fit_into_a_message_and_say_first_what_contributors_sent(monkeypatch):
    monkeypatch.setattr(quotas, "KEY_RECORDS", KEY_RECORDS)
    node, late = Node(), time.time() + 60
    for item in "01":
        for number in range(200):
            for kind in ("peers", "progress"):
                filler = bytes(2_200 if kind == "peers" else 3_400)
                value = MSGPackSerializer.dumps({"admission": filler}) + bytes(64)
                store(node.storage, kind, item, number, value=value, expires_s=late)
    node.storage.contributors = frozenset(map(contributor, range(150, 200)))
    keys = [record_key(kind, RUN_ID, item) for kind in ("peers", "progress") for item in "01"]
    found = node.find(*keys, "dipaco/refresh/1")
    assert [len(found[key].data) > 90 for key in keys] == [True] * 4
    first = [int.from_bytes(subkey[-32:], "big") for subkey in list(found[keys[0]].data)[:50]]
    assert first == list(range(150, 200))


def test_a_reader_looks_at_no_more_than_a_node_stores_and_logs_one_line(caplog):
    node = Node()
    answer = DictionaryDHTValue()
    real = claim_of(Ed25519PrivateKey.generate())
    with answer.freeze():
        answer.store(MSGPackSerializer.loads(real.subkey), real.value, real.expiration_time)
        for number in range(5_000):
            subkey = record_subkey("peers", RUN_ID, "0", owner(number))
            answer.store(subkey, b"v" * 80, time.time() + 60)
    assert bounded_protocol.drop_refused(node, real.key, answer)
    assert list(answer.data) == [MSGPackSerializer.loads(real.subkey)]
    assert node.checked <= KEY_RECORDS
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) <= 1


def test_a_node_under_another_id_than_its_own_is_not_known(monkeypatch):
    updated = []

    async def update(_, node_id, *__):
        updated.append(node_id)

    monkeypatch.setattr(bounded_protocol, "_update", update)
    peer = PeerID(FRIEND)
    protocol = SimpleNamespace(company=Company([peer.to_base58()]))
    own = bounded_protocol.node_id_of(peer)
    for node_id, responded in ((own, True), (DHTID.generate(), True), (own, False)):
        asyncio.run(bounded_protocol.update_routing_table(protocol, node_id, peer, responded))
    assert updated == [own, own]
    protocol.company = Company()
    asyncio.run(bounded_protocol.update_routing_table(protocol, own, peer, True))
    assert updated == [own, own], "nor one that is not in"


def test_what_is_handed_to_a_new_node_is_divided_into_messages(monkeypatch):
    sent = []

    async def store_there(_, __, keys, *___, **____):
        sent.append(len(keys))
        return [True] * len(keys)

    monkeypatch.setattr(bounded_protocol, "_store", store_there)
    dictionaries = []
    for _ in range(10):
        dictionary = DictionaryDHTValue()
        dictionary.store(b"subkey", b"v" * (KEY_BYTES // 2), time.time() + 60)
        dictionaries.append(dictionary)
    keys, protocol = [DHTID.generate() for _ in range(10)], SimpleNamespace()
    coroutine = bounded_protocol.call_store(protocol, PeerID(FRIEND), keys, dictionaries, [time.time() + 60] * 10)
    assert asyncio.run(coroutine) == [True] * 10
    assert len(sent) > 2
    assert sum(sent) == 10


def test_a_node_that_takes_nothing_is_as_one_that_does_not_answer(monkeypatch):
    """Hivemind would count it among the five that have the record."""

    async def refuse(*_):
        return [False]

    monkeypatch.setattr(bounded_protocol, "_store", refuse)
    protocol = SimpleNamespace()
    coroutine = bounded_protocol.call_store(protocol, PeerID(FRIEND), [DHTID(1)], [b"v"], 1.0)
    assert asyncio.run(coroutine) is None
