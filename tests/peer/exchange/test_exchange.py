"""Tell, ask, get, put and gather between peers over streams in memory, also of hostile ones."""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import threading
import time

import pytest

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import IntegrityError, NetworkError, StorageError
from dipaco.base.token_bucket import Rate, Rates
from dipaco.peer.exchange import exchange, responder
from dipaco.peer.exchange.files import transfer
from dipaco.peer.exchange.files.transfer import ContentAbsent
from dipaco.peer.exchange.streams.calls import PROTOCOL_NAME
from dipaco.peer.exchange.streams.messages import (
    AskReply,
    AskRequest,
    GetRequest,
    HelloReply,
    HelloRequest,
    PutReply,
    PutRequest,
    decode,
    framed,
    read_frame,
)
from dipaco.peer.owner.uplink import Uplink
from dipaco.protocol.allowances import Bounds, Standing
from dipaco.protocol.chain.steps import Head, Step, pack_row
from dipaco.protocol.member.events import Told
from dipaco.protocol.revocations import sign_revocations
from support.waiting import wait_until
from support.wire.exchanges import (
    GENESIS,
    INVITATION,
    LIMIT_S,
    MODULE,
    OPERATOR,
    Peers,
    admission,
    chain_of,
    file_of,
    meet,
    row_of,
    rows_in,
)
from support.wire.peers import RUN, peer

