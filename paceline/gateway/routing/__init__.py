"""From a model's name to one engine: routes, the choice among them, and flow control."""
