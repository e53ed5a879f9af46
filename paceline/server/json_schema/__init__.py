"""Which JSON schemas an output can be held to: ``check`` by keyword, ``width`` by what is left
open."""
