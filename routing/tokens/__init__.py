"""Which tokens are they, and which of these are learned?"""
