"""The page's what-if: one simulation at a time, in a process of its own."""
