"""What are the documents of a run, and how are they read?"""
