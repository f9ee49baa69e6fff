"""All-reduces in memory: the real runners, codecs and partition, but no p2pd and no processes.

`MemoryNetwork` connects runners the way Hivemind's streams do: bounded queues of serialised
messages, a handler task for each stream that is cancelled when its caller goes, and an ordinary
end of the stream when the other side goes. Peers can be killed and messages changed on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from dipaco.modules.codecs import CODECS, MeanName
from dipaco.modules.outer import (
    SECTION_ROWS,
    UNKNOWN,
    AveragingRule,
    Contribution,
    Usual,
    canonical_table,
)
from dipaco.peer.averaging.allreduce import ExactAllReduceRunner
from dipaco.peer.averaging.codec import PartCodec
from dipaco.peer.averaging.commitment import merkle_root, nodes_of
from dipaco.peer.averaging.group import AgreedGroup, reduce_shares
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.averaging.verdicts import Signing
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

PART_BYTES = 4096
RPCS = {
    "part": "rpc_aggregate_part",
    "sum": "rpc_add_sums",
    "ask": "rpc_show_pieces",
    "verdict": "rpc_compare",
}
_END = None

Message = averaging_pb2.AveragingData
Tamper = Callable[["Transit", Message], Awaitable[Message]]


@dataclass(frozen=True)
class Transit:
    """Where a message is: which way, between whom, and its place in the stream."""

    kind: str
    """"part" to a reducer, "average" back from it; "sum" to a root, "total" back from it; "ask" a
    reducer, "shown" by it; "verdict" to another member, "answer" back from it."""
    source: PeerID
    target: PeerID
    index: int


def make_peer_id(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + hashlib.sha256(str(number).encode()).digest())


def signature_of(peer: str, message: bytes) -> bytes:
    """As good as a signature where nobody forges one."""
    return hashlib.sha512(peer.encode() + message).digest()


def signing_of(peer_id: PeerID) -> Signing:
    name = peer_id.to_base58()
    return Signing(
        lambda message: signature_of(name, message),
        lambda peer, message, signature: signature == signature_of(peer, message),
    )


async def untouched(transit: Transit, message: Message) -> Message:
    return message


@dataclass
class MemoryNetwork:
    tamper: Tamper = untouched
    runners: dict[PeerID, MemoryRunner] = field(default_factory=dict)
    dead: set[PeerID] = field(default_factory=set)
    _links: list[tuple[PeerID, PeerID, list[asyncio.Task[Any]], list[asyncio.Queue[Any]]]] = field(
        default_factory=list
    )

    def kill(self, peer: PeerID) -> None:
        """Let a peer vanish as with SIGKILL: all of its streams end, its tasks stop."""
        self.dead.add(peer)
        for source, target, tasks, queues in self._links:
            if peer in (source, target):
                for task in tasks:
                    task.cancel()
                for queue in queues:
                    while not queue.empty():
                        queue.get_nowait()
                    queue.put_nowait(_END)

    def kill_at(self, after: int, peer: PeerID) -> Tamper:
        """Return what kills a peer at the message of this number, of all that are under way."""
        numbers = itertools.count(1)

        async def count(transit: Transit, message: Message) -> Message:
            if next(numbers) == after:
                self.kill(peer)
            return message

        return count

    async def open(
        self, kinds: tuple[str, str], source: PeerID, target: PeerID, inputs: AsyncIterator[Message]
    ) -> AsyncIterator[Message]:
        there, back = kinds
        if target in self.dead or target not in self.runners:
            raise ConnectionError("failed to dial")
        requests: asyncio.Queue[bytes | None] = asyncio.Queue(5)
        answers: asyncio.Queue[bytes | None] = asyncio.Queue(5)
        context = P2PContext(handle_name="test", local_id=target, remote_id=source)

        async def write() -> None:
            async for message in self._in_transit(there, source, target, inputs):
                await requests.put(message)
            await requests.put(_END)

        all_read, broken = asyncio.Event(), asyncio.Event()

        async def read_requests() -> AsyncIterator[Message]:
            async for message in _read(requests):
                yield message
            all_read.set()

        async def handle() -> None:
            runner = self.runners[target]
            name = RPCS[there]
            served = runner if hasattr(runner, name) else runner.step_check
            handler = getattr(served, name)(read_requests(), context)
            async for message in self._in_transit(back, target, source, handler):
                await answers.put(message)
            # As p2pd may: when who is called closes a stream, what is under way is lost. As with
            # real sockets, who still writes to it hears that it is broken.
            while not answers.empty():
                answers.get_nowait()
            if not all_read.is_set():
                broken.set()
            await answers.put(_END)

        tasks = [asyncio.create_task(write()), asyncio.create_task(handle())]
        self._links.append((source, target, tasks, [requests, answers]))

        async def read_answers() -> AsyncIterator[Message]:
            try:
                async for message in _read(answers):
                    yield message
                if broken.is_set():
                    raise BrokenPipeError("broken pipe")
            finally:
                for task in tasks:
                    task.cancel()

        return read_answers()

    async def _in_transit(
        self, kind: str, source: PeerID, target: PeerID, messages: AsyncIterator[Message]
    ) -> AsyncIterator[bytes]:
        index = 0
        async for message in messages:
            changed = await self.tamper(Transit(kind, source, target, index), message)
            yield changed.SerializeToString()
            index += 1


async def _read(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[Message]:
    while (message := await queue.get()) is not _END:
        yield Message.FromString(message)


@dataclass
class _MemoryP2P:
    peer_id: PeerID


@dataclass
class _MemoryStub:
    network: MemoryNetwork
    source: PeerID
    target: PeerID

    async def rpc_aggregate_part(self, inputs: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return await self.network.open(("part", "average"), self.source, self.target, inputs)

    async def rpc_add_sums(self, inputs: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return await self.network.open(("sum", "total"), self.source, self.target, inputs)

    async def rpc_show_pieces(self, inputs: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return await self.network.open(("ask", "shown"), self.source, self.target, inputs)

    async def rpc_compare(self, inputs: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return await self.network.open(("verdict", "answer"), self.source, self.target, inputs)


class MemoryRunner(ExactAllReduceRunner):
    def __init__(self, network: MemoryNetwork, peer_id: PeerID, **kwargs: Any) -> None:
        super().__init__(p2p=_MemoryP2P(peer_id), servicer_type=ServicerBase, prefix=None, **kwargs)
        self.network, self.flat = network, kwargs["flat"]
        self.culprits: tuple[str, ...] = ()
        network.runners[peer_id] = self

    def _get_peer_stub(self, peer: PeerID) -> _MemoryStub:
        return _MemoryStub(self.network, self.peer_id, peer)


@dataclass
class Group:
    """Peers of one all-reduce and what they bring, in the leader's (shuffled) order."""

    flats: list[torch.Tensor]
    paths: Sequence[int]
    tokens: Sequence[int]
    bandwidths: Sequence[int]
    codec: str = "float16"
    shard_sequences: Mapping[int, int] | None = None
    section_rows: int = SECTION_ROWS
    silence_s: float = 30.0
    check_limit_s: float = 120.0
    timeout_s: float = 120.0
    part_bytes: int = PART_BYTES
    absent: frozenset[int] = frozenset()
    usual: Usual = UNKNOWN
    mean: MeanName = "weighted_mean"
    check_pieces: int = 0
    spoil: Callable[[MemoryRunner], None] = lambda runner: None
    """Does something to each member before it begins."""

    @classmethod
    def random(cls, size: int, elements: int, seed: int = 0, **kwargs: Any) -> Group:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            flats=[torch.randn(elements, generator=generator) * 1e-3 for _ in range(size)],
            paths=kwargs.pop("paths", [(index * 2) % 3 for index in range(size)]),
            tokens=[1000 + 37 * ((index * 5) % 7) for index in range(size)],
            bandwidths=kwargs.pop("bandwidths", [100] * size),
            **kwargs,
        )

    @property
    def peer_ids(self) -> list[PeerID]:
        return [make_peer_id(index) for index in range(len(self.flats))]

    @property
    def agreed(self) -> AgreedGroup:
        names = tuple(peer_id.to_base58() for peer_id in self.peer_ids)
        table = canonical_table(
            Contribution(path, name, tokens)
            for path, name, tokens in zip(self.paths, names, self.tokens, strict=True)
        )
        shares = reduce_shares(self.bandwidths)
        commitments = tuple(map(merkle_root, self.nodes)) if self.check_pieces else ()
        return AgreedGroup(b"group", names, table, shares, self.usual, commitments)

    @cached_property
    def nodes(self) -> list[tuple[bytes, ...]]:
        """What each member commits to, when it is first asked."""
        codec = PartCodec(self.rule.codec)
        return [nodes_of(codec, self.rule, flat) for flat in self.flats]

    @property
    def rule(self) -> AveragingRule:
        return AveragingRule(
            CODECS[self.codec],
            self.shard_sequences,
            self.section_rows,
            self.part_bytes,
            mean=self.mean,
            check_pieces=self.check_pieces,
        )

    def expected(self) -> torch.Tensor:
        """What one process computes alone."""
        group = self.agreed
        ordered = [self.flats[group.peers.index(row.peer)] for row in group.table]
        return self.rule.average(ordered, group.table, self.usual)

    async def run(
        self, tamper: Tamper = untouched, network: MemoryNetwork | None = None
    ) -> list[torch.Tensor | BaseException | None]:
        """Run all members; a member's result, its exception, or None if it is absent."""
        network = network or MemoryNetwork()
        network.tamper = tamper
        codec = PartCodec(self.rule.codec)
        agreed, nodes = self.agreed, self.nodes if self.check_pieces else [()] * len(self.flats)
        runners = [
            None
            if index in self.absent
            else MemoryRunner(
                network,
                peer_id,
                group=agreed,
                rule=self.rule,
                flat=flat.clone(),
                codec=codec,
                silence_s=self.silence_s,
                nodes=nodes[index],
                signing=signing_of(peer_id),
            )
            for index, (peer_id, flat) in enumerate(zip(self.peer_ids, self.flats, strict=True))
        ]

        async def run_one(runner: MemoryRunner | None) -> torch.Tensor | None:
            if runner is None:
                return None
            self.spoil(runner)
            try:
                await runner.run()
                runner.culprits = await runner.check(self.check_limit_s)
            finally:
                runner.end_check()
            return runner.flat

        waits = [asyncio.wait_for(run_one(runner), self.timeout_s) for runner in runners]
        results = await asyncio.gather(*waits, return_exceptions=True)
        await _settle()
        return list(results)


async def _settle() -> None:
    """Let handlers end that only have to notice that their caller is gone."""
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def failures(results: Sequence[object]) -> list[AveragingFailed]:
    return [result for result in results if isinstance(result, AveragingFailed)]
