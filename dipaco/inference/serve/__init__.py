"""`dipaco-serve`: which path a request is for, and llama.cpp's servers, which answer it."""
