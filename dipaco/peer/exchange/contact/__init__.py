"""Which peers are known, can they be called, and what do their clocks say?"""
