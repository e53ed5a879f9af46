"""JSON schemas that an output can follow: ``check`` tests keywords, ``width`` the open choices."""
