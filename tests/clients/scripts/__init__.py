"""Scripts that run in the clients' environments, and what they share."""
