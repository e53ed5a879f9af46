"""Commands that serve: ``serve`` with its engine process, ``gateway``, and ``fleet`` of several."""
