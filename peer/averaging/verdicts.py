"""After an all-reduce, before anybody commits: its members check the reducers, and tell each other.

Every member asks reducers for the contributions to pieces that it draws, and makes their averages
again (`checking`). Then it says its *verdict* to all whom it can exchange messages with: what each
reducer gave it, as a digest with the reducer's signature, and perhaps an *accusation*: where an
average is wrong, or was not shown. Nobody believes an accusation: who hears one asks the reducer
for the same piece, and fails only if it finds the same. Two signed digests prove that a reducer
gave different averages to different members. Those that cannot exchange messages hear from the
others of accusations.

Whoever is not heard in time is not waited for: all have got their averages, and a peer that goes
now must not undo the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, AsyncIterator  # noqa: UP035  Hivemind's servicers know no other.

import msgpack
import torch
from dipaco.dht.identity import is_signed, public_key_of_peer_id
from dipaco.modules.outer import AveragingRule
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData as Message
from hivemind.utils.asyncio import anext, as_aiter

from .checking import Accusation, KeptContributions, PieceChecker, Verdict, WrongAverage, draw
from .codec import PartCodec
from .group import AgreedGroup
from .parts import AveragingFailed, in_executor
from .streams import STAY_S, until_closed
from .topology import Topology

logger = logging.getLogger(__name__)

SIGNED_PREFIX = b"dipaco-averages/1\n"
# So many times the silence that is borne in a reduce a member takes to ask for pieces, and waits
# for the verdicts of others, who may have begun to ask later.
LOOK_SILENCES, VERDICT_SILENCES = 2, 3


def is_signed_by(peer: str, message: bytes, signature: bytes) -> bool:
    """Tell whether a signature is a peer's, by its id."""
    try:
        return is_signed(message, signature, public_key_of_peer_id(peer))
    except ValueError:
        return False


@dataclass(frozen=True)
class Signing:
    """How a peer signs what it averages, and reads the signatures of others."""

    sign: Callable[[bytes], bytes]
    is_signed: Callable[[str, bytes, bytes], bool] = is_signed_by
    """Gets a peer's id, what it has signed, and the signature."""


