"""Scoring the operator's router documents while training (design 4.8)."""
