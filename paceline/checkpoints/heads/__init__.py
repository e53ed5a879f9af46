"""What lies beside or behind a model: heads that draft tokens, heads that pool."""
