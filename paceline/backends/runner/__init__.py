"""Plans in, arrays through a model, tokens out: what all compute paths share."""