CONTENT = bytes(range(251)) * 20_000
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def peers(tmp_path):
    made = Peers(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def blobs(tmp_path):
    store = BlobStore(tmp_path / "blobs")
    store.tidy()
    return store


def get(node, blobs, *holders, sha=SHA, **options):
    options = {"max_bytes": 2**30, "timeout_s": LIMIT_S, **options}
    return node.exchange.get(sha, [holder.peer for holder in holders], blobs, **options).read_bytes()


# -- tell and ask


def test_what_is_told_is_checked_kept_and_handed_on(peers):
    one, other = peers(), peers()
    good, step = row_of(0), chain_of(1)[0]
    forged = dataclasses.replace(row_of(0, 1), tokens=7)
    elsewhere = row_of(0, module="L0.E0", path=0)
    later = Step.of([dataclasses.replace(row_of(0, 3, step.name), signature=bytes(64))])
    one.exchange.tell([other.peer], MODULE, [forged, elsewhere, good], [later], keep=True)
    wait_until(lambda: other.told)
    # A copy is not to be kept of what is not believed.
    assert other.told == [Told(one.peer, MODULE, (good,), (), False)]
    assert rows_in(other.chains, MODULE) == (good,)
    one.exchange.tell([other.peer], MODULE, [], [step], keep=True)
    wait_until(lambda: len(other.told) == 2)
    assert other.told[-1] == Told(one.peer, MODULE, (), (step,), True)


def test_who_contributed_lately_is_told_before_hundreds_that_are_silent(peers, monkeypatch):
    monkeypatch.setattr(exchange, "_TELL_TIMEOUT_S", 3600.0)
    one, other = peers(), peers()
    meet(one, other)
    reached = one.exchange._transport.open_stream

    async def open_stream(name, protocol):
        return await (asyncio.sleep(3600) if name != other.peer else reached(name, protocol))

    one.exchange._transport.open_stream = open_stream
    one.run.contributors.contributed(other.peer, MODULE, 0)
    silent = [peer(number) for number in range(100, 200)]
    one.exchange.tell([*silent, other.peer], MODULE, [row_of(0)])
    wait_until(lambda: other.told, 20.0)


def test_strangers_and_the_revoked_tell_nothing(peers):
    one, stranger, other = peers(), peers(is_in=False), peers()
    step = chain_of(1)[0]
    stranger.exchange.tell([other.peer], MODULE, [row_of(1)], [], keep=True)
    # Not even what somebody else has signed.
    stranger.chains.note_admissions({one.peer: admission(0)})
    stranger.exchange.tell([other.peer], MODULE, [row_of(0)], [step], keep=True)
    one.exchange.tell([other.peer], MODULE, [row_of(0)])
    wait_until(lambda: other.told)
    assert [(told.peer, told.steps) for told in other.told] == [(one.peer, ())]
    other.gate.revoke(sign_revocations(RUN, 1, {INVITATION.id: 0}, OPERATOR))
    one.exchange.tell([other.peer], MODULE, [row_of(0, 1)])
    assert one.exchange.ask(other.peer, MODULE, [GENESIS]) is not None
    assert len(other.told) == 1


def test_the_revoked_are_asked_for_nothing(peers):
    """Their rows stand in the last steps: whoever answered would be waited for as a trainer."""
    one, other = peers(), peers()
    meet(one, other)
    assert other.exchange.ask(one.peer, MODULE, [GENESIS]) is not None
    other.gate.revoke(sign_revocations(RUN, 1, {INVITATION.id: 0}, OPERATOR))
    assert other.exchange.ask(one.peer, MODULE, [GENESIS]) is None


def test_a_reader_that_knows_nobody_asks_for_a_whole_chain_and_can_check_it(peers):
    keeper, reader = peers(), peers(is_in=False)
    members = range(3, 9)
    steps = chain_of(150, members)
    keeper.chains.note_admissions({peer(n): admission(n) for n in members})
    head = Head(MODULE, steps[-1].name, 150, 900, 149, "e" * 64, 5)
    keeper.chains.serve(MODULE, head.step, steps, head)
    row = row_of(4, 150, head.step)
    keeper.chains.note_rows([row])
    pages, found = 0, []
    while True:
        last = [found[-1].name] if found else [GENESIS]
        answer = reader.exchange.ask(keeper.peer, MODULE, last)
        found += answer.steps
        pages += 1
        if not answer.has_more:
            break
        assert pages < 10
    assert (answer.held, answer.rows) == (head, (row,))
    assert found == steps
    assert pages > 1
    again = reader.exchange.ask(keeper.peer, MODULE, [head.step])
    assert again.steps == ()


def test_of_another_run_or_module_nothing_is_known_and_silence_is_none(peers):
    one, other = peers(), peers()
    assert one.exchange.ask(other.peer, "L0.E7", [GENESIS]) is not None
    other.exchange.serve_run(dataclasses.replace(other.run, run_id="f" * 16))
    answer = one.exchange.ask(other.peer, MODULE, [GENESIS])
    assert (answer.steps, answer.rows, answer.held) == ((), (), None)
    assert one.exchange.ask(peer(77), MODULE, [GENESIS], timeout_s=1.0) is None


def test_a_hello_brings_an_admission(peers):
    one, other = peers(), peers()
    assert one.exchange.hello(other.peer).run == RUN
    assert other.run.check.is_in(one.peer)
    assert not one.run.check.is_in(other.peer)


# -- get


def test_content_arrives_whole_and_resumes(peers, blobs):
    holder, one = peers(CONTENT, b""), peers()
    blobs.partial_path(SHA).write_bytes(CONTENT[:1_000_001])
    assert get(one, blobs, holder) == CONTENT
    sent = len(CONTENT) - 1_000_001
    assert sent < one.exchange.uplink.received_bytes < sent + 1000
    assert holder.exchange.uplink.sent_bytes == one.exchange.uplink.received_bytes
    assert get(one, blobs, holder, sha=hashlib.sha256(b"").hexdigest()) == b""


def test_what_is_wrong_absent_or_too_large_is_refused(peers, blobs):
    holder, one = peers(CONTENT), peers()
    with pytest.raises(IntegrityError, match="at most 1000"):
        get(one, blobs, holder, max_bytes=1000)
    with pytest.raises(NetworkError, match="does not hold it"):
        get(one, blobs, holder, sha="0" * 64)
    holder.held.contents[SHA] = CONTENT[:-1] + b"?"
    with pytest.raises(IntegrityError, match="hash"):
        get(peers(), blobs, holder)
    assert not blobs.has(SHA)
    with pytest.raises(NetworkError):
        one.exchange.get(SHA, [peer(77)], blobs, max_bytes=2**30, timeout_s=5.0)


def test_mirrors_are_asked_after_peers_or_before(peers, blobs, tmp_path, monkeypatch):
    asked = []

    class EmptyMirror:
        name = "mirror"

        def __init__(self, address):
            self._address = address

        async def open(self, sha256, offset):
            asked.append(self._address)
            raise ContentAbsent

    monkeypatch.setattr(exchange, "MirrorSource", EmptyMirror)
    holder, one = peers(CONTENT), peers()
    assert get(one, blobs, holder, mirrors=["https://a"]) == CONTENT
    assert asked == []
    other = BlobStore(tmp_path / "other")
    assert get(one, other, holder, mirrors=["https://a"], mirrors_first=True) == CONTENT
    assert asked == ["https://a"]


def test_the_owners_limit_holds_for_all_that_is_sent(peers, blobs):
    holder, one = peers(CONTENT, uplink=Uplink(20.0)), peers()
    began_s = time.monotonic()
    assert get(one, blobs, holder) == CONTENT
    # A piece of a quarter of a second goes at once.
    assert time.monotonic() - began_s > 0.9 * (len(CONTENT) * 8 / 20e6 - 0.25)


# -- put and gather


class Done:
    """What became of files."""

    def __init__(self):
        self.calls = []

    def __call__(self, *call):
        self.calls.append(call)


def gather(node, *rows, check=lambda row, path: None, **options):
    done = Done()
    options = {"others": (), "timeout_s": LIMIT_S, **options}
    node.exchange.gather(rows, options.pop("others"), check=check, on_done=done, **options)
    return done


def test_a_file_that_is_put_is_served_to_who_gathers(peers):
    owner, mailbox, other = peers(), peers(), peers()
    row = row_of(0, data=CONTENT)
    peers.network.kill(owner.peer)  # nobody can call it
    waiting = gather(mailbox, row)
    assert owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT))
    wait_until(lambda: waiting.calls == [(row, "", False)])
    # A peer that is given a file need not be told of its row.
    assert mailbox.told == [Told(owner.peer, row.module, (row,))]
    assert owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT))  # it has it already
    done = gather(other, row, others=(mailbox.peer,))
    wait_until(lambda: done.calls == [(row, "", False)])
    path = other.files.find(row.file)
    assert path.read_bytes() == file_of(row, CONTENT)


