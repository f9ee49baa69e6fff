"""How a peer lives: its node, shell, presence, states, exchange, check, owner and reports."""
