"""What a server is told at start."""
