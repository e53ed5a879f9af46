"""Parts that every process which answers HTTP needs, for any API.

::

    socket      listening, tls
    connection  connections, slow_readers, bounds
    exchange    keys, rate_limits/, web, errors
    body        body, fields (in); sse, shortcut (out); exposition (metrics)

Nothing here knows engines, models or the meaning of a body. Imports ``core`` for its errors only.
"""
