"""The sizes of messages and records on the wire, to count traffic that is only simulated or
planned.

The simulated swarm (`dipaco.simulator.swarm`) counts with these sizes, and so does
`dipaco-bootstrap plan`. Nothing on the wire follows from them.
"""

from __future__ import annotations

# Bytes of a message with hardly any content: headers, acknowledgements.
CALL_BYTES = 300
# Bytes of a signed row in a message.
ROW_BYTES = 254
# Signed records: of a module and of the state that its writer holds, of a peer, and of how far
# paths are, with an entry for each.
MODULE_BYTES, HELD_BYTES = 360, 150
PEER_BYTES = 644
PROGRESS_BYTES, ENTRY_BYTES = 275, 60
# What a visited node of the DHT answers beside a value: its neighbours.
VISIT_BYTES = 1800
# To read or write a key, so many nodes are visited, and so many of them store it.
NODES_VISITED, NODES_STORED = 20, 5
