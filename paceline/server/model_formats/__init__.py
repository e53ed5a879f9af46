"""How models write what is more than text: tool calls, thoughts, JSON of a schema."""
