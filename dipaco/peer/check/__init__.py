"""`dipaco-peer --check`: what would go wrong on this machine, before anything is joined."""
