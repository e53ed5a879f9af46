"""From a model's name to one engine: routes, the choice among them, and whose turn it is."""
