"""``paceline top``: a running server in a terminal, from its ``/metrics`` alone.

::

    scrape.py          GET /metrics -> text
    server/readings    text -> Scrape                   numbers by name and labels
                       two Scrapes -> Frame             what happened in between, plain values
    view.py            Frame -> rich                    for people
    command.py         flags, the loop, JSON
"""

from paceline.cli.top.command import add_parser

__all__ = ["add_parser"]
