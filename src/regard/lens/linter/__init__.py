"""Find common bugs in attention code by running it: change a token, pad a text, fill a cache, and compare."""
