"""Plans carried out: the engine's loop, its process, and the text on either side of it."""
