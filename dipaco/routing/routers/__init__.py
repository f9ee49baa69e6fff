"""Which path does a document go to?"""
