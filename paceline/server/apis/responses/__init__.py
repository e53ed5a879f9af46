"""``/v1/responses``: OpenAI's response objects and typed events."""
