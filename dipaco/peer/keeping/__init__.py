"""What does a peer fetch, compute and keep on its disk, for itself and for others?"""
