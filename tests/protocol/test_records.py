"""Records and the check that every node runs: what is malformed, forged or misplaced is refused."""

import dataclasses
import logging
import time

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dipaco.base.repetition import Complaints
from dipaco.dht.record_validator import SIGNED_PREFIX, RecordValidator, record_validators, signed_bytes
from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.identity import SIGNATURE_BYTES
from dipaco.protocol.manifest import load_or_create_operator_key, operator_fingerprint, sign_manifest
from dipaco.protocol.plan import PROTOCOL_VERSION
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import (
    KINDS,
    MANIFESTS_KEY,
    Address,
    parse_record,
    parse_subkey,
    record_key,
    record_subkey,
)
from dipaco.protocol.records import (
    MAX_ENTRIES,
    BlobRecord,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    refresh_period_s,
)
from support.runs.make_plan import make_plan
from support.wire.peers import identity

RUN_ID = "0123456789abcdef"
RECORD_LOGGER = "dipaco.dht.record_validator"


@pytest.fixture
def me():
    return identity(0)


@pytest.fixture
def other():
    return identity(1)


ITEM = "L0.E3"


def claim_of(identity, **changes):
    """Return the record of a peer that trains a path through a module, and holds nothing of it."""
    values = {
        "peer_id": identity.peer_id,
        "path": 3,
        "state": "training",
        "since_s": 5.0,
        "round": 7,
        "reachable": "direct",
        "module": ITEM,
        "held": None,
    }
    return {**values, **changes}


def signed(identity, value, *, kind="modules", item=ITEM, life_s=60.0, key=None, owner=None):
    """Return a record as Hivemind makes it, signed by `identity`."""
    subkey = record_subkey(kind, RUN_ID, item, owner or identity.public_key)
    record = DHTRecord(
        key=DHTID.generate(source=key or record_key(kind, RUN_ID, item)).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps(value),
        expiration_time=time.time() + life_s,
    )
    return dataclasses.replace(record, value=RecordValidator(identity.key).sign_value(record))


def examples(identity):
    """One record of every signed kind, as large as its bounds allow."""
    peer_id = identity.peer_id
    greatest = 2**53
    return [
        ("modules", ITEM, ModuleRecord(**claim_of(identity))),
        (
            "modules",
            "L1023.E10239",
            ModuleRecord(
                peer_id=peer_id,
                state="training",
                path=2**31 - 1,
                since_s=1e11,
                round=greatest,
                pinned=True,
                reachable="outgoing",
                module="L1023.E10239",
                held=HeldState(
                    step="d" * 64, version=greatest, weight=greatest, digest="f" * 64, round=greatest, bytes=greatest
                ),
            ),
        ),
        (
            "peers",
            "4095",
            PeerRecord(
                peer_id=peer_id,
                protocol=1,
                software="s" * 96,
                device="d" * 96,
                state="training",
                path=2**31 - 1,
                tokens_per_s=1e12,
                round=greatest,
                reachable="direct",
                addresses=("/ip4/203.0.113.5/tcp/31337/p2p/" + "Q" * 46,) * 4,
                bytes_up=greatest,
                bytes_down=greatest,
                own_texts_loss=1 / 3,
            ),
        ),
        (
            "progress",
            "0",
            ProgressRecord(
                peer_id=peer_id,
                entries=tuple(
                    ProgressEntry(
                        path=2**31 - 1 - n,
                        last_round=greatest,
                        tokens=greatest,
                        validation_nll=1e15,
                        validation_tokens=greatest,
                        train_loss=float("nan"),
                    )
                    for n in range(MAX_ENTRIES)
                ),
            ),
        ),
        ("blobs", "e" * 64, BlobRecord(peer_id=peer_id, sha256="e" * 64, bytes=greatest)),
    ]


# -- records


def test_the_greatest_record_of_every_kind_fits_and_comes_back(me):
    for kind, item, record in examples(me):
        made = signed(me, record.model_dump(), kind=kind, item=item)
        validator = RecordValidator(me.key)
        assert validator.validate(made), kind
        content = validator.strip_value(made)
        assert len(content) <= KINDS[kind].max_bytes
        address = parse_subkey(MSGPackSerializer.loads(made.subkey))
        assert (address.peer_id, address.item) == (me.peer_id, item)
        parsed = parse_record(address, MSGPackSerializer.loads(content))
        assert repr(parsed) == repr(record)  # Not ==, for the NaN.


@pytest.mark.parametrize(
    "changes",
    [
        {"path": -1},
        {"path": "3"},
        {"path": True},
        {"path": 2**40},
        {"state": "sleeping"},
        {"since_s": float("nan")},
        {"since_s": float("inf")},
        {"since_s": -1.0},
        {"round": 1.5},
        {"round": -1},
        {"round": 2**60},
        {"round": None},
        {"peer_id": "Qm"},
        {"peer_id": "Qm" + "0" * 44},
        {"peer_id": b"Qm" + b"1" * 44},
    ],
)
def test_a_wrong_field_is_named(me, changes):
    address = Address(KINDS["modules"], RUN_ID, ITEM, me.public_key)
    with pytest.raises(RecordError, match=next(iter(changes))):
        parse_record(address, claim_of(me, **changes))


