"""How is a run made, from nothing or from another run?"""
