"""``paceline top``: running servers and gateways in a terminal, from their own metrics.

::

    scrape.py          GET /metrics, /status            texts as received
    snapshot           two of these -> Frame            changes between them, plain values
    gateway_frame.py   with /status -> GatewayFrame     the same for a gateway and its engines
    watch.py           one address, repeatedly          whichever of both answers there
    view.py, gateway_view.py, fleet_view.py   -> rich   for users
    command.py         flags, the loop, JSON
"""

from paceline.cli.watch.top.command import add_parser

__all__ = ["add_parser"]
