"""Several models under one budget of memory, an engine process each."""
