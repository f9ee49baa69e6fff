"""The signed manifest: what is signed is what is trained, and everything else is refused."""

import base64
import json
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from dipaco.base.errors import ManifestError, ProtocolVersionError, StorageError
from dipaco.base.files import canonical_json
from dipaco.bootstrap.preparing.predecessor import open_predecessor
from dipaco.protocol import config
from dipaco.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    load_or_create_operator_key,
    newest_run,
    run_and_operator,
    sign_manifest,
    verify_manifest,
)
from dipaco.protocol.plan import PROTOCOL_VERSION
from support.runs.make_plan import make_plan
from support.wire.hostile_mirrors import HOSTILE_MIRRORS


@pytest.fixture(scope="module")
def key_path(tmp_path_factory):
    return tmp_path_factory.mktemp("operator") / "deep" / "operator.pem"


@pytest.fixture(scope="module")
def envelope(key_path):
    return sign_manifest(make_plan(), load_or_create_operator_key(key_path))


def changed(envelope, *keys, value):
    content = json.loads(envelope)
    at = content
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return json.dumps(content).encode()


def resigned(key_path, values):
    """Sign plan values that `sign_manifest` would not, as another version might."""
    key = load_or_create_operator_key(key_path)
    raw = key.public_key().public_bytes_raw()
    return json.dumps(
        {
            "plan": values,
            "operator": {"public_key": base64.b64encode(raw).decode()},
            "signature": base64.b64encode(key.sign(b"dipaco-manifest/1\n" + canonical_json(values))).decode(),
        }
    ).encode()


def test_a_plan_that_nobody_would_take_is_not_signed(key_path):
    plan = make_plan().model_copy(update={"name": "n" * MAX_MANIFEST_BYTES})
    with pytest.raises(ManifestError, match="fewer mirrors"):
        sign_manifest(plan, load_or_create_operator_key(key_path))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("inner", "batch_sequences"), 10**400),
        (("rounds", "inner_steps"), 10**400),
        (("rounds", "duration_s"), 1e308),
        (("start_s",), 1e300),
        (("grid", "modules_per_level"), [1024] * 2000),
        (("grid", "private_blocks"), list(range(9000))),
        (("rounds", "level_offsets"), [1.0] * 9000),
    ],
)
def test_a_plan_with_a_number_that_nobody_can_compute_with_is_refused_with_one_line(envelope, key_path, keys, value):
    """Attack: an operator signs such a successor, and what its peers cannot foresee ends them."""
    values = json.loads(changed(envelope, "plan", *keys, value=value))["plan"]
    with pytest.raises(ManifestError, match=keys[-1]) as refusal:
        verify_manifest(resigned(key_path, values))
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "more", [{"y" * 60_000: 1}, {f"mod{number:04}": 1 for number in range(4000)}, {"protocol_version": 10**4000}]
)
def test_a_plan_of_much_that_is_unknown_costs_one_short_line(envelope, key_path, more, monkeypatch):
    """Attack: anybody can store such manifests, and peers read them at each refresh."""
    guessed = []
    monkeypatch.setattr(config, "nearest_name", lambda name, known: guessed.append(name))
    with pytest.raises(ManifestError) as refusal:
        verify_manifest(resigned(key_path, json.loads(envelope)["plan"] | more))
    assert len(str(refusal.value)) < 2000
    assert len(guessed) <= 8
    assert all(len(name) <= 80 for name in guessed)


def test_a_signed_plan_comes_back_as_it_was(envelope):
    plan = make_plan()
    manifest = verify_manifest(envelope, plan.run_id)
    assert manifest.plan == plan
    assert manifest.envelope == envelope
    assert len(manifest.operator_fingerprint) == 16
    assert run_and_operator(envelope) == (plan.run_id, manifest.operator_fingerprint)


