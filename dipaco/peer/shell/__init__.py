"""How are the decisions of a member carried out?"""
