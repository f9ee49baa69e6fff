"""What would a run be, before anything is made?"""
