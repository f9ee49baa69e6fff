"""Every parser of outside bytes, with samples of what it usually reads and how it may refuse."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from dipaco.dht import admission, manifest, record_validator, score_request
from dipaco.dht.certificate_check import decode_certificate, verify_certificate
from dipaco.dht.identity import SIGNATURE_BYTES, peer_id_of_public_key, raw_public_key
from dipaco.dht.node import check_peer_address
from dipaco.dht.record_keys import parse_record, parse_subkey
from dipaco.dht.records import RecordError
from dipaco.modules.codecs import CODECS
from dipaco.modules.config import parse_config
from dipaco.modules.errors import DipacoError
from dipaco.modules.files import canonical_json
from dipaco.modules.grid import Grid
from dipaco.modules.grow import check_genesis_index
from dipaco.modules.plan import RunPlan, ShardIndex
from dipaco.modules.state import genesis_state, read_state, state_chunks
from dipaco.peer.averaging import call_codec
from dipaco.peer.averaging.codec import PartCodec
from dipaco.peer.averaging.group import GatherRow
from dipaco.peer.exchange import messages
from dipaco.peer.member.recording import read_recording
from dipaco.routing.routers import load_router
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.token_files import check_tokens, open_tokens
from dipaco.routing.tokenizer import Tokenizer
from google.protobuf.message import DecodeError
from hivemind.dht.validation import DHTRecord
from hivemind.proto import runtime_pb2
from hivemind.utils import MSGPackSerializer

from .mutations import GREATEST_BYTES, Spelling

PART_VALUES = 5000
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
    return [file.read_bytes()[:GREATEST_BYTES] for file in files]


def targets_of(folder: Path) -> list[Target]:
    """Return all targets. `folder` holds `run` and `samples` of `fuzz.py --record`."""
    run = RunFolder(folder / "run")
    samples = folder / "samples"
    targets = [*_of_the_dht(run, samples), *_of_averaging(samples), *_of_messages(samples)]
    targets += [*_of_content(run, folder), *_of_plans(run)]
    empty = [target.name for target in targets if not target.samples]
    if empty:
        raise SystemExit(f"no samples for {', '.join(empty)}; record again with --record")
    return targets


def _of_the_dht(run: RunFolder, samples: Path) -> list[Target]:
    plan = run.plan()
    grid = run.grid(plan)
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

    def certificate(data: bytes) -> object:
        return verify_certificate(decode_certificate(data, plan.run_id), plan.run_id, grid)

    request = score_request.ScoreRequest(
        run_id=plan.run_id, documents_sha256="0f" * 32, documents=500, made_s=1.5e9
    )
    signed = score_request.sign_score_request(
        request, manifest.load_or_create_operator_key(run.path / "operator.pem")
    )
    operator = manifest.load_or_create_operator_key(run.path / "operator.pem")
    gate = admission.Gate(plan.run_id, raw_public_key(operator))
    invitation = admission.make_invitation(admission.Terms(plan.run_id, 3, 0), operator)
    guest = raw_public_key(operator)
    admitted = invitation.admit(guest, 1.5e9)
    revoked = admission.sign_revocations(plan.run_id, 1, [invitation.id], operator)
    # What does not unpack to these fields never reaches the validator.
    unread = (ValueError, TypeError, msgpack.UnpackException)
    return [
        Target("record", stored, validate, unread, "msgpack"),
        Target("record content", contents, content, (RecordError, *unread), "msgpack"),
        Target("certificate", recorded(samples, "certificate"), certificate, (RecordError,),
               "msgpack"),
        Target("manifest", recorded(samples, "manifest"), manifest.verify_manifest,
               (DipacoError,), "json"),
        Target("score request", [signed], score_request.verify_score_request, (DipacoError,),
               "json"),
        Target("invitation", [invitation.to_text().encode()],
               lambda data: admission.read_invitation(data.decode("utf-8", "replace")),
               (DipacoError,)),
        Target("admission", [admitted],
               lambda data: gate.check(peer_id_of_public_key(guest), data), (RecordError,)),
        Target("revocations", [revoked], admission.read_revocations, (RecordError,), "json"),
        Target("peer address", [_ADDRESS],
               lambda data: check_peer_address(data.decode("utf-8", "replace")), (DipacoError,)),
    ]  # fmt: skip


def _of_averaging(samples: Path) -> list[Target]:
    values = torch.linspace(-3.0, 3.0, PART_VALUES)

    def stream(data: bytes) -> object:
        async def read() -> bytes:
            reader = asyncio.StreamReader()
            reader.feed_data(data)
            reader.feed_eof()
            return await call_codec.read_frame(reader)

        return call_codec.decode(asyncio.run(read()))

    meeting = recorded(samples, "meeting")
    found = [
        Target("meeting message", meeting, call_codec.decode, (ValueError,), "msgpack"),
        Target("meeting frame", [call_codec.frame(m) for m in meeting[:20]], stream,
               (ValueError, EOFError)),
        Target("meeting name", [b"L0.E0/3/0/" + b"0f" * 32], call_codec.read_key, (ValueError,)),
        Target("row of a group", recorded(samples, "row"), GatherRow.from_bytes, (ValueError,),
               "msgpack"),
    ]  # fmt: skip
    for name, codec in CODECS.items():
        part_codec = PartCodec(codec)
        sample = part_codec.encode(values).SerializeToString()
        read = functools.partial(_read_part, part_codec)
        found.append(Target(f"part, {name}", [sample], read, (ValueError, DecodeError)))
    return found


def _read_part(codec: PartCodec, data: bytes) -> object:
    return codec.decode(runtime_pb2.Tensor.FromString(data), PART_VALUES)


def _of_messages(samples: Path) -> list[Target]:
    """Every message of the exchange; those that the swarm did not send are made here."""
    state = {"module": "L0.E0", "version": 3, "tokens": 4096, "digest": "0f" * 32, "round": 4,
             "bytes": 70_000}  # fmt: skip
    made: dict[str, list[Any]] = {
        "CallBackRequest": [{"addresses": ["/ip4/127.0.0.1/tcp/31337"]}],
        "CallBackReply": [{"result": "reached", "near": True}],
        "OfferRequest": [{"run": "0f" * 8, "held": state}],
        "OfferReply": [{"accepted": True}],
        "HoldingsRequest": [{"run": "0f" * 8, "module": "L0.E0"}],
        "HoldingsReply": [{"held": None}, {"held": state}],
        "CertificatesRequest": [{"run": "0f" * 8, "module": "L0.E0", "digest": "0f" * 32,
                                 "count": 4}],
        "CertificatesReply": [{"certificates": [b"x" * 90]}],
        "FetchRequest": [{"sha256": "0f" * 32, "offset": 0}],
        "FetchReply": [{"status": "ok", "total_bytes": 9, "retry_after_s": 0.0}],
        "HelloRequest": [{"protocol": 1, "software": "dipaco"}],
        "HelloReply": [{"protocol": 1, "software": "dipaco", "received_s": 1.0, "sent_s": 2.0,
                        "run": None}],
    }  # fmt: skip
    found = []
    for kind in messages.Message.__subclasses__():
        if kind.__module__ != messages.__name__ or kind is messages.HeldContent:  # a part of others
            continue
        name = kind.__name__
        own = [msgpack.packb(sample, use_bin_type=True) for sample in made.get(name, [])]
        read = functools.partial(messages.decode, kind)
        found.append(
            Target(
                f"message {name}",
                [*recorded(samples, f"message-{name}"), *own],
                read,
                (messages.MessageError,),
                "msgpack",
            )
        )
    return found


def _of_content(run: RunFolder, folder: Path) -> list[Target]:
    plan = run.plan()
    grid = run.grid(plan)
    module = grid.modules()[0]
    layout = grid.layout(module)
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

    def recording(data: bytes) -> object:
        file = scratch / "recording"
        file.write_bytes(data)
        return list(read_recording(file)[1])

    blobs = run.blobs
    lines = [sample.split(b"\n")[:40] for sample in recorded(folder, "recordings")]
    return [
        Target("module state", states,
               lambda data: read_state(data, layout, module=module,
                                       paths=grid.paths_of_module(module)),
               (DipacoError,), "safetensors"),
        Target("router", [blobs.read(plan.blobs.router)], load_router, (DipacoError,),
               "safetensors"),
        Target("tokenizer", [blobs.read(plan.blobs.tokenizer)], tokenizer, (DipacoError,)),
        Target("token file", [blobs.read(shard.train_sha256)], tokens, (DipacoError,)),
        Target("recording", [b"\n".join(some) + b"\n" for some in lines], recording,
               (DipacoError,)),
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
