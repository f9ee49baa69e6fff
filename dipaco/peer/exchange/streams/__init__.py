"""How does a peer speak with another: streams, messages, calls, and how many of them?"""
