"""What carries out the decisions of a member?"""