def test_a_row_is_known_although_the_put_of_its_file_breaks_off(peers):
    """The mailbox asks another for the file then, and does not step without its owner."""
    owner, mailbox, other = peers(uplink=Uplink(20.0)), peers(), peers()
    row = row_of(0, data=CONTENT)

    def break_off():
        wait_until(lambda: owner.exchange.uplink.sent_bytes > 2**17)
        peers.network.kill(owner.peer)

    breaking = threading.Thread(target=break_off)
    breaking.start()
    assert not owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT))
    breaking.join()
    wait_until(lambda: mailbox.told == [Told(owner.peer, row.module, (row,))])
    other.files.add(row, (row.mark, CONTENT))
    done = gather(mailbox, row, others=(other.peer,))
    wait_until(lambda: done.calls == [(row, "", False)])


def put_request(node, row):
    """Return a request to store a file, as the node that opens a stream for it makes it."""
    admissions = {node.peer: admission(node.number)}
    return PutRequest(run=RUN, row=pack_row(row), admissions=admissions, admission=admissions[node.peer])


def test_a_put_for_a_module_that_the_run_lacks_is_refused(peers):
    mailbox, other = peers(), peers()
    row = row_of(1, module="L9.E9", data=CONTENT)
    request = put_request(other, row)

    async def put():
        stream = await other.exchange._transport.open_stream(mailbox.peer, PROTOCOL_NAME)
        await stream.write(framed(request), LIMIT_S)
        return decode(PutReply, await read_frame(stream, PutReply.max_bytes))

    assert other.exchange._thread.call(put(), LIMIT_S).status == "refused"


