"""A request from prompt to engine, and what all endpoints share of that."""
