"""Runs by invitation: who is in, and everything that somebody may show instead of an admission."""

import contextlib
import dataclasses
import json
import pickle
import re
import time

import pytest
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer

from dipaco.base.errors import AdmissionError, ConfigurationError, ManifestError
from dipaco.bootstrap.invite import invite, keep_revocations, own_invitation, revoke
from dipaco.dht.quotas import HeldRecords, KnownRun
from dipaco.peer.node.guests import admit, given_invitation
from dipaco.protocol import admission as admission_module
from dipaco.protocol.admission import AWAY_S, Admission, Gate
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import (
    ADMISSION_BYTES,
    GRANT_PREFIX,
    Terms,
    make_invitation,
    opened,
    pack_terms,
    read_invitation,
)
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest, verify_manifest
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import record_key, record_subkey
from dipaco.protocol.revocations import read_revocations, sign_revocations
from support.runs.make_plan import make_plan
from support.waiting import HandClock
from support.wire.peers import RUN, identity, key, peer

OPERATOR, STRANGER = key(1000), key(1001)
NOW_S = 1_000_000.0
INVITATION = make_invitation(Terms(RUN, 2, 0), OPERATOR)


def public(number):
    return raw_public_key(key(number))


def admission(number, invitation=INVITATION):
    return invitation.admit(key(number), NOW_S)


@pytest.fixture
def gate():
    return Gate(RUN, raw_public_key(OPERATOR))


# -- what a volunteer pastes


