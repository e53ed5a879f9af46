"""Commands that look at what runs: ``top``, ``ps``, ``trace``, ``bench``, ``doctor``."""