def test_a_mailbox_whose_disk_is_full_keeps_nobody_waiting(peers, monkeypatch):
    owner, mailbox = peers(), peers()
    row = row_of(0, data=CONTENT)

    def fail(*_, **__):
        raise StorageError("disk full")

    monkeypatch.setattr(mailbox.files, "install", fail)
    began_s = time.monotonic()
    assert not owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT), timeout_s=LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_put_of_the_same_file_for_another_row_keeps_nobody_s_out(peers):
    """A peer that is told of a row knows its file's name before all mailboxes have the file."""
    owner, mailbox, insider = peers(), peers(), peers()
    row = row_of(0, data=CONTENT)
    claimed = row_of(2, data=CONTENT, file=row.file)

    async def begin_to_put():
        stream = await insider.exchange._transport.open_stream(mailbox.peer, PROTOCOL_NAME)
        await stream.write(framed(put_request(insider, claimed)), LIMIT_S)
        reply = decode(PutReply, await read_frame(stream, PutReply.max_bytes))
        assert reply.status == "send"

    insider.exchange._thread.call(begin_to_put(), LIMIT_S)
    assert owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT))
    assert mailbox.files.find(row.file) is not None


def test_a_put_is_refused_unless_it_is_the_file_of_an_admitted_peers_own_row(peers, tmp_path):
    owner, mailbox, stranger = peers(), peers(), peers(is_in=False)
    row = row_of(0, data=CONTENT)
    assert not owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT[:-1] + b"?"))
    assert not owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT[:-1]), timeout_s=3.0)
    assert not owner.exchange.put(mailbox.peer, dataclasses.replace(row, tokens=5), file_of(row, CONTENT))
    strange = row_of(2, data=CONTENT)
    assert not stranger.exchange.put(mailbox.peer, strange, file_of(strange, CONTENT))
    stranger.chains.note_admissions({owner.peer: admission(0)})
    assert not stranger.exchange.put(mailbox.peer, row, file_of(row, CONTENT))
    # The row is good, and another may have the file.
    wait_until(lambda: mailbox.told == [Told(owner.peer, row.module, (row,))] * 2)
    # More than one peer may have here.
    large = bytes(2**23 + 1)
    huge = row_of(0, 1, data=large)
    assert not owner.exchange.put(mailbox.peer, huge, file_of(huge, large))
    assert mailbox.told[2:] == [Told(owner.peer, huge.module, (huge,))]
    assert mailbox.files.find(row.file) is None
    wait_until(lambda: not list(mailbox.files.kept.folder.glob(".put-*")))
    assert owner.exchange.put(mailbox.peer, row, file_of(row, CONTENT))


def test_a_file_that_is_no_contribution_is_refused_and_not_kept(peers):
    owner, one = peers(), peers()
    row = row_of(0, data=CONTENT)
    owner.files.add(row, (row.mark, CONTENT))

    def refuse(row, path):
        raise IntegrityError("it is not finite")

    done = gather(one, row, check=refuse)
    wait_until(lambda: done.calls == [(row, "it is not finite", True)])
    assert one.files.find(row.file) is None
    longer = dataclasses.replace(row, bytes=row.bytes + 1)
    said, good = gather(one, longer), gather(one, row)
    wait_until(lambda: said.calls and good.calls)
    # A row that names another's file, with one byte more, takes nothing from that.
    assert (said.calls[0][2], good.calls[0][1:]) == (True, ("", False))
    missing = gather(one, row_of(0, 2, data=b"nowhere"), timeout_s=1.0)
    wait_until(lambda: missing.calls)
    assert not missing.calls[0][2]


def test_a_row_that_says_less_of_another_s_file_brings_no_blame_on_its_owner(peers):
    """Attack: an insider's row names an honest peer's file with a byte less. A peer that asked the
    owner for it found too many bytes, and did not ask the owner for its own row in ten minutes."""
    owner, one = peers(), peers()
    row = row_of(0, data=CONTENT)
    owner.files.add(row, (row.mark, CONTENT))
    shorter = row_of(1, file=row.file, bytes=row.bytes - 1)
    said = gather(one, shorter, others=(owner.peer,), timeout_s=1.0)
    wait_until(lambda: said.calls)
    assert said.calls[0][1] != ""
    done = gather(one, row)
    wait_until(lambda: done.calls == [(row, "", False)])


# -- hostile ones


