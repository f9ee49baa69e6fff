"""Every parser of outside bytes, with samples of what it usually reads and how it may refuse."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from dipaco.base.errors import DipacoError
from dipaco.base.files import canonical_json
from dipaco.dht import record_validator
from dipaco.dht.addresses import check_peer_address
from dipaco.modules.contributions import CODECS, Codec
from dipaco.modules.grow import check_genesis_index
from dipaco.modules.layout import layout_of
from dipaco.modules.state import genesis_state, read_state, state_chunks
from dipaco.peer.exchange.streams import messages
from dipaco.protocol import admission, invitations, manifest, revocations
from dipaco.protocol.chain import Head, unpack_row, unpack_step, verify_row
from dipaco.protocol.config import parse_config
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import SIGNATURE_BYTES, peer_id_of_public_key, raw_public_key
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import parse_record, parse_subkey
from dipaco.protocol.records import HeldState
from dipaco.routing.routers.kinds import load_router
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import check_tokens, open_tokens
from dipaco.routing.tokens.tokenizer import Tokenizer

from .mutations import MAX_BYTES, Spelling

VALUES = 5000
_ADDRESS = b"/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWQmTe5oPrKaGSbKzKaKpsJFCdDLyhJ5uSvrC4AdVKVMUR"


@dataclass(frozen=True)
class Target:
    """A parser, what it usually reads, and what it may raise for anything else.

    One that returns False refuses too.
    """

    name: str
    samples: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    spelling: Spelling = "bytes"


def recorded(folder: Path, kind: str) -> list[bytes]:
    """Return the recorded samples of a kind in a fixed order."""
    files = sorted((folder / kind).glob("*"))
    return [file.read_bytes()[:MAX_BYTES] for file in files]


def targets_of(folder: Path) -> list[Target]:
    """Return all targets. `folder` holds `run` and `samples` of `fuzz.py --record`."""
    run = RunFolder(folder / "run")
    samples = folder / "samples"
    targets = [*_of_the_dht(run, samples), *_of_chains(run, samples), *_of_messages(samples)]
    targets += [*_of_content(run, folder), *_of_plans(run)]
    empty = [target.name for target in targets if not target.samples]
    if empty:
        raise SystemExit(f"no samples for {', '.join(empty)}; record again with --record")
    return targets


def _of_the_dht(run: RunFolder, samples: Path) -> list[Target]:
    plan = run.plan()
    stored = recorded(samples, "record")
    # Only the owner's key signs what the content's checks get to see.
    contents = []
    for sample in stored:
        _, subkey, value, _ = msgpack.unpackb(sample)
        if b"@" in subkey:
            contents.append(msgpack.packb((subkey, value[:-SIGNATURE_BYTES])))
    validator = record_validator.RecordValidator()

    def validate(data: bytes) -> object:
        key, subkey, value, expiration_s = msgpack.unpackb(data, raw=False)
        return validator.validate(DHTRecord(key, subkey, value, expiration_s))

    def content(data: bytes) -> object:
        subkey, value = msgpack.unpackb(data)
        address = parse_subkey(MSGPackSerializer.loads(subkey))
        if address.kind.record is None:
            return None
        return parse_record(address, MSGPackSerializer.loads(value))

    operator = manifest.load_or_create_operator_key(run.path / "operator.pem")
    gate = admission.Gate(plan.run_id, raw_public_key(operator))
    invitation = invitations.make_invitation(invitations.Terms(plan.run_id, 3, 0), operator)
    guest = raw_public_key(operator)
    admitted = invitation.admit(guest, 1.5e9)
    revoked = revocations.sign_revocations(plan.run_id, 1, {invitation.id: 0}, operator)
    # What does not unpack to these fields never reaches the validator.
    unread = (ValueError, TypeError, msgpack.UnpackException)
    return [
        Target("record", stored, validate, unread, "msgpack"),
        Target("record content", contents, content, (RecordError, *unread), "msgpack"),
        Target("manifest", recorded(samples, "manifest"), manifest.verify_manifest,
               (DipacoError,), "json"),
        Target("invitation", [invitation.to_text().encode()],
               lambda data: invitations.read_invitation(data.decode("utf-8", "replace")),
               (DipacoError,)),
        Target("admission", [admitted],
               lambda data: gate.check(peer_id_of_public_key(guest), data), (RecordError,)),
        Target("revocations", [revoked], revocations.read_revocations, (RecordError,), "json"),
        Target("peer address", [_ADDRESS],
               lambda data: check_peer_address(data.decode("utf-8", "replace")), (DipacoError,)),
    ]  # fmt: skip


def _of_chains(run: RunFolder, samples: Path) -> list[Target]:
    """Rows, steps and the files that rows name."""
    plan = run.plan()
    grid = run.grid(plan)

    def row(data: bytes) -> object:
        return verify_row(unpack_row(_values(data)), grid, max_bytes=2**20)

    unread = (RecordError, ValueError, msgpack.UnpackException)
    found = [
        Target("row", recorded(samples, "row"), row, unread, "msgpack"),
        Target("step", recorded(samples, "step"), lambda data: unpack_step(_values(data)), unread,
               "msgpack"),
    ]  # fmt: skip
    values = torch.linspace(-3.0, 3.0, VALUES)
    for name, codec in CODECS.items():
        read = functools.partial(_read_contribution, codec)
        found.append(Target(f"contribution, {name}", [codec.encode(values)], read, (DipacoError,)))
    return found


def _values(data: bytes) -> object:
    return msgpack.unpackb(data, raw=False, max_array_len=1024, max_map_len=1024)


def _read_contribution(codec: Codec, data: bytes) -> object:
    codec.check(data, VALUES)
    decoded = codec.decode(data, VALUES)
    assert bool(torch.isfinite(decoded).all())
    return decoded


def _of_messages(samples: Path) -> list[Target]:
    """Requests of every kind, and every answer; those that the swarm did not send are made here."""
    state = HeldState.of(Head("L0.E0", "0f" * 32, 3, 9, 4, "0f" * 32, 70_000)).model_dump()
    head = {"run": "0f" * 8, "module": "L0.E0"}
    requests: list[dict[str, Any]] = [
        {"kind": "hello", "protocol": 6, "software": "dipaco"},
        {"kind": "call_back", "addresses": ["/ip4/127.0.0.1/tcp/31337"]},
        {"kind": "tell", **head, "rows": [], "steps": [], "keep": True, "admissions": {}},
        {"kind": "ask", **head, "locator": [b"x" * 32]},
        {"kind": "get", "sha256": b"x" * 32, "offset": 0},
        {"kind": "put", "run": "0f" * 8, "row": [], "admissions": {}},
    ]
    answers: dict[type[messages.Message], list[dict[str, Any]]] = {
        messages.CallBackReply: [{"result": "reached", "near": True}],
        messages.AskReply: [{"steps": [], "rows": [], "has_more": False, "held": state,
                             "admissions": {}}],
        messages.GetReply: [{"status": "ok", "total_bytes": 9, "retry_after_s": 0.0}],
        messages.PutReply: [{"status": "stored"}],
        messages.HelloReply: [{"protocol": 1, "software": "dipaco", "received_s": 1.0,
                               "sent_s": 2.0, "run": None}],
    }  # fmt: skip
    found = [
        Target(
            "request",
            [*recorded(samples, "request"), *(_packed(made) for made in requests)],
            messages.decode_request,
            (messages.MessageError,),
            "msgpack",
        )
    ]
    for kind, made in answers.items():
        own = [_packed(sample) for sample in made]
        read = functools.partial(messages.decode, kind)
        known = [*recorded(samples, f"message-{kind.__name__}"), *own]
        found.append(
            Target(f"answer {kind.__name__}", known, read, (messages.MessageError,), "msgpack")
        )
    return found


def _packed(values: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def _of_content(run: RunFolder, folder: Path) -> list[Target]:
    plan = run.plan()
    grid = run.grid(plan)
    module = grid.modules()[0]
    layout = layout_of(grid, module)
    first = b"".join(state_chunks(genesis_state(module, layout, run.base_parameters(plan))))
    states = [first, *recorded(folder, "states")]
    scratch = Path(tempfile.mkdtemp(prefix="dipaco-benchmark-"))
    shard = run.shard_index(plan).paths[0]

    def tokens(data: bytes) -> object:
        file = scratch / "tokens"
        file.write_bytes(data)
        rows = open_tokens(file, plan.model.sequence_length, plan.model.vocabulary_size)
        return check_tokens(rows, plan.model.vocabulary_size, "the shard")

    def tokenizer(data: bytes) -> object:
        return Tokenizer(data).encode("a few words, 12 and ü")

    blobs = run.blobs
    return [
        Target("module state", states,
               lambda data: read_state(data, layout, module=module,
                                       paths=grid.paths_of_module(module)),
               (DipacoError,), "safetensors"),
        Target("router", [blobs.read(plan.blobs.router)], load_router, (DipacoError,),
               "safetensors"),
        Target("tokenizer", [blobs.read(plan.blobs.tokenizer)], tokenizer, (DipacoError,)),
        Target("token file", [blobs.read(shard.train_sha256)], tokens, (DipacoError,)),
    ]  # fmt: skip


def _modules_of(plan: RunPlan) -> object:
    """Do what everybody does first with a plan that a stranger may have signed."""
    return Grid(plan.model, plan.grid, plan.rounds.level_offsets).modules()


def _of_plans(run: RunFolder) -> list[Target]:
    """What only the operator can sign: read without its signature, which no mutation has."""
    plan = run.plan()
    grid = run.grid(plan)
    genesis = canonical_json(dict.fromkeys(grid.modules(), "0f" * 32))
    shards = run.blobs.read(plan.blobs.shards)
    unread = (DipacoError, ValueError, RecursionError)  # As their callers have it.
    return [
        Target("plan", [plan.canonical_json()],
               lambda data: _modules_of(parse_config(RunPlan, json.loads(data), "the plan")),
               unread, "json"),
        Target("shard index", [shards],
               lambda data: parse_config(ShardIndex, json.loads(data), "the index"), unread,
               "json"),
        Target("genesis index", [genesis],
               lambda data: check_genesis_index(json.loads(data), grid), unread, "json"),
    ]  # fmt: skip
