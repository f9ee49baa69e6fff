"""Meeting in a group that waits for its members and not for the clock. In the averager's process.

With fixed steps the members of a group come seconds or minutes apart. Hivemind's matchmaking is
made for members that come together and know when it ends, so it is told less here: whoever came
first leads, because everybody declares the moment of coming plus the same long time; Hivemind
never closes a group by itself; and it looks around a few times a second, not all the time. The
group closes when all that are awaited are in it, or when the leader's limit has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKey, GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID
from hivemind.utils import DHTExpiration
from hivemind.utils.timed_storage import get_dht_time

from .parts import AveragingRequest

# Between two looks at the group.
_LOOK_S = 0.05
# Between two requests to the DHT for others that came.
_SEARCH_S = 0.25
# After so long a leader that refused, or did not answer, is asked again.
_ASK_AGAIN_S = 1.0
# A leader may be busy: who comes has time.
_REQUEST_TIMEOUT_S = 5.0
# Hivemind closes no group that has fewer members than this.
_NEVER = 2**30


class _PacedKeys(GroupKeyManager):
    """Asks the DHT for others only so often."""

    _asked_s = float("-inf")

    async def get_averagers(
        self, group_key: GroupKey, only_active: bool
    ) -> list[tuple[PeerID, DHTExpiration]]:
        """Return who is declared under a key, like Hivemind's."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._asked_s + _SEARCH_S - loop.time()))
        self._asked_s = loop.time()
        found: list[tuple[PeerID, DHTExpiration]] = await super().get_averagers(
            group_key, only_active
        )
        return found


async def meet_awaited(
    matchmaking: Matchmaking, request: AveragingRequest, tell: Callable[[int], None]
) -> GroupInfo | None:
    """Return the group, or None when nobody came or the request was withdrawn.

    `tell` hears how many are together here, or 0 when another peer leads.
    """
    with _patient(matchmaking, request.group_bits):
        search = asyncio.ensure_future(matchmaking.look_for_group(request))
        closing = asyncio.ensure_future(_close_in_time(matchmaking, request, tell))
        try:
            await asyncio.wait({search, closing}, return_when=asyncio.FIRST_COMPLETED)
            if search.done() or await closing:
                return await search
            return None
        finally:
            for task in (closing, search):
                task.cancel()
            await asyncio.gather(closing, search, return_exceptions=True)


@contextlib.contextmanager
def _patient(matchmaking: Matchmaking, group_bits: str) -> Iterator[None]:
    """Let Hivemind look for a group slowly, and leave its closing to `_close_in_time`."""
    keys = matchmaking.group_key_manager
    size, timeout_s = matchmaking.min_group_size, matchmaking.request_timeout
    matchmaking.group_key_manager = _PacedKeys(keys.dht, keys.prefix, group_bits, None)
    matchmaking.min_group_size, matchmaking.request_timeout = _NEVER, _REQUEST_TIMEOUT_S
    try:
        yield
    finally:
        matchmaking.group_key_manager = keys
        matchmaking.min_group_size, matchmaking.request_timeout = size, timeout_s


async def _close_in_time(
    matchmaking: Matchmaking, request: AveragingRequest, tell: Callable[[int], None]
) -> bool:
    """Close the group that this peer leads; False when it should look no further."""
    own = request.rules.own.peer
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    while True:
        await asyncio.sleep(_LOOK_S)
        if request.awaited is None:
            return False
        if loop.time() - asked_s > _ASK_AGAIN_S:
            asked_s = loop.time()
            leaders = matchmaking.potential_leaders
            leaders.past_attempts.clear()
            leaders.update_triggered.set()
        async with matchmaking.lock_request_join_group:
            if matchmaking.assembled_group.done():
                return True
            if matchmaking.current_leader is not None:
                tell(0)
                continue  # That peer closes the group, within its own limit.
            members = {own, *(peer.to_base58() for peer in matchmaking.current_followers)}
            tell(len(members))
            is_over = get_dht_time() >= request.close_s
            if len(members) > 1 and (is_over or members >= request.awaited):
                await matchmaking.leader_assemble_group()
                return True
            if is_over:
                return False