def test_what_came_of_files_that_nobody_sends_whole_does_not_pile_up(peers):
    """A peer that sends a part of each of its files, round after round, does not fill a disk."""
    one = peers()
    incoming = one.files.kept
    for number in range(100):
        incoming.partial_path(f"{number:064x}").write_bytes(b"a part")
    done = gather(one, row_of(0, 2, data=b"nowhere"), timeout_s=1.0)
    wait_until(lambda: done.calls)
    assert len(incoming.partial_paths()) < 30


def test_an_owner_that_is_silent_to_one_peer_does_not_keep_its_file_from_it(peers, monkeypatch):
    """The peers of a step have its files. They are named while the owner is still waited for."""
    monkeypatch.setattr(exchange, "CALL_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "OPEN_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.2)
    owner, other, one = peers(), peers(), peers()
    is_asked, ends = threading.Event(), threading.Event()

    class Silent:
        def lookup(self, sha256):
            is_asked.set()
            ends.wait(LIMIT_S)

    owner.exchange.serve_run(dataclasses.replace(owner.run, content=Silent()))
    row = row_of(0, data=CONTENT)
    other.files.add(row, (row.mark, CONTENT))
    done = gather(one, row, others=[])
    try:
        assert is_asked.wait(LIMIT_S)
        gather(one, row, others=[other.peer])
        wait_until(lambda: done.calls == [(row, "", False)])
    finally:
        ends.set()


def raw(node, to, data, limit_s=LIMIT_S):
    """Send bytes on a new stream and return all that comes back until the other side ends it."""

    async def send():
        stream = await node.exchange._transport.open_stream(to.peer, PROTOCOL_NAME)
        await stream.write(data, limit_s)
        found = b""
        try:
            while more := await asyncio.wait_for(stream.read(2**16), limit_s):
                found += more
        except ConnectionError:
            pass
        stream.close()
        return found

    return node.exchange._thread.call(send(), 2 * limit_s)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff\xff" + bytes(1000),
        (2**17 + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x01\x80",
        (2**17).to_bytes(4, "big") + b"\x91" * 2**17,
        framed(GetRequest(sha256=bytes(32), offset=0))[:4] + bytes(200),
    ],
)
def test_what_is_malformed_gets_no_answer_and_one_line(peers, caplog, body):
    one, other = peers(CONTENT), peers()
    for _ in range(3):
        assert raw(other, one, body) == b""
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([line for line in told if f"from {other.peer}: " in line]) == 1
    assert one.exchange.uplink.sent_bytes == 0
    assert other.exchange.hello(one.peer).run == RUN


def test_strangers_that_hold_streams_keep_nobody_out(peers, blobs, monkeypatch):
    monkeypatch.setattr(responder, "REQUEST_TIMEOUT_S", 3600.0)
    holder = peers(CONTENT)
    crowd = [peers(is_in=False, net=number % 9) for number in range(20)]
    member, newcomer = peers(knows=[holder]), peers(is_in=False, net=99)

    async def hold(node):
        for _ in range(8):
            stream = await node.exchange._transport.open_stream(holder.peer, PROTOCOL_NAME)
            with contextlib.suppress(OSError):  # it was not let in
                await stream.write(b"\0", LIMIT_S)

    for node in crowd:
        node.exchange._thread.call(hold(node), LIMIT_S)
    assert get(member, blobs, holder) == CONTENT
    # A peer that no record which was read names, but that holds fewer than others.
    assert newcomer.exchange.hello(holder.peer, timeout_s=LIMIT_S).run == RUN
    blobs.remove(SHA)
    assert get(newcomer, blobs, holder) == CONTENT


def test_a_reader_that_stands_still_gives_its_place(peers, blobs, monkeypatch):
    one_place = dict.fromkeys(Standing, 1)
    monkeypatch.setattr(responder, "UPLOADS", Bounds(1, one_place, {}, grace_s=0.2))
    large = CONTENT * 10
    sha = hashlib.sha256(large).hexdigest()
    holder, slow, one = peers(large), peers(), peers()
    request = framed(GetRequest(sha256=bytes.fromhex(sha), offset=0))

    async def stall():
        stream = await slow.exchange._transport.open_stream(holder.peer, PROTOCOL_NAME)
        await stream.write(request, LIMIT_S)
        await stream.read(100)

    slow.exchange._thread.call(stall(), LIMIT_S)
    assert get(one, blobs, holder, sha=sha) == large


