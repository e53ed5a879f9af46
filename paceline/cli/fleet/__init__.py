"""``paceline fleet``: replicas placed, watched and updated, behind gateways."""
