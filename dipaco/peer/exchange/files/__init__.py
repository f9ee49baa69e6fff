"""How is content served by its hash, and fetched from several holders?"""
