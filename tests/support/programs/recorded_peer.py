"""`dipaco-peer`, with a copy of every byte that it or a process of its hands to a socket.

    python -m support.programs.recorded_peer FOLDER dipaco-peer's words

p2pd encrypts what leaves the machine. Everything that a peer sends goes to p2pd first, in plain, over
a local socket: streams of the exchange, the DHT, and requests to p2pd itself. asyncio's writers are
all that Hivemind and the exchange use for that; other libraries use `socket.socket`. Both are recorded
in FOLDER, a file for each process. Processes of a peer are forked, so they record as well.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

from dipaco.peer.peer_command import main


def record_into(folder):
    """Copy what is sent from now on into a file of `folder`."""

    def note(*parts):
        with (folder / f"{os.getpid()}.bytes").open("ab") as file:
            for part in parts:
                file.write(part)

    def recorded(owner, name, parts_of):
        send = getattr(owner, name)

        def recording(self, data, *more):
            parts = [bytes(part) for part in parts_of(data)]
            note(*parts)
            return send(self, parts if parts_of is list else data, *more)

        setattr(owner, name, recording)

    for owner, name in (
        (asyncio.StreamWriter, "write"), (socket.socket, "send"), (socket.socket, "sendall"), (socket.socket, "sendto")
    ):  # fmt: skip
        recorded(owner, name, lambda data: [data])
    for owner, name in ((asyncio.StreamWriter, "writelines"), (socket.socket, "sendmsg")):
        recorded(owner, name, list)


if __name__ == "__main__":
    record_into(Path(sys.argv.pop(1)))
    sys.exit(main())
