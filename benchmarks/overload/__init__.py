"""Lasting overload: the share of targets that a server meets for as long as it lasts."""
