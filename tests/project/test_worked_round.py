"""The worked round of docs/design.md has the names and sizes that the code gives."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.contributions import CODECS
from dipaco.modules.layout import layout_of
from dipaco.peer.exchange.streams.messages import AskReply, AskRequest, GetReply, GetRequest, TellRequest, framed
from dipaco.protocol.chain.steps import MARK_BYTES, Row, Step, genesis_name, pack_row, pack_step, sign_row
from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import peer_id_of_public_key, raw_public_key

ROOT = Path(__file__).resolve().parents[2]
RUN, MODULE, ROUND = "0123456789abcdef", "L0.E0", 7
# Ada trains path 0; Ben and Cem train path 1. All three paths go through L0.E0.
TRAINERS = {"Ada": (0, 30_720), "Ben": (1, 30_720), "Cem": (1, 21_504)}


def keys():
    """Return a fixed key for each of the three peers."""
    return {name: Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()) for name in TRAINERS}


def computed():
    """Return what the page says of the round: a word or two to its value."""
    config = load_run_config(ROOT / "examples" / "tiny" / "RUN.toml")
    values = layout_of(Grid(config.model, config.grid), MODULE).size
    codec = CODECS[config.contributions.codec]
    parent = genesis_name(RUN, MODULE)
    state = hashlib.sha256(b"state").hexdigest()
    found, rows = {"parameters": f"{values:,}", "parent": parent[:8], "state": state[:8]}, []
    for number, (name, key) in enumerate(keys().items()):
        path, tokens = TRAINERS[name]
        gradient = (torch.arange(values) % 15 - 7 + number).float() * 2.0**-12
        data = codec.encode(gradient)
        peer = peer_id_of_public_key(raw_public_key(key))
        size_bytes = MARK_BYTES + len(data)
        row = Row(MODULE, ROUND, parent, state, path, peer, tokens, "", size_bytes)
        sha256 = hashlib.sha256(row.mark + data).hexdigest()
        rows.append(sign_row(replace(row, file=sha256), key))
        found |= {f"{name}'s peer id": f"..{peer[-6:]}", f"{name}'s file": sha256[:8]}
    step = Step.of(rows)
    file_bytes = rows[0].bytes

    def size(message):
        return f"{len(framed(message)):,}"

    tell = TellRequest(run=RUN, module=MODULE, rows=[pack_row(rows[0])], steps=[], keep=False, admissions={})
    get = GetRequest(sha256=bytes.fromhex(rows[1].file), offset=0)
    got = GetReply(status="ok", total_bytes=file_bytes)
    proposal = tell.model_copy(update={"rows": [], "steps": [pack_step(step)]})
    ask = AskRequest(run=RUN, module=MODULE, locator=[bytes.fromhex(parent)])
    answer = AskReply(steps=[pack_step(step)], rows=[], has_more=False, held=None, admissions={})
    order = sorted(
        TRAINERS,
        key=lambda name: hashlib.sha256(
            f"{MODULE}/{ROUND}/{peer_id_of_public_key(raw_public_key(keys()[name]))}".encode()
        ).digest(),
    )
    return found | {
        "mailboxes in order": ", ".join(order),
        "step": step.name[:8],
        "file bytes": f"{file_bytes:,}",
        "tell (row)": size(tell),
        "get": size(get),
        "reply to get": f"{len(framed(got)):,} + {file_bytes:,}",
        "tell (step)": size(proposal),
        "ask": size(ask),
        "reply to ask": size(answer),
    }


def test_the_worked_round():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- worked round -->\n```\n(.*?)```", page, re.S)
    assert block
    written = dict(re.split(r" {2,}", line, maxsplit=1) for line in block[1].splitlines())
    assert written == computed()
