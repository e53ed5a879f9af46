"""Where keys and values are kept: blocks, the prefix cache, the host, and who gives way."""