def test_an_invitation_is_one_line_that_can_be_pasted():
    text = INVITATION.to_text()
    assert read_invitation(f" {text}\n") == INVITATION
    assert len(text) < 200
    assert text.isascii()
    assert not set(text) & set(" \"'\\$&;|")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is no invitation"),
        ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooW", "begins with dipaco-invitation-1"),
        (INVITATION.to_text()[:-1], "paste all of the line"),
        (INVITATION.to_text() + "A" * 1000, "paste all of the line"),
        (INVITATION.to_text()[:80] + "AAAA" + INVITATION.to_text()[84:], "changed on its way"),
        (INVITATION.to_text()[:-1] + "!", "changed on its way"),
        (INVITATION.to_text()[:-2] + "\u00e9\u00e9", "changed on its way"),
    ],
)
def test_what_is_no_invitation_is_refused_in_one_line(text, match):
    with pytest.raises(AdmissionError, match=match) as caught:
        read_invitation(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_invitation_of_another_run_or_operator_or_one_that_was_changed(gate):
    gate.check_invitation(INVITATION)
    elsewhere = make_invitation(Terms("f" * 16, 2, 0), OPERATOR)
    with pytest.raises(AdmissionError, match=f"is for run {'f' * 16} and not for {RUN}"):
        gate.check_invitation(elsewhere)
    for forged in (
        make_invitation(Terms(RUN, 2, 0), STRANGER),
        dataclasses.replace(INVITATION, terms=Terms(RUN, 5000, 0)),
        dataclasses.replace(INVITATION, seed=b"x" * 32),
    ):
        with pytest.raises(AdmissionError, match="not signed by the operator"):
            gate.check_invitation(forged)
        with pytest.raises(RecordError, match="not signed by the operator"):
            gate.check(peer(0), forged.admit(key(0), NOW_S))


def test_an_expired_invitation_lets_nobody_in_and_ends_who_is_in():
    brief = make_invitation(Terms(RUN, 2, int(NOW_S) + 10), OPERATOR)
    with pytest.raises(AdmissionError, match="expired 2.0 days ago"):
        brief.admit(key(1), NOW_S + 10 + 2 * 86_400)
    now = [NOW_S]
    gate = Gate(RUN, raw_public_key(OPERATOR), now=lambda: now[0])
    mine = brief.admit(key(0), NOW_S)
    assert gate.check(peer(0), mine).expires_s == NOW_S + 10
    assert gate.admission_of(peer(0)) is not None
    now[0] += 11
    assert gate.admission_of(peer(0)) is None
    with pytest.raises(RecordError, match="has expired"):
        gate.check(peer(0), mine)
    with pytest.raises(AdmissionError, match="this peer is no longer admitted: .*expired"):
        gate.counted_of((), (peer(0), mine))
    # Somebody whose software does not care.
    patient = dataclasses.replace(brief, terms=Terms(RUN, 2, 0))
    with pytest.raises(RecordError, match="not signed"):
        gate.check(peer(1), patient.admit(key(1), NOW_S + 11))


# -- admissions


def test_an_admission_is_of_one_peer(gate):
    assert gate.check(peer(0), admission(0)) == Admission(INVITATION.id, 2)
    with pytest.raises(RecordError, match="not for it"):
        gate.check(peer(1), admission(0))
    assert gate.admission_of(peer(1)) is None


@pytest.mark.parametrize(
    "data", [None, b"", 7, "text", b"x" * 10_000, admission(0)[:-1], admission(0) + b"x", bytes(ADMISSION_BYTES)]
)
def test_what_is_no_admission_is_refused(gate, data):
    with pytest.raises(RecordError):
        gate.check(peer(0), data)


def test_any_changed_byte_is_refused(gate):
    good = admission(0)
    assert len(good) == ADMISSION_BYTES
    for place in range(len(good)):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        with pytest.raises(RecordError):
            gate.check(peer(0), bad)


def gate_at(clock):
    return Gate(RUN, raw_public_key(OPERATOR), now=clock)


def let_in(gate, *numbers):
    """Show the admissions of peers; return who has a place."""
    found = []
    for number in numbers:
        with contextlib.suppress(RecordError):
            gate.check(peer(number), admission(number))
            found.append(number)
    return found


def test_of_an_invitation_so_many_count_as_it_is_for_and_those_that_were_seen_first(gate):
    assert let_in(gate, 4, 3, 2, 1) == [4, 3]
    assert gate.counted_of({peer(number) for number in range(5)}) == {peer(4), peer(3)}
    assert let_in(gate, 1, 3, 4) == [3, 4]


def test_four_keys_have_no_more_places_than_one_and_take_none_from_who_is_there():
    """In an open run too, somebody who makes many keys does not keep newcomers out."""
    clock = HandClock(NOW_S)
    gate = gate_at(clock)
    assert let_in(gate, *range(100)) == [0, 1]
    clock.s += AWAY_S / 2
    assert let_in(gate, 0, 50) == [0]
    clock.s += AWAY_S / 2 + 1
    # The second was not seen for so long: its place is free.
    assert let_in(gate, 50, 0, 1) == [50, 0]


def test_a_place_is_free_when_its_peer_was_not_seen_for_a_quarter_of_an_hour():
    clock = HandClock(NOW_S)
    gate, single = gate_at(clock), make_invitation(Terms(RUN, 1, 0), OPERATOR)
    gate.check(peer(0), admission(0, single))
    clock.s += 900.0
    with pytest.raises(RecordError, match="all places"):
        gate.check(peer(1), admission(1, single))
    clock.s += 0.1
    assert gate.check(peer(1), admission(1, single))


@pytest.mark.parametrize(("places", "is_good"), [(0, False), (1, True), (10_000, True), (10_001, False)])
def test_an_invitation_is_for_one_to_ten_thousand_peers(gate, places, is_good):
    """Also one that the operator signed with another program."""
    terms, good = Terms(RUN, places, 0), make_invitation(Terms(RUN, 2, 0), OPERATOR)
    signature = OPERATOR.sign(GRANT_PREFIX + pack_terms(terms) + good.public_key)
    mine = admission(0, dataclasses.replace(good, terms=terms, signature=signature))
    with contextlib.nullcontext() if is_good else pytest.raises(RecordError, match="for 1 to 10000 peers"):
        assert gate.check(peer(0), mine).places == places
    with contextlib.nullcontext() if is_good else pytest.raises(ValueError, match="for 1 to 10000 peers"):
        make_invitation(terms, OPERATOR)


def test_what_outlasts_a_peer_keeps_no_place_for_it():
    """How far paths are stands in the DHT for a day: a volunteer who lost a key need not wait."""
    clock = HandClock(NOW_S)
    single = make_invitation(Terms(RUN, 1, 0), OPERATOR)
    gate, own = gate_at(clock), gate_at(clock)
    old, new = (peer(0), admission(0, single)), (peer(1), admission(1, single))
    gate.check(*old)
    own.check(*old, is_here=False)
    for _ in range(10):
        clock.s += AWAY_S / 4
        gate.check(*old, is_here=False)
        own.check(*old, is_here=False)
        assert own.counted_of({old[0]}, new) >= {new[0]}
    gate.check(*new)
    with pytest.raises(RecordError, match="all places"):
        gate.check(*old, is_here=False)
    assert gate.admitted().keys() == {new[0]}


def test_a_record_that_nobody_has_signed_keeps_no_place_for_who_has_gone():
    """Admissions are public: before its signature is checked, a record may be of anybody."""
    clock = HandClock(NOW_S)
    single = make_invitation(Terms(RUN, 1, 0), OPERATOR)
    gate = gate_at(clock)
    held = HeldRecords(clock)
    held.serve(KnownRun(RUN, frozenset(), 2, gate))
    gate.check(peer(0), admission(0, single))
    name = DHTID.generate(record_key("peers", RUN, "0"))
    subkey = record_subkey("peers", RUN, "0", public(0))
    value = MSGPackSerializer.dumps({"admission": admission(0, single)}) + bytes(64)
    for _ in range(10):
        clock.s += AWAY_S / 4
        assert held.admits(name, subkey, value, clock.s + 60)
    assert gate.check(peer(1), admission(1, single))
    assert not held.admits(name, subkey, value, clock.s + 60)
    assert gate.admitted().keys() == {peer(1)}


def test_rows_in_the_chain_come_before_who_was_seen_first(gate):
    assert let_in(gate, 0, 1) == [0, 1]
    for number in (2, 3, 4):
        gate.verify(peer(number), admission(number))
    gate.contributed(peer(2), 7)
    assert gate.admitted().keys() == {peer(0), peer(2)}
    gate.contributed(peer(3), 5)
    assert gate.admitted().keys() == {peer(2), peer(3)}
    gate.contributed(peer(4), 9)
    assert gate.admitted().keys() == {peer(2), peer(3)}, "its rows came later"
    gate.contributed(peer(0), 4)
    assert gate.admitted().keys() == {peer(0), peer(3)}


def test_rows_of_rounds_after_the_end_of_an_invitation_give_no_place():
    brief = make_invitation(Terms(RUN, 2, int(NOW_S) + 450), OPERATOR)
    gate = Gate(RUN, raw_public_key(OPERATOR), start_s=NOW_S, round_s=100.0, now=HandClock(NOW_S))
    for number in (0, 1):
        gate.check(peer(number), admission(number, brief))
    gate.verify(peer(2), admission(2, brief))
    gate.contributed(peer(2), 5)
    assert gate.admitted().keys() == {peer(0), peer(1)}
    gate.contributed(peer(2), 4)
    assert gate.admitted().keys() == {peer(0), peer(2)}


def test_who_came_later_than_there_are_places_is_told_and_who_was_here_goes_on():
    first, late = gate_at(HandClock(NOW_S)), gate_at(HandClock(NOW_S))
    seen = {peer(number) for number in range(3)}
    assert first.counted_of((), (peer(0), admission(0))) == {peer(0)}
    let_in(first, 1, 2)
    assert peer(0) in first.counted_of(seen, (peer(0), admission(0)))
    let_in(late, 0, 1)
    with pytest.raises(AdmissionError, match="all places .* by 2 that came before this peer"):
        late.counted_of(seen, (peer(2), admission(2)))
    # It was here in an earlier life.
    late.verify(peer(2), admission(2))
    late.contributed(peer(2), 3)
    assert peer(2) in late.counted_of(seen, (peer(2), admission(2)))


def test_memory_for_admissions_is_bounded(monkeypatch):
    monkeypatch.setattr(admission_module, "MAX_VERIFIED", 8)
    gate = gate_at(HandClock(NOW_S))
    for number in range(20):
        gate.verify(peer(number), admission(number))
    assert len(gate._verified) == 8
    assert gate.data_of(peer(19)) == admission(19)
    assert gate.data_of(peer(0)) is None


def test_identities_without_a_place_make_nobody_forgotten_who_has_one(monkeypatch):
    """With one invitation somebody can admit as many keys as there are."""
    monkeypatch.setattr(admission_module, "MAX_VERIFIED", 8)
    gate = gate_at(HandClock(NOW_S))
    assert let_in(gate, 0, 1) == [0, 1]
    for number in range(2, 50):
        gate.verify(peer(number), admission(number))
    assert gate.admitted().keys() == {peer(0), peer(1)}
    assert gate.data_of(peer(0)) == admission(0)
    assert len(gate._verified) == 8


def test_rows_count_up_to_the_round_in_which_an_invitation_ended():
    gate = Gate(RUN, raw_public_key(OPERATOR), start_s=NOW_S, round_s=100.0)
    brief = make_invitation(Terms(RUN, 2, int(NOW_S) + 450), OPERATOR)
    for_good, until_4 = admission(0), admission(0, brief)
    assert all(gate.counts(peer(0), for_good, number) for number in (0, 4, 10**6))
    assert [gate.counts(peer(0), until_4, number) for number in (0, 4, 5)] == [True, True, False]
    assert not gate.counts(peer(1), for_good, 0)
    assert not gate.counts(peer(0), b"", 0)
    ended = {INVITATION.id: int(NOW_S) + 250, brief.id: int(NOW_S) + 999}
    for other in (gate, pickle.loads(pickle.dumps(gate))):
        other.revoke(sign_revocations(RUN, 1, ended, OPERATOR))
        assert [other.counts(peer(0), for_good, n) for n in (2, 3)] == [True, False]
        assert [other.counts(peer(0), until_4, n) for n in (4, 5)] == [True, False]
        assert let_in(other, 0) == [], "it is out all the same"


def test_a_gate_goes_to_other_processes_with_what_is_revoked(gate):
    gate.revoke(sign_revocations(RUN, 1, {INVITATION.id: 0}, OPERATOR))
    copy = pickle.loads(pickle.dumps(gate))
    with pytest.raises(RecordError, match="revoked"):
        copy.check(peer(0), admission(0))


# -- what the operator revokes


def test_who_is_revoked_is_out_and_what_it_signed_can_still_be_read(gate):
    gate.check(peer(0), admission(0))
    assert gate.revoke(sign_revocations(RUN, 2, {INVITATION.id: 0}, OPERATOR))
    with pytest.raises(RecordError, match="was revoked by the operator"):
        gate.check(peer(0), admission(0))
    with pytest.raises(AdmissionError, match="has revoked the invitation"):
        gate.check_invitation(INVITATION)
    with pytest.raises(AdmissionError, match="this peer is no longer admitted: .*revoked"):
        gate.counted_of((), (peer(0), admission(0)))
    assert gate.verify(peer(0), admission(0))
    assert gate.admitted() == {}
    # An older list, or the same again, changes nothing.
    assert not gate.revoke(sign_revocations(RUN, 1, {}, OPERATOR))
    assert gate.revoked == {INVITATION.id}


def test_of_two_lists_of_one_version_all_peers_end_with_the_same():
    """Attack: peers that saw them in another order would refuse each other's steps for good."""
    lists = [sign_revocations(RUN, 1, revoked, OPERATOR) for revoked in ({}, {INVITATION.id: 0})]
    ends = set()
    for order in (lists, lists[::-1]):
        gate = Gate(RUN, raw_public_key(OPERATOR))
        for envelope in order:
            gate.revoke(envelope)
        ends.add(gate.envelope)
    assert ends == {max(lists)}


@pytest.mark.parametrize(
    "envelope",
    [
        sign_revocations(RUN, 1, {}, STRANGER),
        sign_revocations("f" * 16, 1, {}, OPERATOR),
        sign_revocations(RUN, 1, {"no id": 1}, OPERATOR),
        sign_revocations(RUN, 0, {}, OPERATOR),
        sign_revocations(RUN, 1, {f"{n:016x}": 1 for n in range(5000)}, OPERATOR),
        sign_revocations(RUN, 1, {}, OPERATOR).replace(b'"version":1', b'"version":2'),
        sign_revocations(RUN, 1, {}, OPERATOR)[:-5],
        b"[" * 60_000,
        b"{}",
        b"",
        None,
    ],
    ids=["stranger", "other run", "ids", "version", "long", "changed", "cut", "deep", "empty", "",
         "none"],
)  # fmt: skip
def test_only_the_operator_revokes(gate, envelope):
    with pytest.raises(RecordError):
        gate.revoke(envelope)
    assert gate.envelope is None


# -- where it counts: records, certificates, groups, weights


def served(gate):
    held = HeldRecords(lambda: NOW_S)
    held.serve(KnownRun(RUN, frozenset(), 2, gate))
    return held


def store(held, number, content, item="0"):
    key_name, subkey = (record_key("peers", RUN, item), record_subkey("peers", RUN, item, public(number)))
    value = MSGPackSerializer.dumps(content) + bytes(64)
    expires_s = NOW_S + 60 + held.record_count
    return held.store_subkey(DHTID.generate(key_name), subkey, value, expires_s)


def test_a_node_stores_records_of_the_invited_alone(gate):
    held = served(gate)
    assert not store(held, 0, {"peer_id": peer(0)})
    assert not store(held, 0, {"admission": admission(1)})
    assert not store(held, 0, None)
    assert not store(held, 0, ["admission"])
    assert not store(held, 0, {"admission": admission(0), "filler": bytes(3000)})
    assert store(held, 0, {"admission": admission(0)})
    assert store(held, 0, None)
    assert held.record_count == 1


def test_a_node_drops_what_is_revoked_and_keeps_the_newest_list(gate):
    held = served(gate)
    assert store(held, 0, {"admission": admission(0)})
    lists = [sign_revocations(RUN, n, {INVITATION.id: 0} if n > 1 else {}, OPERATOR) for n in (1, 2, 3)]
    foreign = sign_revocations(RUN, 9, {}, STRANGER)

    def keep(version, envelope):
        subkey = record_subkey("revocations", RUN, f"{version:08d}", b"")
        where = DHTID.generate(record_key("revocations", RUN))
        return held.store_subkey(where, subkey, MSGPackSerializer.dumps(envelope), NOW_S + 9)

    assert keep(2, lists[1])
    assert not keep(1, lists[0])
    assert not keep(9, foreign)
    assert not store(held, 1, {"admission": admission(1)})
    assert keep(3, lists[2])
    held.serve(KnownRun(RUN, frozenset(), 2, gate))
    gate.revoke(lists[2])
    held.serve(KnownRun(RUN, frozenset(), 2, gate))
    assert held.record_count == 1


# -- a node's own admission


def test_a_node_is_let_in_once_and_remembers_it(gate, tmp_path):
    manifest = verify_manifest(sign_manifest(make_plan(), OPERATOR))
    me, other = (dataclasses.replace(identity(n), path=tmp_path / "identity.key") for n in (0, 1))
    with pytest.raises(AdmissionError, match="is by invitation; ask its operator"):
        admit(gate, me, manifest, NOW_S, None)
    text = INVITATION.to_text()
    first = admit(gate, me, manifest, NOW_S, text)
    assert first == admission(0)
    assert admit(gate, me, manifest, NOW_S + 5, None) == first
    assert admit(gate, me, manifest, NOW_S + 5, text) == first
    # The folder was copied to a machine that has its own identity.
    with pytest.raises(AdmissionError, match="this peer is not admitted: .* not for it"):
        admit(gate, other, manifest, NOW_S, None)
    assert admit(gate, other, manifest, NOW_S, text) == admission(1)
    own = make_invitation(Terms(RUN, 1, 0), OPERATOR)
    assert gate.check(peer(1), admit(gate, other, manifest, NOW_S, own.to_text())).places == 1
    gate.revoke(sign_revocations(RUN, 1, {own.id: 0}, OPERATOR))
    with pytest.raises(AdmissionError, match="was revoked by the operator"):
        admit(gate, other, manifest, NOW_S, None)


def test_an_invitation_is_given_as_such_or_as_a_file(tmp_path):
    text, file = INVITATION.to_text(), tmp_path / "invitation.txt"
    assert given_invitation(None) is None
    assert given_invitation(None, file) is None
    file.write_text(f"{text}\n")
    for said, own in ((text, None), (str(file), None), (None, file)):
        given = given_invitation(said, own)
        assert read_invitation(given) == INVITATION
    for encoding in ("utf-8-sig", "utf-16"):  # as Windows saves it
        file.write_text(f"{text}\n", encoding=encoding)
        assert read_invitation(given_invitation(str(file)) or "") == INVITATION
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AdmissionError, match="not a text with an invitation"):
        given_invitation(str(file))
    with pytest.raises(AdmissionError, match="neither an invitation, .* nor a file"):
        given_invitation(str(tmp_path / "nowhere"))
    with pytest.raises(AdmissionError, match="paste all"):
        given_invitation(text[:-3])


