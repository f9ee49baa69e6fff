"""Who carries out what a member decides?"""
