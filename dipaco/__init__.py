"""A peer-to-peer volunteer network that trains one modular language model (DiPaCo)."""
