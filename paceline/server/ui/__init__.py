"""The page at ``/ui``: files of this folder, and nothing from elsewhere."""
