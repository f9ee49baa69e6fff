"""Score requests and answers: signed by the operator, bounded, and refused when anything is off."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dipaco.dht.directory import Directory
from dipaco.dht.identity import peer_id_of_public_key
from dipaco.dht.manifest import (
    current_runs,
    newest_run,
    operator_fingerprint,
)
from dipaco.dht.record_keys import (
    KINDS,
    MANIFESTS_KEY,
    Address,
    parse_record,
    parse_subkey,
    record_key,
    record_subkey,
)
from dipaco.dht.record_validator import RecordValidator
from dipaco.dht.records import MAX_SCORE_ENTRIES, RecordError, ScoreEntry, ScoresRecord
from dipaco.dht.score_request import (
    MAX_SCORE_REQUEST_BYTES,
    ScoreRequest,
    ScoreRequestError,
    sign_score_request,
    verify_score_request,
)
from dipaco.modules.files import canonical_json
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from support.dht_pair import TestNode, node_pair
from support.operators import KEY, STRANGER, manifest

RUN_ID = "0123456789abcdef"
LIFE_S = 60.0


def request_of(**changes: Any) -> ScoreRequest:
    values = {
        "run_id": RUN_ID,
        "documents_sha256": "d" * 64,
        "documents": 100,
        "made_s": 1000.5,
    }
    return ScoreRequest.model_validate({**values, **changes})


# -- the envelope


def test_a_request_comes_back_and_its_id_is_its_hash() -> None:
    request = request_of()
    envelope = sign_score_request(request, KEY)
    assert len(envelope) <= MAX_SCORE_REQUEST_BYTES
    signed = verify_score_request(
        envelope, run_id=RUN_ID, operator_fingerprint=operator_fingerprint(KEY)
    )
    assert (signed.request, signed.envelope) == (request, envelope)
    assert signed.request_id == request.request_id == verify_score_request(envelope).request_id
    assert sign_score_request(request, KEY) == envelope
    assert request_of(documents=101).request_id != request.request_id


def changed(**changes: Any) -> bytes:
    """Return an envelope whose request was changed after it was signed."""
    content = json.loads(sign_score_request(request_of(), KEY))
    content["request"].update(changes)
    return canonical_json(content)


def resigned(values: Any) -> bytes:
    """Return an envelope of anything, with a signature that is right."""
    content = json.loads(sign_score_request(request_of(), KEY))
    content["request"] = values
    signature = KEY.sign(b"dipaco-score-request/1\n" + canonical_json(values))
    content["signature"] = base64.b64encode(signature).decode()
    return canonical_json(content)


@pytest.mark.parametrize(
    ("envelope", "reason"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"request": 7}', "cannot be read"),
        (b"[" * 1500, "cannot be read"),
        (b" " * (MAX_SCORE_REQUEST_BYTES + 1), "at most 2048"),
        (changed(documents=5), "signature .* is wrong"),
        (changed(documents_sha256="e" * 64), "signature .* is wrong"),
        (resigned({**request_of().model_dump(mode="json"), "documents": 0}), "documents"),
        (resigned({**request_of().model_dump(mode="json"), "documents": 2**30}), "documents"),
        (resigned({**request_of().model_dump(mode="json"), "run_id": "x" * 16}), "run_id"),
        (resigned({**request_of().model_dump(mode="json"), "more": 1}), "more"),
        (resigned({**request_of().model_dump(mode="json"), "made_s": 1000}), "respells"),
        (resigned({**request_of().model_dump(mode="json"), "made_s": -1.0}), "made_s"),
    ],
)
def test_a_bad_request_is_refused(envelope: bytes, reason: str) -> None:
    with pytest.raises(ScoreRequestError, match=reason):
        verify_score_request(envelope)


def test_a_request_of_another_run_or_operator_is_refused() -> None:
    envelope = sign_score_request(request_of(), STRANGER)
    with pytest.raises(ScoreRequestError, match="of run 0123"):
        verify_score_request(envelope, run_id="f" * 16)
    with pytest.raises(ScoreRequestError, match="the run's operator is"):
        verify_score_request(envelope, operator_fingerprint=operator_fingerprint(KEY))


# -- on a node


def stored(envelope: Any, *, request_id: str | None = None, run_id: str = RUN_ID) -> DHTRecord:
    subkey = record_subkey("requests", run_id, request_id or request_of().request_id, b"")
    return DHTRecord(
        key=DHTID.generate(source=record_key("requests", run_id)).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps(envelope),
        expiration_time=time.time() + LIFE_S,
    )


def test_nodes_store_only_sound_requests_where_they_belong() -> None:
    validator = RecordValidator(None)
    envelope = sign_score_request(request_of(), KEY)
    good = stored(envelope)
    address = parse_subkey(MSGPackSerializer.loads(good.subkey))
    assert (address.kind.name, address.run_id) == ("requests", RUN_ID)
    assert validator.validate(good)
    # Whoever it is: a node does not know the operators of all runs.
    other = sign_score_request(request_of(), STRANGER)
    assert validator.validate(stored(other))
    bad = {
        "another id": stored(envelope, request_id="0" * 16),
        "another run": stored(envelope, run_id="f" * 16),
        "changed": stored(changed(documents=5)),
        "too large": stored(envelope + b" " * MAX_SCORE_REQUEST_BYTES),
        "no bytes": stored({"request": 1}),
        "another key": dataclasses.replace(
            good, key=DHTID.generate(source=MANIFESTS_KEY).to_bytes()
        ),
        "too long": dataclasses.replace(good, expiration_time=time.time() + 4e5),
        "bad subkey": dataclasses.replace(
            good, subkey=MSGPackSerializer.dumps(record_key("requests", RUN_ID).encode() + b"/x")
        ),
    }
    for what, record in bad.items():
        assert not RecordValidator(None).validate(record), what


def entry(path: int, *, done: bool = False, **changes: Any) -> dict[str, Any]:
    values = {
        "path": path,
        "state": "done" if done else "scoring",
        "sha256": "b" * 64 if done else None,
        "since_s": 1.0,
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([entry(0, sha256="b" * 64)], "done scores name their blob"),
        ([entry(0, done=True, sha256=None)], "done scores name their blob"),
        ([entry(0, done=True, sha256="b" * 63)], "sha256"),
        ([entry(0), entry(0, done=True)], "listed twice"),
        ([entry(0, state="dreaming")], "state"),
        ([entry(-1)], "path"),
        ([entry(0, since_s=float("nan"))], "since_s"),
        ([entry(path) for path in range(MAX_SCORE_ENTRIES + 1)], "entries"),
        (7, "entries"),
    ],
)
def test_a_bad_answer_is_refused(entries: Any, reason: str) -> None:
    owner = b"k" * 32
    peer = peer_id_of_public_key(owner)
    address = Address(KINDS["scores"], RUN_ID, "a" * 16, owner)
    with pytest.raises(RecordError, match=reason):
        parse_record(address, {"peer_id": peer, "request": "a" * 16, "entries": entries})


def test_an_answer_is_about_the_request_that_it_stands_under() -> None:
    owner = b"k" * 32
    peer = peer_id_of_public_key(owner)
    address = Address(KINDS["scores"], RUN_ID, "a" * 16, owner)
    value = {"peer_id": peer, "request": "c" * 16, "entries": [entry(1)]}
    with pytest.raises(RecordError, match="is about c+, not a+"):
        parse_record(address, value)


# -- over the DHT


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestNode, TestNode]]:
    with node_pair(tmp_path_factory.mktemp("pair")) as nodes:
        yield nodes


def test_requests_and_answers_go_through_the_swarm(pair: tuple[TestNode, TestNode]) -> None:
    first, second = (Directory(node.dht, node.identity, RUN_ID) for node in pair)
    old, new = request_of(), request_of(made_s=2000.5)
    for request, key in ((old, KEY), (new, KEY), (request_of(documents=7), STRANGER)):
        assert first.store_score_request(sign_score_request(request, key), LIFE_S)
    found = second.score_requests(operator_fingerprint(KEY))
    assert [signed.request for signed in found] == [new, old]
    with pytest.raises(ScoreRequestError, match="of run"):
        first.store_score_request(sign_score_request(request_of(run_id="f" * 16), KEY), LIFE_S)
    record = ScoresRecord(
        peer_id=pair[0].peer_id,
        request=new.request_id,
        entries=tuple(
            ScoreEntry.model_validate(entry(2**31 - 1 - path, done=True, since_s=1e11))
            for path in range(MAX_SCORE_ENTRIES)
        ),
    )
    assert first.publish_scores(record, LIFE_S)
    assert second.scores(new.request_id) == (record,)
    assert second.scores(old.request_id) == ()
    assert first.withdraw_scores(new.request_id)
    assert second.scores(new.request_id) == ()


# -- successors


def test_the_newest_run_of_a_chain_is_the_one_to_work_on() -> None:
    first = manifest(1, 100.0)
    second = manifest(2, 200.0, first.plan.run_id)
    third = manifest(3, 300.0, second.plan.run_id)
    other = manifest(4, 50.0)
    all_runs = (third, other, first, second)
    for run in (first, second, third):
        assert newest_run(run, all_runs) == third
    assert newest_run(first, (first, second)) == second
    # A link that is missing ends the chain there.
    assert newest_run(first, (first, third)) == first
    assert newest_run(other, all_runs) == other
    assert sorted(run.plan.seed for run in current_runs(all_runs)) == [3, 4]


def test_who_may_not_succeed() -> None:
    first = manifest(1, 100.0)
    usurper = manifest(2, 200.0, first.plan.run_id, STRANGER)
    earlier = manifest(3, 100.0, first.plan.run_id)
    assert newest_run(first, (first, usurper, earlier)) == first
    assert len(current_runs((first, usurper, earlier))) == 3


def test_of_two_successors_the_later_one_counts_for_peers_and_newcomers() -> None:
    first = manifest(1, 100.0)
    second, twin = (manifest(seed, 100.0 + seed, first.plan.run_id) for seed in (2, 3))
    beyond = manifest(4, 400.0, second.plan.run_id)
    runs = (first, second, twin, beyond)
    assert newest_run(first, runs) == twin
    assert current_runs(runs) == [twin]
    # Whoever is on the other branch already goes on along it.
    assert newest_run(second, runs) == beyond
