"""From what a user calls a model to files on disk: names, caches, downloads."""
