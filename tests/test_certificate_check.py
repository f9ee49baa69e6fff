"""Certificates from others: what is forged, swapped, cut off or of another run is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgpack
import pytest
from dipaco.dht.certificate_check import (
    MAX_CERTIFICATE_BYTES,
    MAX_MEMBERS,
    decode_certificate,
    encode_certificate,
    sign_statement,
    verify_certificate,
)
from dipaco.dht.certificates import Certificate
from dipaco.dht.identity import peer_id_of_public_key
from dipaco.dht.records import RecordError
from dipaco.modules.outer import Contribution, canonical_table
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import MODULE, RUN, certificate, grid, key, peer, statement, table

GOOD = certificate(3, (0, 1, 2))


def refused(bad: Certificate, match: str) -> None:
    with pytest.raises(RecordError, match=match) as caught:
        verify_certificate(bad, RUN, grid())
    assert "\n" not in str(caught.value)


def take(data: bytes) -> None:
    verify_certificate(decode_certificate(data, RUN), RUN, grid())


@given(st.sets(st.integers(0, 9), min_size=1), st.data(), st.integers(1, 500))
def test_what_members_signed_is_read_back_and_verified(
    members: set[int], data: st.DataObject, version: int
) -> None:
    signers = data.draw(st.sets(st.sampled_from(sorted(members)), min_size=1))
    made = certificate(version, sorted(members), sorted(signers))
    encoded = encode_certificate(made)
    read = decode_certificate(encoded, RUN)
    assert read == made
    assert encode_certificate(read) == encoded
    verify_certificate(read, RUN, grid())
    assert read.signers == {peer(n) for n in signers}


def test_a_certificate_of_another_run_is_refused() -> None:
    foreign = dataclasses.replace(GOOD.statement, run_id="f" * 16)
    refused(sign_statement(foreign, key(0)), "of run ffff")
    # What its bytes don't say, its signatures do.
    renamed = decode_certificate(encode_certificate(sign_statement(foreign, key(0))), RUN)
    refused(renamed, "not of 12D3KooW")


def test_forged_and_swapped_signatures_are_refused() -> None:
    signatures = dict(GOOD.signatures)
    refused(Certificate(GOOD.statement, {**signatures, peer(0): b"x" * 64}), f"not of {peer(0)}")
    swapped = {**signatures, peer(0): signatures[peer(1)], peer(1): signatures[peer(0)]}
    refused(Certificate(GOOD.statement, swapped), "not of 12D3KooW")
    other = certificate(4, (0, 1, 2))
    refused(Certificate(GOOD.statement, other.signatures), "not of 12D3KooW")
    refused(Certificate(GOOD.statement, {}), "not signed")
    stranger = sign_statement(GOOD.statement, key(9)).signatures
    refused(Certificate(GOOD.statement, {**signatures, **stranger}), "members of its group alone")
    bare = key(0).sign(GOOD.statement.to_bytes())
    refused(Certificate(GOOD.statement, {peer(0): bare}), f"not of {peer(0)}")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"module": "L9.E9"}, "does not have"),
        ({"version": 0}, "the version 0"),
        ({"version": True}, "the version True"),
        ({"version": 2**60}, "the version"),
        ({"version": 9}, "of the round 3"),
        ({"round_index": -1}, "of the round -1"),
        ({"round_index": 2.0}, "of the round 2.0"),
        ({"parent": "genesis"}, "no digests"),
        ({"digest": "A" * 64}, "no digests"),
        ({"table": ()}, "at least one"),
        ({"table": (Contribution(99, peer(0), 1),)}, "the path 99"),
        ({"table": (Contribution(0, peer(0), 0),)}, "0 tokens"),
        ({"table": (Contribution(0, peer(0), 2**60),)}, "tokens"),
        ({"table": (Contribution(0, "Qm" + "1" * 44, 1),)}, "no peer"),
        ({"table": (Contribution(0, peer(0), 1), Contribution(1, peer(0), 1))}, "twice"),
        ({"table": tuple(reversed(table((0, 1, 2))))}, "another order"),
    ],
)
def test_a_statement_that_no_group_can_make_is_refused(changes: dict[str, Any], match: str) -> None:
    bad = dataclasses.replace(GOOD.statement, **changes)
    refused(sign_statement(bad, key(0)), match)


def test_signatures_that_were_checked_are_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = certificate(3, (0, 1, 2), (0, 1))
    checked = []

    def check(message: bytes, signature: bytes, public_key: bytes) -> bool:
        checked.append(signature)
        return True

    monkeypatch.setattr("dipaco.dht.certificate_check.is_signed", check)
    verify_certificate(GOOD, RUN, grid(), checked=known)
    assert checked == [GOOD.signatures[peer(2)]]
    verify_certificate(GOOD, RUN, grid(), checked=certificate(4, (0, 1, 2)))
    assert len(checked) == 4


@given(st.binary(max_size=300))
def test_nothing_but_a_record_error_comes_of_garbage(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_certificate(data, RUN)


@given(st.integers(0, len(encode_certificate(GOOD)) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed_or_cut_off(place: int, change: int) -> None:
    data = bytearray(encode_certificate(GOOD))
    with pytest.raises(RecordError):
        take(bytes(data[:place]))
    data[place] ^= change
    with pytest.raises(RecordError):
        take(bytes(data))


def test_other_spellings_and_sizes_are_refused() -> None:
    values = msgpack.unpackb(encode_certificate(GOOD), raw=False)
    for changed in (
        [*values, 1],
        values[:-1],
        [values[0], float(values[1]), *values[2:]],
        [*values[:-1], [[*row[:2], row[2], row[3] + b"x"] for row in values[-1]]],
        [*values[:-1], [[row[0], row[1][:-1], *row[2:]] for row in values[-1]]],
        [*values[:-1], {}],
        [None] * 6,
    ):
        with pytest.raises(RecordError):
            take(msgpack.packb(changed))
    with pytest.raises(RecordError, match="canonical form"):
        decode_certificate(b"\xdc\x00\x06" + encode_certificate(GOOD)[1:], RUN)
    with pytest.raises(RecordError, match="at most"):
        decode_certificate(b"\x00" * (MAX_CERTIFICATE_BYTES + 1), RUN)


def test_the_greatest_group_fits() -> None:
    rows = canonical_table(Contribution(n % 2, peer_of_hash(n), 2**53) for n in range(MAX_MEMBERS))
    said = dataclasses.replace(statement(3, (0,)), table=rows)
    signed = Certificate(said, {row.peer: b"s" * 64 for row in rows})
    assert len(encode_certificate(signed)) <= MAX_CERTIFICATE_BYTES
    assert decode_certificate(encode_certificate(signed), RUN).statement.module == MODULE


def peer_of_hash(number: int) -> str:
    return peer_id_of_public_key(hashlib.sha256(b"%d" % number).digest())
