"""What every process that answers HTTP needs, whichever API it speaks.

::

    socket      listening, tls
    connection  connections, slow_readers, bounds
    exchange    keys, rate_limits/, web, errors
    body        body, fields (in); sse, shortcut (out); exposition (metrics)

Nothing here knows engines, models or what a body means. Imports ``core`` for its errors alone.
"""
