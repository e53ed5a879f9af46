"""Choice of an engine for a model's name: routes, the picker, flow control."""