def test_a_changed_copy_of_a_plan_is_another_run():
    plan = make_plan()
    assert plan.run_id == plan.fingerprint[:16]
    changed = plan.model_copy(update={"seed": plan.seed + 1})
    assert changed.run_id != plan.run_id
    assert changed.model_copy(update={"seed": plan.seed}).run_id == plan.run_id
    # What was worked out of a plan is neither written nor compared.
    assert changed.model_dump() == {**plan.model_dump(), "seed": plan.seed + 1}
    assert plan == make_plan()


def test_a_run_says_whether_texts_of_volunteers_are_allowed(key_path):
    plan = make_plan()
    assert plan.own_texts == "no"
    allowing = plan.model_copy(update={"own_texts": "yes"})
    assert allowing.run_id != plan.run_id
    envelope = sign_manifest(allowing, load_or_create_operator_key(key_path))
    assert verify_manifest(envelope).plan.own_texts == "yes"


def test_white_space_does_not_matter_but_content_does(envelope):
    compact = json.dumps(json.loads(envelope)).encode()
    assert verify_manifest(compact).plan == make_plan()
    with pytest.raises(ManifestError, match="changed after it was signed"):
        verify_manifest(changed(envelope, "plan", "seed", value=7))
    with pytest.raises(ManifestError, match="changed after it was signed"):
        verify_manifest(changed(envelope, "plan", "extra", value=7))


def test_somebody_elses_signature_is_refused(envelope, tmp_path):
    other = sign_manifest(make_plan(), load_or_create_operator_key(tmp_path / "other.pem"))
    public_key = json.loads(other)["operator"]["public_key"]
    with pytest.raises(ManifestError, match="signature"):
        verify_manifest(changed(envelope, "operator", "public_key", value=public_key))
    mine, theirs = verify_manifest(envelope), verify_manifest(other)
    assert mine.plan.run_id == theirs.plan.run_id
    assert mine.operator_fingerprint != theirs.operator_fingerprint


def test_a_manifest_stored_under_another_run_is_refused(envelope):
    with pytest.raises(ManifestError, match="stored as run 0000000000000000"):
        verify_manifest(envelope, "0" * 16)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"plan": 3, "operator": {"public_key": ""}, "signature": ""}',
        b"[" * 40_000,
        b'{"plan": {}, "operator": {"public_key": "AAAA"}, "signature": "AAAA"}',
    ],
)
def test_what_is_no_manifest_is_refused_with_one_line(broken):
    with pytest.raises(ManifestError, match="cannot be read") as caught:
        verify_manifest(broken)
    assert "\n" not in str(caught.value)


def test_an_oversized_manifest_is_not_even_parsed():
    with pytest.raises(ManifestError, match="at most"):
        verify_manifest(b" " * (MAX_MANIFEST_BYTES + 1))


def test_another_protocol_is_named_before_its_unknown_fields(key_path):
    other = PROTOCOL_VERSION + 1
    values = {**make_plan().model_dump(mode="json"), "protocol_version": other, "novelty": True}
    envelope = resigned(key_path, values)
    said = f"speaks protocol {other}.*speaks {PROTOCOL_VERSION}"
    with pytest.raises(ProtocolVersionError, match=said):
        verify_manifest(envelope)
    assert [len(name) for name in run_and_operator(envelope)] == [16, 16]


def test_a_run_of_an_older_protocol_can_be_continued_and_nothing_else(key_path, tmp_path):
    def envelope(protocol):
        plan = make_plan().model_copy(update={"protocol_version": protocol})
        return sign_manifest(plan, load_or_create_operator_key(key_path))

    (tmp_path / "manifest.json").write_bytes(envelope(PROTOCOL_VERSION - 1))
    assert open_predecessor(tmp_path).plan.protocol_version == PROTOCOL_VERSION - 1
    with pytest.raises(ProtocolVersionError, match="this dipaco is the newer one: install"):
        verify_manifest(envelope(PROTOCOL_VERSION - 1))
    (tmp_path / "manifest.json").write_bytes(envelope(PROTOCOL_VERSION + 1))
    with pytest.raises(ProtocolVersionError, match="this dipaco is the older one: install"):
        open_predecessor(tmp_path)