def test_the_operator_invites_and_revokes(tmp_path):
    with pytest.raises(ManifestError, match="holds no manifest"):
        invite(tmp_path, 1)
    key_of_run = load_or_create_operator_key(tmp_path / "operator.pem")
    everybody = opened(make_plan(), key_of_run)
    (tmp_path / "manifest.json").write_bytes(sign_manifest(everybody, key_of_run))
    with pytest.raises(ConfigurationError, match="is open"):
        invite(tmp_path, 1)
    plan = make_plan()
    (tmp_path / "manifest.json").write_bytes(sign_manifest(plan, key_of_run))
    found = read_invitation(invite(tmp_path, 3, expires_days=2.0, name="Ada"))
    assert (found.terms.run_id, found.terms.places) == (plan.run_id, 3)
    noted = json.loads((tmp_path / "invitations.jsonl").read_text())
    assert (noted["id"], noted["name"], noted["peers"]) == (found.id, "Ada", 3)
    with (tmp_path / "invitations.jsonl").open("a") as file:
        file.write('{"id": "half of a line, when the power')
    invite(tmp_path, 1, name="Bob")
    last = (tmp_path / "invitations.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["name"] == "Bob"
    gate = Gate.of(verify_manifest((tmp_path / "manifest.json").read_bytes()))
    gate.check_invitation(found)
    slip = found.id[:-1] + ("0" if found.id[-1] != "0" else "1")
    with pytest.raises(ConfigurationError, match=rf"{slip} is no invitation in .*; did you mean {found.id} \(Ada\)\?"):
        revoke(tmp_path, [slip])
    assert not (tmp_path / "revocations.json").exists()
    said = revoke(tmp_path, [found.id])
    assert f"revoked: {found.id} (Ada); 1 invitation is revoked in all (version 1" in said
    # Of another folder, for example.
    assert f"{'a' * 16} (not in {tmp_path / 'invitations.jsonl'}); 2 invitations are" in revoke(tmp_path, ["a" * 16])
    assert gate.revoke((tmp_path / "revocations.json").read_bytes())
    assert gate.revoked == {found.id, "a" * 16}
    with pytest.raises(ConfigurationError, match="16 hexadecimal digits"):
        revoke(tmp_path, ["Ada"])
    with pytest.raises(ManifestError, match="give the operator's key"):
        invite(tmp_path, 1, operator_key=tmp_path / "lost.pem")
    load_or_create_operator_key(tmp_path / "other.pem")
    with pytest.raises(ManifestError, match="is not the key that signed"):
        invite(tmp_path, 1, operator_key=tmp_path / "other.pem")


def test_nobody_ends_an_open_run_by_a_list_of_what_is_revoked(tmp_path):
    """Everybody is in by the invitation that stands in its plan (promise 12)."""
    operator = load_or_create_operator_key(tmp_path / "operator.pem")
    plan = opened(make_plan(), operator)
    (tmp_path / "manifest.json").write_bytes(sign_manifest(plan, operator))
    gate = Gate.of(verify_manifest(sign_manifest(plan, operator)))
    everybody = read_invitation(plan.admission or "")
    mine = everybody.admit(key(0), NOW_S)
    with pytest.raises(ConfigurationError, match="everybody"):
        revoke(tmp_path, [everybody.id])
    ended = {everybody.id: 0, "a" * 16: 0}
    gate.revoke(sign_revocations(plan.admission_scope, 1, ended, operator))
    for one in (gate, pickle.loads(pickle.dumps(gate))):
        assert one.check(peer(0), mine)
        assert one.counts(peer(0), mine, 10**6)
        assert one.counted_of((), (peer(0), mine)) == {peer(0)}
        one.check_invitation(everybody)
        assert one.revoked == {"a" * 16}
    junk = plan.model_copy(update={"admission": "no invitation"})
    assert Gate.of(verify_manifest(sign_manifest(junk, operator))).everybody is None


def test_an_operator_who_has_lost_his_own_invitation_need_not_ask_himself(tmp_path):
    key_of_run = load_or_create_operator_key(tmp_path / "operator.pem")
    (tmp_path / "manifest.json").write_bytes(sign_manifest(make_plan(), key_of_run))
    said = []
    found = own_invitation(tmp_path, said.append)
    Gate.of(verify_manifest((tmp_path / "manifest.json").read_bytes())).check_invitation(read_invitation(found))
    assert len(said) == 1
    # It is made once, and nobody can make it without the key.
    assert own_invitation(tmp_path, said.append) == found
    (tmp_path / "invitation.txt").unlink()
    (tmp_path / "operator.pem").unlink()
    assert own_invitation(tmp_path, said.append) is None
    assert len(said) == 1


def test_a_revocation_ends_no_round_whose_steps_can_be_made_before_it_is_known(tmp_path):
    """A peer that has the list refuses, for good, a step that others made without it, and all that
    stands on the step. So the list must not end rounds before everybody can have it."""
    key_of_run = load_or_create_operator_key(tmp_path / "operator.pem")
    plan = make_plan(start_s=time.time() - 1000.5 * make_plan().rounds.duration_s)
    (tmp_path / "manifest.json").write_bytes(sign_manifest(plan, key_of_run))
    gate = Gate.of(verify_manifest((tmp_path / "manifest.json").read_bytes()))
    found = read_invitation(invite(tmp_path, 2))
    mine = found.admit(key(0), time.time())
    gate.check(peer(0), mine)
    said = revoke(tmp_path, [found.id])
    gate.revoke((tmp_path / "revocations.json").read_bytes())
    with pytest.raises(RecordError, match="revoked"):
        gate.check(peer(0), mine)
    assert [gate.counts(peer(0), mine, number) for number in (1000, 1001, 1002)] == [True] * 3
    assert not gate.counts(peer(0), mine, 1010)
    # The operator learns how long there is.
    assert re.search(rf"within {2 * plan.rounds.duration_s:.0f} s\b", said)


def test_with_fixed_steps_a_revocation_spares_the_rounds_that_were_counted():
    """They may be much shorter than the longest that a round may last."""
    rounds = make_plan().rounds.model_copy(update={"inner_steps": 4, "duration_s": 600.0})
    plan = make_plan().model_copy(update={"rounds": rounds})
    invitation = make_invitation(Terms(plan.admission_scope, 2, 0), OPERATOR)
    gate = Gate.of(verify_manifest(sign_manifest(plan, OPERATOR)))
    ended_s = int(plan.start_s) + 6000
    gate.revoke(sign_revocations(plan.admission_scope, 1, {invitation.id: ended_s}, OPERATOR))
    assert gate.counts(peer(0), admission(0, invitation), 3000)


def test_a_successor_s_folder_has_the_list_and_goes_on_from_it(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    keep_revocations(old, new)
    assert list(new.iterdir()) == []
    for version, revoked in ((1, "a"), (2, "b")):
        (old / "revocations.json").write_bytes(sign_revocations(RUN, version, {revoked * 16: 9}, OPERATOR))
        keep_revocations(old, new)
    kept = read_revocations((new / "revocations.json").read_bytes())
    assert (kept.version, kept.revoked) == (1, {"a" * 16: 9}), "what it has is left alone"


# -- plans


def test_in_an_open_run_everybody_comes_in_by_the_manifest_alone(tmp_path):
    plan = opened(make_plan(), OPERATOR, places=2)
    manifest = verify_manifest(sign_manifest(plan, OPERATOR))
    gate = Gate.of(manifest)
    mine = dataclasses.replace(identity(5), path=tmp_path / "identity.key")
    assert gate.check(peer(5), admit(gate, mine, manifest, NOW_S, None)).places == 2
    # Another operator's invitation is none, and the run's own id does not depend on its key.
    strange = opened(make_plan(), STRANGER)
    with pytest.raises(AdmissionError, match="not signed by the operator"):
        gate.check_invitation(read_invitation(strange.admission or ""))
    assert strange.admission_scope == plan.admission_scope
    assert strange.run_id != plan.run_id


def test_who_is_in_stays_in_when_a_run_by_invitation_has_a_successor():
    plan = make_plan()
    gate = Gate.of(verify_manifest(sign_manifest(plan, OPERATOR)))
    gate.check_invitation(make_invitation(Terms(plan.run_id, 1, 0), OPERATOR))
    after = plan.model_copy(update={"invitations_of": RUN})
    successor = Gate.of(verify_manifest(sign_manifest(after, OPERATOR)))
    assert successor.check(peer(0), admission(0)).places == 2
