"""Backends without a model: tokens by hand arithmetic, at once or in modelled time."""