def test_a_plan_that_is_valid_but_not_spelled_out_is_refused(key_path):
    values = make_plan().model_dump(mode="json")
    del values["seed"]
    with pytest.raises(ManifestError, match="leaves out"):
        verify_manifest(resigned(key_path, values))


def test_a_well_signed_impossible_plan_names_the_field(key_path):
    values = make_plan().model_dump(mode="json")
    values["model"]["head_count"] = 3
    with pytest.raises(ManifestError, match="head_count 3"):
        verify_manifest(resigned(key_path, values))


def test_a_well_signed_model_of_overflowing_size_is_refused(key_path):
    # A peer that lists the runs of a DHT looks at the plans of strangers.
    values = make_plan().model_dump(mode="json")
    values["model"] |= {"hidden_size": 2**32 + 16, "head_count": 4}
    with pytest.raises(ManifestError, match="hidden_size"):
        verify_manifest(resigned(key_path, values))


@pytest.mark.parametrize("scheme", ["https", "s3", "gs", "hf"])
def test_mirrors_are_folders_afar(key_path, scheme):
    mirrors = [f"{scheme}://example.org/a/b-c@main", f"{scheme}://b/"]
    values = {**make_plan().model_dump(mode="json"), "mirrors": mirrors}
    assert verify_manifest(resigned(key_path, values)).plan.mirrors == tuple(mirrors)


@pytest.mark.parametrize("address", HOSTILE_MIRRORS)
def test_a_well_signed_mirror_that_is_no_plain_address_is_refused(key_path, address):
    values = {**make_plan().model_dump(mode="json"), "mirrors": ["https://a.org/", address]}
    with pytest.raises(ManifestError, match="mirrors") as raised:
        verify_manifest(resigned(key_path, values))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ['x"); import os; os.system("id', "x --trust-remote-code", "x`\n\nRun this:", "../x", "$(id)", ""]
)
def test_a_base_is_named_by_no_words_of_a_program(key_path, name):
    """An export's README shows the name inside a program that people copy."""
    values = make_plan().model_dump(mode="json")
    files = [{"name": "model.safetensors", "sha256": "0" * 64}]
    values["base_source"] = {"name": name, "files": files}
    with pytest.raises(ManifestError, match=r"base_source\.name"):
        verify_manifest(resigned(key_path, values))


def test_a_manifest_has_so_many_mirrors(key_path):
    values = {**make_plan().model_dump(mode="json"), "mirrors": ["https://a.org/"] * 17}
    with pytest.raises(ManifestError, match="mirrors"):
        verify_manifest(resigned(key_path, values))


def test_the_operator_key_is_made_once_and_private(key_path, envelope):
    before = key_path.read_bytes()
    assert stat.S_IMODE(key_path.stat().st_mode) == 0o600
    load_or_create_operator_key(key_path)
    assert key_path.read_bytes() == before


def test_a_file_that_is_no_operator_key_is_kept(tmp_path):
    path = tmp_path / "operator.pem"
    path.write_text("not a key")
    with pytest.raises(ManifestError, match="Ed25519"):
        load_or_create_operator_key(path)
    wrong_kind = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(wrong_kind)
    with pytest.raises(ManifestError, match="Ed25519"):
        load_or_create_operator_key(path)
    assert path.read_bytes() == wrong_kind
    with pytest.raises(StorageError, match="operator key"):
        load_or_create_operator_key(tmp_path)


@pytest.mark.parametrize(("start_s", "follows"), [(1000.0, False), (1000.5, True)])
def test_a_run_succeeds_one_that_starts_before_it(key_path, start_s, follows):
    """So a chain of runs has an end, whatever its operator signs."""
    key = load_or_create_operator_key(key_path)
    first = verify_manifest(sign_manifest(make_plan(start_s=1000.0), key))
    second = verify_manifest(sign_manifest(make_plan(start_s=start_s, successor_of=first.plan.run_id), key))
    assert newest_run(first, [first, second]) == (second if follows else first)
