"""The same work on other engines, side by side: ``python -m benchmarks.peers``.

Modules named after an engine hold both ends of it: the ``Peer``, which the benchmark imports, and
the worker, which runs in that engine's own environment. Those modules and ``jobs`` import nothing
outside the standard library at the top.
"""
