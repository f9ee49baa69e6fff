"""Which tokens do documents become, and which of these are learned?"""
