"""Commands about models on this machine: ``pull``, ``list``, ``rm``."""
