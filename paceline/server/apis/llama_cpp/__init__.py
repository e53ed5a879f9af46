"""llama-server's own endpoints."""
