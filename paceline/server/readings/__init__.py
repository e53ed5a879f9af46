"""Two readings of the metrics of a server or a gateway, and what it did in between.

The arithmetic of ``paceline top`` and of the page's promises. Imported when somebody looks.

This module does not know where readings come from, or how they are shown.
"""

from paceline.server.readings.frame import ClassRow, Frame, TenantRow, make_frame
from paceline.server.readings.growth import Growth, Quantiles, ratio
from paceline.server.readings.scrape import Scrape, parse_metrics

__all__ = [
    "ClassRow",
    "Frame",
    "Growth",
    "Quantiles",
    "Scrape",
    "TenantRow",
    "make_frame",
    "parse_metrics",
    "ratio",
]
