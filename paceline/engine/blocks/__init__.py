"""KV blocks outside the engine's memory, found by their hash: on disk, and at other engines.

::

    pool --evicted, idle, at drain--> keeper --> DiskStore
    pool <--land-- Arrivals (engine/process) <-- DiskStore | Peer
    pool --asked--> keeper --> BlockServer --> a peer's Peer

This room does not know requests: ``engine/process/arrivals.py`` does.
"""
