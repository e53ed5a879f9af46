"""Clients that people use, each in an environment of its own, talking to a live server:
``python -m tests.clients``, or ``make test-clients``.

``scripts/`` run in those environments; they import nothing of the project's.
"""
