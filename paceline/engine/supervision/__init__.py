"""Engines that end, hang or are stopped: replaced, and the request that ended them found."""