def answer_to(node, to, request, reply):
    """Send a request once and return the bytes of its answer: none when the stream is broken off."""

    async def ask():
        stream = await node.exchange._transport.open_stream(to.peer, PROTOCOL_NAME)
        try:
            await stream.write(framed(request), LIMIT_S)
            return await read_frame(stream, reply.max_bytes)
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""
        finally:
            stream.close()

    return node.exchange._thread.call(ask(), LIMIT_S)


def test_who_asks_without_end_is_answered_so_much_and_no_more(peers, monkeypatch):
    rate = Rate(2.0**18, 2.0**10)
    monkeypatch.setattr(responder, "SENT", Rates(dict.fromkeys(Standing, rate), {}))
    monkeypatch.setattr(responder, "LONGEST_WAIT_S", 0.1)
    holder, greedy, other = peers(), peers(), peers()
    steps = chain_of(100, range(3, 9))
    holder.chains.note_admissions({peer(n): admission(n) for n in range(3, 9)})
    holder.chains.serve(MODULE, steps[-1].name, steps)
    ask = AskRequest(run=RUN, module=MODULE, locator=[bytes.fromhex(GENESIS)])
    answers = [len(answer_to(greedy, holder, ask, AskReply)) for _ in range(12)]
    assert answers[0] > 2**15
    assert answers[-1] == 0
    assert holder.exchange.uplink.sent_bytes < 2**18 + 2**17
    meet(other, holder)
    answer = other.exchange.ask(holder.peer, MODULE, [GENESIS])
    assert answer.has_more


def test_a_long_answer_costs_who_asks_for_it_more_than_a_short_one(peers, monkeypatch):
    """Attack: 100 bytes made a peer read 320 rows from its disk, 50 times a second for each address prefix."""
    monkeypatch.setattr(responder, "ASKED", limited(each=2.0**14))
    holder, long, short = peers(), peers(is_in=False, net=1), peers(is_in=False, net=2)
    steps = chain_of(100, range(3, 9))
    holder.chains.note_admissions({peer(n): admission(n) for n in range(3, 9)})
    holder.chains.serve(MODULE, steps[-1].name, steps)

    def answers(node, behind):
        ask = AskRequest(run=RUN, module=MODULE, locator=[bytes.fromhex(behind)])
        return sum(answer_to(node, holder, ask, AskReply) != b"" for _ in range(12))

    assert answers(short, steps[-1].name) == 12
    assert 1 < answers(long, GENESIS) < 6


def hellos(node, holder, count):
    """Return how many of some hellos are answered."""
    hello = HelloRequest(protocol=8, software="x", admission=node.exchange._transport.admission)
    return sum(answer_to(node, holder, hello, HelloReply) != b"" for _ in range(count))


def limited(each=1e9, together=1e9):
    """Return what strangers may use at once, and next to nothing after it; members use what they like."""
    plenty = Rate(1e9, 1e9)
    return Rates(
        {**dict.fromkeys(Standing, plenty), Standing.STRANGER: Rate(each, 0.01)},
        {Standing.STRANGER: Rate(together, 0.01)},
    )


# A hello has some 50 bytes and costs 512 besides.
THREE_HELLOS = 1750.0


def test_all_strangers_together_ask_and_are_sent_so_much(peers, monkeypatch):
    monkeypatch.setattr(responder, "ASKED", limited(together=THREE_HELLOS))
    holder, member = peers(), peers()
    meet(member, holder)
    assert [hellos(peers(is_in=False, net=n), holder, 1) for n in range(5)] == [1, 1, 1, 0, 0]
    assert hellos(member, holder, 5) == 5
    monkeypatch.setattr(responder, "ASKED", limited())
    monkeypatch.setattr(responder, "SENT", limited(together=THREE_HELLOS))
    other = peers()
    meet(member, other)
    # An answer has some hundred bytes.
    assert 9 < sum(hellos(peers(is_in=False, net=n), other, 9) for n in range(3)) < 27
    assert hellos(member, other, 5) == 5


