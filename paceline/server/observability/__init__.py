"""What is counted and traced of requests, and readings of these counts."""
