"""How a path gives its next token, fast: here, by llama.cpp, or several paths as one."""
