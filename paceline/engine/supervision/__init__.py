"""Supervision: replacing engines that end, hang or are stopped, and finding the culprit."""
