"""Supervision: engines that end, hang or are stopped are replaced, and the request at fault is
found."""
