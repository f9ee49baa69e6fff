"""Serving content and fetching it by hash; greeting peers, their clocks and reachability."""
