"""Two readings of the metrics of a server or a gateway, and the changes between them.

The arithmetic of ``paceline top`` and of the page's promises. Imported on first use.

This module does not know where readings come from, or how they are shown.
"""

from paceline.server.observability.snapshot.frame import ClassRow, Frame, TenantRow, make_frame
from paceline.server.observability.snapshot.growth import Growth, Quantiles, ratio
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics

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
