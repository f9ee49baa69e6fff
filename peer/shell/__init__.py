"""How is what a member decides carried out?"""
