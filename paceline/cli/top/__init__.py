"""``paceline top``: running servers and gateways in a terminal, from what they tell of themselves.

::

    scrape.py          GET /metrics, /status            as they came
    server/readings    two of these -> Frame            what happened in between, plain values
    gateway_frame.py   with /status -> GatewayFrame     the same of a gateway and its engines
    watch.py           one address, again and again     whichever of both answers there
    view.py, gateway_view.py, fleet_view.py   -> rich   for people
    command.py         flags, the loop, JSON
"""

from paceline.cli.top.command import add_parser

__all__ = ["add_parser"]
