"""Flags and what they become: parsers, options shared by commands, settings."""
