"""Every parser of outside bytes, with seeds of what it usually reads and how it may refuse."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from support.runs.tiny_run import make_tiny_run
from support.wire.peers import key, peer

from dipaco.base.errors import DipacoError
from dipaco.base.files import canonical_json
from dipaco.dht.addresses import check_peer_address
from dipaco.dht.record_validator import RecordValidator
from dipaco.modules.contributions import CODECS, Codec
from dipaco.modules.grow import check_genesis_index
from dipaco.modules.layout import layout_of
from dipaco.modules.state import genesis_state, read_state, state_chunks
from dipaco.peer.exchange.streams import messages
from dipaco.protocol import admission, invitations, manifest, records, revocations
from dipaco.protocol.chain.steps import (
    Head,
    Row,
    Step,
    genesis_name,
    pack_row,
    pack_step,
    sign_row,
    unpack_row,
    unpack_step,
    verify_row,
)
from dipaco.protocol.config import parse_config
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import SIGNATURE_BYTES, peer_id_of_public_key, raw_public_key
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.record_keys import KINDS, parse_record, parse_subkey, record_key, record_subkey
from dipaco.routing.routers.kinds import load_router
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import check_tokens, open_tokens
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

from .mutations import Spelling

VALUES = 5000
SHA = "0f" * 32
ADDRESS = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWQmTe5oPrKaGSbKzKaKpsJFCdDLyhJ5uSvrC4AdVKVMUR"
# What does not unpack to the fields of a parser never reaches it.
UNREAD = (ValueError, TypeError, msgpack.UnpackException)


@dataclass(frozen=True)
class Target:
    """A parser, seeds of what it reads, and what it may raise for anything else.

    One that returns False refuses too.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    spelling: Spelling = "bytes"


def targets_of(folder: Path) -> dict[str, Target]:
    """Return all targets by name; what they need is made in a folder, or lies there."""
    run = RunFolder(folder / "run")
    if not run.path.exists():
        run = make_tiny_run(folder / "run", private_blocks=(3,), block_count=4)
    return {**_of_the_dht(run), **_of_chains(run), **_of_messages(run), **_of_files(run, folder)}


def _row(run: RunFolder, number: int) -> Row:
    """Return a signed row."""
    parent = genesis_name(run.plan().run_id, "L0.E0")
    name = hashlib.sha256(b"%d" % number).hexdigest()
    return sign_row(Row("L0.E0", 0, parent, SHA, 0, peer(number), 1000, name, 66), key(number))


def _of_the_dht(run: RunFolder) -> dict[str, Target]:
    plan, own = run.plan(), peer(0)
    held = records.HeldState.of(Head("L0.E0", SHA, 3, 9, 4, SHA, 70_000))
    standing = {"peer_id": own, "state": "training", "path": 1, "round": 4, "reachable": "direct"}
    traffic = {"tokens_per_s": 1.0, "bytes_up": 0, "bytes_down": 0}
    entry = records.ProgressEntry(
        path=1, last_round=4, tokens=900, validation_nll=3.5, validation_tokens=9, train_loss=4.0
    )
    stored = {
        ("modules", "L0.E0"): records.ModuleRecord(**standing, module="L0.E0", held=held),
        ("peers", "0"): records.PeerRecord(
            **standing, **traffic, protocol=8, software="dipaco", device="cpu", addresses=(ADDRESS,)
        ),
        ("progress", "0"): records.ProgressRecord(peer_id=own, entries=(entry,)),
        ("blobs", SHA): records.BlobRecord(peer_id=own, sha256=SHA, bytes=9),
    }
    signer = RecordValidator(key(0))
    signed, contents = [], []
    for (kind, item), record in stored.items():
        public = raw_public_key(key(0))
        subkey = MSGPackSerializer.dumps(record_subkey(kind, plan.run_id, item, public))
        value = MSGPackSerializer.dumps(record.model_dump())
        key_bytes = DHTID.generate(source=record_key(kind, plan.run_id, item)).to_bytes()
        expires_s = time.time() + 0.9 * KINDS[kind].max_life_s
        made = DHTRecord(key_bytes, subkey, value, expires_s)
        value = signer.sign_value(made)
        signed.append(msgpack.packb((made.key, subkey, value, expires_s)))
        contents.append(msgpack.packb((subkey, value[:-SIGNATURE_BYTES])))
    validator = RecordValidator()

    def validate(data: bytes) -> object:
        return validator.validate(DHTRecord(*msgpack.unpackb(data, raw=False)))

    def content(data: bytes) -> object:
        """Only the owner's key signs what the content's checks get to see."""
        subkey, value = msgpack.unpackb(data)
        address = parse_subkey(MSGPackSerializer.loads(subkey))
        if address.kind.record is None:
            return None
        return parse_record(address, MSGPackSerializer.loads(value))

    operator = manifest.load_or_create_operator_key(run.path / "operator.pem")
    gate = admission.Gate(plan.run_id, raw_public_key(operator))
    invitation = invitations.make_invitation(invitations.Terms(plan.run_id, 3, 0), operator)
    guest = raw_public_key(operator)
    envelope = manifest.sign_manifest(plan, operator)
    revoked = revocations.sign_revocations(plan.run_id, 1, {invitation.id: 0}, operator)
    return {
        "record": Target(signed, validate, UNREAD, "msgpack"),
        "record content": Target(contents, content, (RecordError, *UNREAD), "msgpack"),
        "manifest": Target([envelope], manifest.verify_manifest, (DipacoError,), "json"),
        "invitation": Target(
            [invitation.to_text().encode()],
            lambda data: invitations.read_invitation(data.decode("utf-8", "replace")),
            (DipacoError,),
        ),
        "admission": Target(
            [invitation.admit(operator, 1.5e9)],
            lambda data: gate.check(peer_id_of_public_key(guest), data),
            (RecordError,),
        ),
        "revocations": Target([revoked], revocations.read_revocations, (RecordError,), "json"),
        "peer address": Target(
            [ADDRESS.encode()],
            lambda data: check_peer_address(data.decode("utf-8", "replace")),
            (DipacoError,),
        ),
    }