def test_a_flood_from_one_network_keeps_nobody_out_who_comes_from_another(peers, monkeypatch):
    """Attack: 130 kB/s of a stranger without a key took what all strangers had together."""
    monkeypatch.setattr(responder, "ASKED", limited(each=THREE_HELLOS))
    holder = peers()
    # Keys cost nothing, so they count for nothing.
    assert sum(hellos(peers(is_in=False, net=1), holder, 2) for _ in range(4)) == 3
    assert hellos(peers(is_in=False, net=2), holder, 1) == 1
    # Whoever shows its admission is a member before anything is charged, also in the same network.
    assert hellos(peers(net=1), holder, 9) == 9


def test_who_is_not_admitted_is_turned_away_by_its_first_bytes(peers, monkeypatch):
    """Attack: a tell of 128 KiB was read and parsed before it was known that nobody would hear it."""
    one, stranger, other = peers(), peers(is_in=False), peers()
    read, called = [], []
    decode = responder.decode_request

    def note(data):
        read.append(len(data))
        return decode(data)

    monkeypatch.setattr(responder, "decode_request", note)
    for node in (stranger, one):
        node.run.contributors.called = lambda *call: called.append(call)
    rows = [row_of(9, number) for number in range(100)]
    stranger.exchange.tell([other.peer], MODULE, rows, keep=True)
    # It was there: whoever does not know a peer's admission yet is not taken for gone.
    wait_until(lambda: called == [(other.peer, True)])
    assert read == []
    assert not other.told
    with pytest.raises(NetworkError, match="does not know that this peer is admitted"):
        stranger.exchange.call_back(other.peer, ["/ip4/127.0.0.1/tcp/1"])
    assert not stranger.exchange.put(other.peer, row_of(1, data=CONTENT), CONTENT, timeout_s=LIMIT_S)
    one.exchange.tell([other.peer], MODULE, [row_of(0)])
    wait_until(lambda: other.told)
    assert other.exchange.uplink.received_bytes < 2**17


def test_a_stranger_that_goes_on_asking_in_vain_is_disconnected(peers, monkeypatch):
    monkeypatch.setattr(responder, "ASKED", limited(each=THREE_HELLOS))
    holder, greedy, member = peers(), peers(is_in=False), peers()
    meet(member, holder)
    disconnected = holder.exchange._transport.disconnected
    assert hellos(greedy, holder, 3 + 32) == 3
    assert disconnected == []
    assert hellos(greedy, holder, 1) == 0
    wait_until(lambda: disconnected == [greedy.peer])
    assert hellos(member, holder, 3) == 3


def test_nothing_is_sent_when_the_owner_s_budget_is_used_up(peers, blobs):
    holder, one = peers(CONTENT), peers()
    holder.exchange.uplink.serves = False
    with pytest.raises(NetworkError, match="it is busy"):
        get(one, blobs, holder, timeout_s=1.5)
    assert holder.exchange.uplink.sent_bytes < 1000
    holder.exchange.uplink.serves = True
    assert get(one, blobs, holder) == CONTENT


def test_a_file_that_is_put_too_slowly_is_broken_off_and_keeps_no_room(peers, monkeypatch):
    owner, mailbox = peers(), peers()
    row = row_of(0, data=CONTENT)
    monkeypatch.setattr(responder, "PUT_GRACE_S", 0.3)
    monkeypatch.setattr(responder, "LEAST_PUT_BYTES_S", 2.0**30)
    request = put_request(owner, row)

    async def begin_to_put():
        stream = await owner.exchange._transport.open_stream(mailbox.peer, PROTOCOL_NAME)
        await stream.write(framed(request), LIMIT_S)
        assert decode(PutReply, await read_frame(stream, PutReply.max_bytes)).status == "send"
        await stream.write(bytes(1000), LIMIT_S)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(stream.read(1), LIMIT_S)

    assert not owner.exchange._thread.call(begin_to_put(), 2 * LIMIT_S)
    assert mailbox.files.promise(row), "the room that was kept for it is free"


def test_a_file_that_is_put_has_half_a_minute_and_then_has_to_come_at_16_kib_a_second():
    assert (responder.PUT_GRACE_S, responder.LEAST_PUT_BYTES_S) == (30.0, 16_384.0)
