"""Peers and what lies between them: keys, nodes, streams, networks."""
