"""A request's body as the gateway reads it: a few fields, and how long its prompt is."""
