"""Which path has a document?"""