def test_unknown_fields_are_ignored_and_missing_ones_are_not(me):
    address = Address(KINDS["modules"], RUN_ID, ITEM, me.public_key)
    assert parse_record(address, claim_of(me, novelty=[1])).peer_id == me.peer_id
    values = claim_of(me)
    del values["round"]
    with pytest.raises(RecordError, match="round"):
        parse_record(address, values)


def test_a_record_speaks_for_its_signer_and_its_key_alone(me, other):
    address = Address(KINDS["modules"], RUN_ID, ITEM, other.public_key)
    with pytest.raises(RecordError, match=f"names {me.peer_id}"):
        parse_record(address, claim_of(me))
    kind, _, record = examples(me)[1]
    address = Address(KINDS[kind], RUN_ID, "L0.E0", me.public_key)
    with pytest.raises(RecordError, match=r"not L0\.E0"):
        parse_record(address, record.model_dump())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda children: (
            st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), children, max_size=4)
        ),
        max_leaves=12,
    ),
    kind=st.sampled_from(["modules", "peers", "progress", "blobs"]),
)
def test_nothing_but_a_record_error_comes_of_garbage(me, value, kind):
    with pytest.raises(RecordError):
        parse_record(Address(KINDS[kind], RUN_ID, None, me.public_key), value)


@given(st.binary(max_size=200) | st.text(max_size=50) | st.none() | st.integers())
def test_nothing_but_a_record_error_comes_of_a_strange_subkey(subkey):
    with pytest.raises(RecordError):
        parse_subkey(subkey)


# -- the validator


def refused(validator, record, caplog):
    """Check that a record is refused with one line, and return the line."""
    validator._complaints = Complaints(60.0, 1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, RECORD_LOGGER):
        assert not validator.validate(record)
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]
    return caplog.messages[0]


@pytest.fixture
def validator(other):
    """Another node's."""
    return RecordValidator(other.key)


def test_a_good_record_and_its_withdrawal_are_accepted(validator, me, caplog):
    assert validator.validate(signed(me, claim_of(me)))
    assert validator.validate(signed(me, None))
    assert not caplog.messages


def test_nobody_can_sign_for_another(validator, me, other, caplog):
    good = signed(me, claim_of(me))
    unsigned = dataclasses.replace(good, value=MSGPackSerializer.dumps(claim_of(me)))
    assert me.peer_id in refused(validator, unsigned, caplog)
    forged = signed(other, claim_of(me), owner=me.public_key)
    assert "signature" in refused(validator, forged, caplog)
    altered = dataclasses.replace(good, value=good.value.replace(b"training", b"leaving!"))
    assert "signature" in refused(validator, altered, caplog)
    longer = dataclasses.replace(good, expiration_time=good.expiration_time + 1)
    assert "signature" in refused(validator, longer, caplog)
    impostor = signed(other, claim_of(me))
    assert other.peer_id in refused(validator, impostor, caplog)


def test_a_record_stands_only_under_its_own_key(validator, me, caplog):
    elsewhere = signed(me, claim_of(me), key=record_key("modules", "f" * 16, ITEM))
    assert "a key that is not its own" in refused(validator, elsewhere, caplog)


@pytest.mark.parametrize("life_s", [2500.0, 1e9, float("inf"), float("nan")])
def test_no_record_lives_too_long(validator, me, life_s, caplog):
    assert "would live for" in refused(validator, signed(me, claim_of(me), life_s=life_s), caplog)


def test_oversized_and_malformed_records_are_refused(validator, me, caplog):
    large = signed(me, claim_of(me, padding="x" * 900))
    assert "at most 1024 are allowed" in refused(validator, large, caplog)
    huge = signed(me, claim_of(me, padding="x" * 10_000))
    assert "at most 1024 are allowed" in refused(validator, huge, caplog)
    assert "malformed: path" in refused(validator, signed(me, claim_of(me, path=-1)), caplog)
    assert "not a map" in refused(validator, signed(me, [1, 2]), caplog)
    garbage = dataclasses.replace(signed(me, 1), value=b"\xc1\xc1")
    assert me.peer_id in refused(validator, garbage, caplog)


@pytest.mark.parametrize(
    "subkey",
    [
        None,
        "",
        "text",
        b"",
        b"x" * 5000,
        3,
        b"[owner:ssh-rsa AAAA]",
        ("a", 1),
        record_subkey("modules", RUN_ID, ITEM, b""),
        record_subkey("modules", RUN_ID, ITEM, b"k" * 33),
        record_subkey("modules", RUN_ID, None, b"k" * 32),
        record_subkey("modules", RUN_ID, "peers", b"k" * 32),
        record_subkey("peers", RUN_ID, None, b"k" * 32),
        record_subkey("peers", RUN_ID, "01", b"k" * 32),
        record_subkey("peers", RUN_ID, "-1", b"k" * 32),
        record_subkey("claims", RUN_ID, None, b"k" * 32),
    ],
)
def test_other_peoples_records_do_not_enter(validator, subkey, caplog):
    record = DHTRecord(
        key=DHTID.generate(source="something").to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps("value"),
        expiration_time=time.time() + 60,
    )
    refused(validator, record, caplog)
    refused(validator, dataclasses.replace(record, subkey=b"\xc1"), caplog)


