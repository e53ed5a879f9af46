"""The page at ``/ui``: files of this folder only."""
