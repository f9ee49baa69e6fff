"""Which versions a module has: signed rows, the steps that hold them, and the chains of these."""
