"""``paceline top``: running servers and gateways in a terminal, from their own metrics.

::

    watch.py           GET /metrics, /status            texts of one address, repeatedly
    snapshot           two of these -> Frame            changes between them, plain values
    gateway_frame.py   with /status -> GatewayFrame     the same for a gateway and its engines
    view.py, gateway_view.py   -> rich                  for users
    command.py         flags, the loop, JSON
"""