def _of_chains(run: RunFolder) -> dict[str, Target]:
    """Rows, steps and the files that rows name."""
    grid = run.grid(run.plan())
    rows = [_row(run, number) for number in range(3)]

    def values(data: bytes) -> object:
        return msgpack.unpackb(data, raw=False, max_array_len=1024, max_map_len=1024)

    def row(data: bytes) -> object:
        return verify_row(unpack_row(values(data)), grid, max_bytes=2**20)

    def contribution(codec: Codec, data: bytes) -> object:
        codec.check(data, VALUES)
        decoded = codec.decode(data, VALUES)
        assert bool(torch.isfinite(decoded).all())
        return decoded

    unread = (RecordError, ValueError, msgpack.UnpackException)
    steps = [msgpack.packb(pack_step(Step.of(rows[:count]))) for count in (1, 3)]
    found = {
        "row": Target([msgpack.packb(pack_row(one)) for one in rows], row, unread, "msgpack"),
        "step": Target(steps, lambda data: unpack_step(values(data)), unread, "msgpack"),
    }
    numbers = torch.linspace(-3.0, 3.0, VALUES)
    for name, codec in CODECS.items():
        read, seed = functools.partial(contribution, codec), bytes(codec.encode(numbers))
        found[f"contribution {name}"] = Target([seed], read, (DipacoError,))
    return found


def _of_messages(run: RunFolder) -> dict[str, Target]:
    """Requests of every kind, and every answer."""
    held = records.HeldState.of(Head("L0.E0", SHA, 3, 9, 4, SHA, 70_000))
    row = pack_row(_row(run, 0))
    step = pack_step(Step.of([_row(run, 0)]))
    head = {"run": run.plan().run_id, "module": "L0.E0"}
    m, given = messages, {"admissions": {peer(0): b"x" * 64}}
    requests = [
        m.HelloRequest(protocol=8, software="dipaco"),
        m.CallBackRequest(addresses=(ADDRESS,)),
        m.TellRequest(**head, rows=[row], steps=[step], keep=True, **given),
        m.AskRequest(**head, locator=[b"x" * 32]),
        m.GetRequest(sha256=b"x" * 32, offset=0),
        m.PutRequest(run=head["run"], row=row, **given),
    ]
    answers = [
        m.CallBackReply(result="reached", near=True),
        m.AskReply(steps=[step], rows=[row], has_more=False, held=held, **given),
        m.GetReply(status="ok", total_bytes=9, retry_after_s=0.0),
        m.PutReply(status="stored"),
        m.HelloReply(protocol=8, software="dipaco", received_s=1.0, sent_s=2.0, run=None),
    ]
    refused = (m.MessageError,)
    seeds = [m.encode(request) for request in requests]
    found = {"request": Target(seeds, m.decode_request, refused, "msgpack")}
    for answer in answers:
        read = functools.partial(m.decode, type(answer))
        name = f"answer {type(answer).__name__}"
        found[name] = Target([m.encode(answer)], read, refused, "msgpack")
    return found


def _of_files(run: RunFolder, folder: Path) -> dict[str, Target]:
    """Blobs, states, and what only the operator can sign: that is read without its signature,
    which no mutation has."""
    plan, blobs = run.plan(), run.blobs
    grid = run.grid(plan)
    module = grid.modules()[0]
    layout, paths = layout_of(grid, module), grid.paths_of_module(module)
    state = genesis_state(module, layout, run.base_parameters(plan))
    later = replace(state, version=1, momentum=0.5 * state.parameters)
    states = [b"".join(map(bytes, state_chunks(one))) for one in (state, later)]

    def tokens(data: bytes) -> object:
        file = folder / "tokens"
        file.write_bytes(data)
        rows = open_tokens(file, plan.model.sequence_length, plan.model.vocabulary_size)
        return check_tokens(rows, plan.model.vocabulary_size, "the shard")

    def modules(data: bytes) -> object:
        """Do what everybody does first with a plan that a stranger may have signed."""
        read: Any = parse_config(RunPlan, json.loads(data), "the plan")
        return Grid(read.model, read.grid, read.rounds.level_offsets).modules()

    shards = blobs.read(plan.blobs.shards)
    genesis = canonical_json(dict.fromkeys(grid.modules(), SHA))
    unread = (DipacoError, ValueError, RecursionError)  # As their callers have it.
    return {
        "module state": Target(
            states,
            lambda data: read_state(data, layout, module=module, paths=paths),
            (DipacoError,),
            "safetensors",
        ),
        "router": Target(
            [blobs.read(plan.blobs.router)], load_router, (DipacoError,), "safetensors"
        ),
        "tokenizer": Target(
            [blobs.read(plan.blobs.tokenizer)],
            lambda data: read_tokenizer(data).encode("a few words, 12 and ü"),
            (DipacoError,),
        ),
        "token file": Target(
            [blobs.read(run.shard_index(plan).paths[0].train_sha256)], tokens, (DipacoError,)
        ),
        "plan": Target([plan.canonical_json()], modules, unread, "json"),
        "shard index": Target(
            [shards],
            lambda data: parse_config(ShardIndex, json.loads(data), "the index"),
            unread,
            "json",
        ),
        "genesis index": Target(
            [genesis], lambda data: check_genesis_index(json.loads(data), grid), unread, "json"
        ),
    }
