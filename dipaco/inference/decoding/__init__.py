"""How a path gives its next token fast: in PyTorch, NumPy or llama.cpp, or several as one."""
