"""What the owner of a machine wants of the peer on it: when it trains, and how much it takes."""
