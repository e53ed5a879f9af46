"""Where keys and values are kept: blocks, the prefix cache, and the host."""
