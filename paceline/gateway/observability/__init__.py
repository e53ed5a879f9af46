"""What the gateway tells of its requests: metrics and traces."""