class StepCheck:
    """One member's part in the checks of one all-reduce. Lives in one event loop.

    Members are named by their places in the group. `call` opens a stream to a member by the name
    of an RPC. `reducers` and `sizes` are of each part, `order` is the canonical one.
    """

    def __init__(
        self,
        *,
        me: int,
        group: AgreedGroup,
        rule: AveragingRule,
        reducers: Sequence[int],
        sizes: Sequence[int],
        order: Sequence[int],
        kept: KeptContributions,
        checker: PieceChecker,
        silence_s: float,
        call: Callable[[int, str, AsyncIterator[Message]], Any],
        signing: Signing,
    ) -> None:
        self._me, self._group, self._rule = me, group, rule
        self._reducers, self._sizes, self._order = tuple(reducers), tuple(sizes), tuple(order)
        self.kept, self._checker = kept, checker
        self._silence_s = silence_s
        self._call, self._signing = call, signing
        self._digests: dict[int, bytes] = {}
        self._averages: dict[int, tuple[bytes, bytes]] = {}
        loop = asyncio.get_running_loop()
        self._own: asyncio.Future[Verdict] = loop.create_future()
        partners = [place for place in range(len(group.peers)) if self._exchanges_with(place)]
        self._heard = {place: loop.create_future() for place in partners}
        self._ended = {place: loop.create_future() for place in partners}
        self._settled = asyncio.Event()
        self._news = asyncio.Event()
        self._relayed: list[Accusation] = []
        self._right: set[tuple[int, int]] = set()
        self._audits: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()
        self._came: set[int] = set()
        self._failure: AveragingFailed | None = None
        # Whether a reducer has less time to show pieces than it may take.
        self._is_short = self._ran_out = False
        self._liars: set[int] = set()

    # What reducers give and sign.

    def note(self, part: int, encoded: runtime_pb2.Tensor) -> None:
        """Note an averaged part as it came."""
        self._digests[part] = hashlib.sha256(encoded.buffer).digest()

    def _digest_of(self, reducer: int) -> bytes:
        digest = hashlib.sha256()
        for part, owner in enumerate(self._reducers):
            if owner == reducer:
                digest.update(self._digests[part])
        return digest.digest()

    def _statement(self, digest: bytes) -> bytes:
        return SIGNED_PREFIX + self._group.group_id + digest

    def signature(self) -> bytes:
        """Sign what this reducer gives, when all of it is noted."""
        if self._me not in self._averages:
            digest = self._digest_of(self._me)
            self._averages[self._me] = digest, self._signing.sign(self._statement(digest))
        return self._averages[self._me][1]

    def take_signature(self, reducer: int, signature: bytes) -> None:
        """Note a reducer's signature of all that it gave. Raises ValueError if it is none."""
        digest = self._digest_of(reducer)
        if not self._signed(reducer, digest, signature):
            raise ValueError("it did not sign its averages")
        self._averages[reducer] = digest, signature

    def _signed(self, reducer: int, digest: bytes, signature: bytes) -> bool:
        peer = self._group.peers[reducer]
        return self._signing.is_signed(peer, self._statement(digest), signature)

    # The checks.

    async def run(self, limit_s: float) -> tuple[str, ...]:
        """Check, and exchange verdicts; returns the peers that accused somebody falsely.

        Raises AveragingFailed naming a reducer that lied, or nobody where slow lines left too
        little time for the checks. Ends within `limit_s`.
        """
        self._is_short = limit_s < LOOK_SILENCES * self._silence_s
        until_s = asyncio.get_running_loop().time() + limit_s
        try:
            drawn = draw(self._reducers, self._sizes, self._me, self._rule.check_pieces)
            accusation = await self._look(drawn, min(limit_s, LOOK_SILENCES * self._silence_s))
            if self._ran_out and accusation is not None and accusation.is_refusal:
                # That says nothing of the reducer.
                reason = "the time for this step ran out while its reducers were checked"
                raise AveragingFailed(reason, self._group.peers)
            self._own.set_result(Verdict(dict(self._averages), accusation))
            if accusation is not None:
                self._blame(accusation)
            await self._exchange_all(until_s)
        finally:
            self.give_up()
        for reducer in self._audits:
            self._fail(f"peer {self._name(reducer)} did not show in time what it averaged", reducer)
        if self._failure is not None:
            raise self._failure
        return tuple(self._name(liar) for liar in sorted(self._liars))

    def give_up(self) -> None:
        """There is nothing to compare: whoever waits for this member's verdict gets none."""
        self._own.cancel()
        self._settle()

    async def _exchange_all(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        tasks = [
            asyncio.create_task(self._exchange(place))
            for place in self._heard
            if self._calls(place)
        ]
        settling = asyncio.create_task(self._settle_when_heard())
        try:
            for _ in range(2):
                left_s = max(0.0, until_s - loop.time())
                patience_s = min(VERDICT_SILENCES * self._silence_s, left_s)
                await asyncio.wait(self._ended.values(), timeout=patience_s)
                if not self._audits:
                    break
        finally:
            for task in (*tasks, settling):
                task.cancel()
            await asyncio.gather(*tasks, settling, return_exceptions=True)

    async def _settle_when_heard(self) -> None:
        await asyncio.wait(self._heard.values())
        self._settle()

    def _settle(self) -> None:
        self._settled.set()
        self._news.set()

    async def _look(self, places: Iterable[tuple[int, int]], limit_s: float) -> Accusation | None:
        """Ask all reducers of some pieces for these, and check them."""
        of_reducer: dict[int, list[tuple[int, int]]] = {}
        for part, piece in places:
            of_reducer.setdefault(self._reducers[part], []).append((part, piece))
        found = await asyncio.gather(*(self._ask(*each, limit_s) for each in of_reducer.items()))
        accusations = [accusation for accusation in found if accusation is not None]
        # What others can find out by themselves comes first.
        return min(accusations, key=lambda one: one.is_refusal, default=None)

    async def _ask(
        self, reducer: int, places: Sequence[tuple[int, int]], limit_s: float
    ) -> Accusation | None:
        """Ask a reducer for pieces and check them; returns what is wrong."""
        part, piece = places[0]
        try:
            async with asyncio.timeout(limit_s):
                request = self._message(msgpack.packb(places))
                stream = await self._call(reducer, "rpc_show_pieces", as_aiter(request))
                try:
                    for part, piece in places:
                        shown = [await _shown(stream) for _ in self._order]
                        await in_executor(self._checker.check, part, piece, shown)
                        self._right.add((part, piece))
                finally:
                    with contextlib.suppress(Exception):
                        await stream.aclose()
        except WrongAverage:
            return Accusation(part, piece, is_refusal=False)
        except Exception as error:
            self._ran_out |= self._is_short and isinstance(error, TimeoutError)
            logger.debug("%s shows nothing", self._name(reducer), exc_info=error)
            return Accusation(part, piece, is_refusal=True)
        return None

    # Verdicts.

    def _can_be_called(self, place: int) -> bool:
        return self._group.shares[place] > 0

    def _exchanges_with(self, place: int) -> bool:
        is_other = place != self._me
        return is_other and (self._can_be_called(place) or self._can_be_called(self._me))

    def _calls(self, place: int) -> bool:
        """Tell whether this member calls that one, and is not called by it."""
        if self._can_be_called(place) and self._can_be_called(self._me):
            return self._me < place
        return self._can_be_called(place)

    async def _exchange(self, place: int) -> None:
        try:
            stream = await self._call(place, "rpc_compare", self._say(relays=False))
            try:
                await self._listen(place, stream)
            finally:
                with contextlib.suppress(Exception):
                    await stream.aclose()
        except Exception as error:
            logger.debug("%s says no verdict", self._name(place), exc_info=error)
        finally:
            self._has_ended(place)

    async def _say(self, *, relays: bool) -> AsyncIterator[Message]:
        """Say this member's verdict, then what is heard from others, until that is all."""
        await asyncio.wait({self._own})
        if self._own.cancelled():
            return
        yield self._message(self._own.result().to_bytes())
        told = 0
        while True:
            while relays and told < len(self._relayed):
                told += 1
                yield self._message(Verdict({}, self._relayed[told - 1]).to_bytes())
            if self._settled.is_set():
                return
            self._news.clear()
            await self._news.wait()

    async def _listen(self, place: int, stream: AsyncIterator[Message]) -> None:
        """Hear a member's verdict, then what it heard from others."""
        count = 0
        try:
            async for message in stream:
                data = message.tensor_part.buffer
                count += 1
                if message.code != averaging_pb2.ACCEPTED or count > len(self._order):
                    break
                verdict = Verdict.from_bytes(data, self._reducers, self._sizes)
                # What others say is compared with averages that this member may not have yet.
                await asyncio.wait({self._own})
                if self._own.cancelled():
                    break
                await self._hear(place, verdict, at_first_hand=count == 1)
                self._has_been_heard(place)
        finally:
            self._has_ended(place)

    async def _hear(self, place: int, verdict: Verdict, *, at_first_hand: bool) -> None:
        for reducer, (digest, signature) in verdict.averages.items():
            own = self._averages.get(reducer)
            if own is None or digest == own[0]:
                continue
            if self._signed(reducer, digest, signature):
                name, other = self._name(reducer), self._name(place)
                reason = f"peer {name} gave peer {other} another average"
                self._fail(reason, reducer, is_proven=True)
            else:
                self._liars.add(place)
        accusation = verdict.accusation
        if accusation is None:
            return
        if accusation not in self._relayed:
            self._relayed.append(accusation)
            self._news.set()
        found = await self._find_out(accusation)
        if found is not None:
            self._blame(found)
        elif at_first_hand and not accusation.is_refusal:
            self._liars.add(place)

    async def _find_out(self, accusation: Accusation) -> Accusation | None:
        """Ask for a piece, as somebody accuses its reducer; returns what is wrong with it."""
        place = accusation.part, accusation.piece
        reducer = self._reducers[accusation.part]
        if reducer == self._me or place in self._right:
            return None
        self._audits[reducer] += 1
        found = await self._ask(reducer, [place], LOOK_SILENCES * self._silence_s)
        self._audits -= Counter([reducer])
        return found

    def _blame(self, accusation: Accusation) -> None:
        reducer = self._reducers[accusation.part]
        what = "does not show what it averaged" if accusation.is_refusal else "averaged wrongly"
        self._fail(
            f"peer {self._name(reducer)} {what} (part {accusation.part})",
            reducer,
            is_proven=not accusation.is_refusal,
        )

    def _fail(self, reason: str, reducer: int, *, is_proven: bool = False) -> None:
        known = self._failure
        if known is None or (is_proven and not known.is_proven):
            culprits = (self._name(reducer),)
            self._failure = AveragingFailed(
                reason, self._group.peers, culprits, is_proven=is_proven
            )

    def _has_been_heard(self, place: int) -> None:
        if not self._heard[place].done():
            self._heard[place].set_result(None)

    def _has_ended(self, place: int) -> None:
        self._has_been_heard(place)
        if not self._ended[place].done():
            self._ended[place].set_result(None)

    def _name(self, place: int) -> str:
        return self._group.peers[place]

    def _message(self, data: bytes) -> Message:
        return Message(
            code=averaging_pb2.ACCEPTED,
            group_id=self._group.group_id,
            tensor_part=runtime_pb2.Tensor(buffer=data),
        )

    # What others ask of this member.

    def _place_of(self, context: P2PContext) -> int:
        """Return the caller's place; a stranger has this member's own, with which nobody calls."""
        name = context.remote_id.to_base58()
        peers = self._group.peers
        return peers.index(name) if name in peers else self._me

    async def rpc_show_pieces(
        self, stream: AsyncIterator[Message], context: P2PContext
    ) -> AsyncIterator[Message]:
        """Show a member the contributions to pieces that this one has averaged."""
        sender = self._place_of(context)
        try:
            request = await anext(stream)
            places = msgpack.unpackb(request.tensor_part.buffer, use_list=False)
            self._asked[sender] += len(places)
            most = self._rule.check_pieces + len(self._order)
            if sender == self._me or self._asked[sender] > most:
                raise ValueError("too many pieces")
            for part, piece in places:
                for member in self._order:
                    data = await in_executor(self.kept.show, member, part, piece)
                    yield Message(
                        code=averaging_pb2.PART_FOR_AVERAGING,
                        tensor_part=runtime_pb2.Tensor(buffer=data),
                    )
        except Exception as error:
            logger.debug("%s asks for what is not here", self._name(sender), exc_info=error)
            yield Message(code=averaging_pb2.PROTOCOL_VIOLATION)
        await until_closed(stream)

    async def rpc_compare(
        self, stream: AsyncIterator[Message], context: P2PContext
    ) -> AsyncIterator[Message]:
        """Exchange verdicts with a member that calls."""
        sender = self._place_of(context)
        if sender in self._came or sender not in self._heard or self._calls(sender):
            yield Message(code=averaging_pb2.PROTOCOL_VIOLATION)
            await until_closed(stream)
            return
        self._came.add(sender)
        listening = asyncio.create_task(self._listen(sender, stream))
        try:
            async for message in self._say(relays=True):
                yield message
            await asyncio.wait({listening}, timeout=self._silence_s)
        finally:
            listening.cancel()
            self._has_ended(sender)
        # The caller, which cannot know how many verdicts there are, closes when there is none.
        yield Message()
        await asyncio.sleep(STAY_S)


async def _shown(stream: AsyncIterator[Message]) -> bytes:
    message = await anext(stream)
    if message.code != averaging_pb2.PART_FOR_AVERAGING:
        raise ConnectionError(averaging_pb2.MessageCode.Name(message.code))
    return message.tensor_part.buffer


def make_step_check(
    group: AgreedGroup,
    rule: AveragingRule,
    codec: PartCodec,
    topology: Topology,
    order: Sequence[int],
    flat: torch.Tensor,
    me: int,
    silence_s: float,
    call: Callable[[int, str, AsyncIterator[Message]], Any],
    signing: Signing | None,
) -> StepCheck | None:
    """Return a member's check of a group that has committed to its contributions.

    There is none where the rule has none, and in two levels: there a reducer averages sums, which
    nobody committed to.
    """
    is_checked = rule.check_pieces > 0 and len(topology.sections) == 1
    if signing is None or not group.commitments or not is_checked:
        return None
    sizes = rule.part_sizes(flat.numel())
    commitments = [group.commitments[member] for member in order]
    weights, paths = rule.weights(group.table, group.usual), [row.path for row in group.table]
    return StepCheck(
        me=me,
        group=group,
        rule=rule,
        reducers=topology.reducers[0],
        sizes=sizes,
        order=order,
        kept=KeptContributions(codec, rule, group.commitments, sizes),
        checker=PieceChecker(
            codec, rule, commitments, weights, paths, group.usual.norms, sizes, flat
        ),
        silence_s=silence_s,
        call=call,
        signing=signing,
    )
