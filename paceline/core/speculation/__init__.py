"""Guessing what a request's next tokens will be."""
