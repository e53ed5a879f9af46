"""Prometheus metrics under vLLM's names, buckets and labels, and our own under ``paceline:``.

::

    RequestObserver, middleware, engine snapshots --> families of one Registry --> render()

docs/operate/metrics.md lists every family; a test compares it with what is served.
"""
