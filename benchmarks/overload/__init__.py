"""Overload that lasts: what a server keeps of its promises for as long as it lasts."""