def test_an_owner_that_is_no_point_of_the_curve_does_not_raise(validator, me, caplog):
    record = signed(me, claim_of(me), owner=b"\xff" * 32)
    assert "no valid signature" in refused(validator, record, caplog)


def test_a_record_of_another_protocol_is_refused_quietly(validator, me, caplog):
    good = signed(me, claim_of(me))
    subkey = MSGPackSerializer.loads(good.subkey)
    other = b"dipaco/%d/" % (PROTOCOL_VERSION + 1) + subkey.split(b"/", 2)[2]
    with caplog.at_level(logging.INFO, RECORD_LOGGER):
        record = dataclasses.replace(good, subkey=MSGPackSerializer.dumps(other))
        assert not validator.validate(record)
    assert not caplog.messages
    own = dataclasses.replace(good, subkey=MSGPackSerializer.dumps(subkey[:-1]))
    assert "not of this protocol" in refused(validator, own, caplog)


def test_what_the_key_signed_for_another_purpose_is_no_record(validator, me, caplog):
    record = signed(me, None)
    bare = dataclasses.replace(record, value=record.value[:-SIGNATURE_BYTES])
    message = signed_bytes(bare)
    assert message.startswith(SIGNED_PREFIX)
    assert record.value == bare.value + me.key.sign(message)
    other_purpose = me.key.sign(message[len(SIGNED_PREFIX) :])
    replaced = dataclasses.replace(record, value=bare.value + other_purpose)
    assert "no valid signature" in refused(validator, replaced, caplog)


def test_declarations_of_hivemind_s_matchmaking_are_refused(validator, me, caplog):
    record = DHTRecord(
        key=DHTID.generate(source="any-prefix.0b01").to_bytes(),
        subkey=MSGPackSerializer.dumps(PeerID.from_base58(me.peer_id).to_bytes()),
        value=MSGPackSerializer.dumps(True),
        expiration_time=time.time() + 30.0,
    )
    assert "not of this protocol" in refused(validator, record, caplog)


def test_a_flood_of_bad_records_is_one_warning_a_peer(validator, me, caplog):
    bad = signed(me, claim_of(me, path=-1))
    with caplog.at_level(logging.WARNING, RECORD_LOGGER):
        for _ in range(50):
            assert not validator.validate(bad)
    assert len(caplog.messages) == 1


def test_manifests_certify_themselves(validator, tmp_path, caplog):
    plan = make_plan()
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    envelope, operator = sign_manifest(plan, key), operator_fingerprint(key)

    def record(value, run_id=plan.run_id, life_s=3600.0, operator=operator):
        return DHTRecord(
            key=DHTID.generate(source=MANIFESTS_KEY).to_bytes(),
            subkey=MSGPackSerializer.dumps(record_subkey("manifests", run_id, operator, b"")),
            value=MSGPackSerializer.dumps(value),
            expiration_time=time.time() + life_s,
        )

    assert validator.validate(record(envelope))
    assert validator.sign_value(record(envelope)) == record(envelope).value
    altered = envelope.replace(b'"seed": 0', b'"seed": 1')
    assert altered != envelope
    assert "signature" in refused(validator, record(altered), caplog)
    assert "stored as run" in refused(validator, record(envelope, "f" * 16), caplog)
    forged = record(envelope, operator="f" * 16)
    assert "stored as of ffff" in refused(validator, forged, caplog)
    assert "does not hold bytes" in refused(validator, record("text"), caplog)
    assert "does not hold bytes" in refused(validator, record(None), caplog)
    assert "at most" in refused(validator, record(b"x" * 200_000), caplog)
    assert "would live" in refused(validator, record(envelope, life_s=1e7), caplog)


def test_hivemind_takes_the_validators(me, other):
    ours = CompositeValidator(record_validators(me))
    theirs = CompositeValidator(record_validators(other))
    subkey = MSGPackSerializer.dumps(record_subkey("modules", RUN_ID, ITEM, me.public_key))
    record = DHTRecord(
        DHTID.generate(source=record_key("modules", RUN_ID, ITEM)).to_bytes(),
        subkey,
        MSGPackSerializer.dumps(claim_of(me)),
        time.time() + 60,
    )
    made = dataclasses.replace(record, value=ours.sign_value(record))
    assert theirs.validate(made)
    assert theirs.strip_value(made) == record.value


@pytest.mark.parametrize(
    ("duration_s", "inner_steps", "period_s"),
    [(3.0, 0, 1.0), (60.0, 0, 15.0), (300.0, 0, 75.0), (1e5, 0, 600.0), (1e5, 88, 20.0)],
)
def test_records_are_renewed_by_the_round(duration_s, inner_steps, period_s):
    rounds = RoundsConfig(duration_s=duration_s, inner_steps=inner_steps)
    assert refresh_period_s(rounds) == period_s
