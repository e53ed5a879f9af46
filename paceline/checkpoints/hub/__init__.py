"""Model names resolved to files on disk: names, caches, downloads."""
